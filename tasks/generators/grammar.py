"""Minimal pairs: two sentences that differ in one word or form, of which one is English.

Ten phenomena in the spirit of BLiMP (Warstadt et al., TACL 2020), with templates and word lists of our own. The model
is right when it finds the grammatical sentence the more likely one.
"""

from collections.abc import Callable

from tasks.generators.draw import Draw, words

ITEMS_PER_PHENOMENON = 80

_PEOPLE = words("teacher doctor lawyer farmer sailor writer painter student singer pilot waiter banker driver dancer")
_THINGS = words("key letter painting picture chair lamp bottle ticket basket ladder pencil blanket bicycle guitar")
_PLACES = words("cabinet window garden river station bridge market library tower castle stadium museum")
_WOMEN = words("Mary Anna Laura Emily Susan Karen Julia Sarah Alice Helen Linda Rachel")
_MEN = words("John Peter David Robert Thomas George Daniel Steven Edward Patrick Henry Martin")
_ADJECTIVES = words("old new clean heavy broken beautiful expensive famous strange useful")
_BETWEEN = words("near behind beside above below under")
_REFLEXIVE_VERBS = words("hurt blamed admired saw trusted described defended praised")
_SEEN = words("met admired visited followed helped called knew liked")
# base, past, participle: past and participle differ, so that the wrong one shows.
_IRREGULAR = [
    ("break", "broke", "broken", "the window"),
    ("write", "wrote", "written", "the letter"),
    ("steal", "stole", "stolen", "the money"),
    ("eat", "ate", "eaten", "the bread"),
    ("drive", "drove", "driven", "the truck"),
    ("choose", "chose", "chosen", "the color"),
    ("hide", "hid", "hidden", "the box"),
    ("wear", "wore", "worn", "the coat"),
    ("take", "took", "taken", "the train"),
    ("see", "saw", "seen", "the film"),
    ("give", "gave", "given", "the answer"),
    ("know", "knew", "known", "the truth"),
    ("draw", "drew", "drawn", "the map"),
    ("tear", "tore", "torn", "the paper"),
    ("forget", "forgot", "forgotten", "the name"),
]
_TRANSITIVE = words("broke carried found lost painted bought sold dropped cleaned built")
_INTRANSITIVE = words("slept laughed arrived vanished smiled cried sneezed fell waited appeared")


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("s", "x", "ch")) else "s")


def _agreement_across_phrase(draw: Draw) -> tuple[str, str]:
    plural = draw.below(2) == 0
    subject, attractor = draw.one(_THINGS), draw.one(_PLACES)
    head = f"The {_plural(subject) if plural else subject} {draw.one(_BETWEEN)} the "
    head += attractor if plural else _plural(attractor)
    past = draw.below(2) == 0
    verbs = ("were", "was") if past else ("are", "is")
    good, bad = verbs if plural else verbs[::-1]
    tail = draw.one(_ADJECTIVES)
    return f"{head} {good} {tail}.", f"{head} {bad} {tail}."


def _agreement_across_clause(draw: Draw) -> tuple[str, str]:
    plural = draw.below(2) == 0
    subject, other = draw.some(_PEOPLE, 2)
    head = f"The {_plural(subject) if plural else subject} that {draw.one(_SEEN)} the "
    head += other if plural else _plural(other)
    good, bad = ("have", "has") if plural else ("has", "have")
    tail = draw.one(["left the city", "gone home", "found a job", "lost the game", "arrived late", "moved away"])
    return f"{head} {good} {tail}.", f"{head} {bad} {tail}."


def _pronoun_case(draw: Draw) -> tuple[str, str]:
    name, person = draw.one(_WOMEN + _MEN), draw.one(_PEOPLE)
    good, bad = draw.one([("him", "he"), ("her", "she"), ("them", "they"), ("me", "I"), ("us", "we")])
    if draw.below(2) == 0:
        head, tail = f"{name} {draw.one(_SEEN)}", f"and the {person}."
    else:
        head, tail = f"{name} {draw.one(_SEEN)} the {person} and", f"near the {draw.one(_PLACES)}."
    return f"{head} {good} {tail}", f"{head} {bad} {tail}"


def _reflexive_number(draw: Draw) -> tuple[str, str]:
    plural = draw.below(2) == 0
    subject, other = draw.some(_PEOPLE, 2)
    head = f"The {_plural(subject) if plural else subject} who {draw.one(_SEEN)} the "
    head += f"{other if plural else _plural(other)} {draw.one(_REFLEXIVE_VERBS)}"
    good, bad = ("themselves", "himself") if plural else ("himself", "themselves")
    return f"{head} {good}.", f"{head} {bad}."


def _determiner_noun(draw: Draw) -> tuple[str, str]:
    plural = draw.below(2) == 0
    good, bad = draw.one([("these", "this"), ("those", "that")])[:: 1 if plural else -1]
    adjective, noun = draw.one(_ADJECTIVES), draw.one(_THINGS)
    name, verb = draw.one(_WOMEN + _MEN), draw.one(_TRANSITIVE)
    tail = f"{adjective} {_plural(noun) if plural else noun}"
    return f"{name} {verb} {good} {tail}.", f"{name} {verb} {bad} {tail}."


def _polarity(draw: Draw) -> tuple[str, str]:
    head = f"The {draw.one(_PEOPLE)} near the {draw.one(_PLACES)} has"
    verb = draw.one([verb for verb in _SEEN if verb != "knew"])
    tail = f"ever {verb} the {draw.one(_PEOPLE)}."
    return f"{head} not {tail}", f"{head} {draw.one(['also', 'only', 'often', 'really'])} {tail}"


def _participle(draw: Draw) -> tuple[str, str]:
    _, past, participle, thing = draw.one(_IRREGULAR)
    name, time = draw.one(_WOMEN + _MEN), draw.one(["already", "just", "often", "never", "finally"])
    if draw.below(2) == 0:
        return f"{name} has {time} {participle} {thing}.", f"{name} has {time} {past} {thing}."
    return f"{name} {time} {past} {thing}.", f"{name} {time} {participle} {thing}."


def _transitivity(draw: Draw) -> tuple[str, str]:
    person, thing = draw.one(_PEOPLE), draw.one(_THINGS)
    tail = f"the {draw.one(_ADJECTIVES)} {thing}."
    good, bad = draw.one(_TRANSITIVE), draw.one(_INTRANSITIVE)
    return f"The {person} {good} {tail}", f"The {person} {bad} {tail}"


def _filler_gap(draw: Draw) -> tuple[str, str]:
    name, person, verb = draw.one(_WOMEN + _MEN), draw.one(_PEOPLE), draw.one(_TRANSITIVE)
    head = f"{name} {draw.one(['knows', 'remembers', 'forgot', 'discovered'])}"
    if draw.below(2) == 0:
        tail = f"the {person} {verb}."
        return f"{head} what {tail}", f"{head} that {tail}"
    tail = f"the {person} {verb} the {draw.one(_THINGS)}."
    return f"{head} that {tail}", f"{head} what {tail}"


def _quantity(draw: Draw) -> tuple[str, str]:
    mass = draw.one(words("water bread money furniture rice music advice luggage butter sand"))
    counted = _plural(draw.one(_THINGS))
    tail = f"in the {draw.one(_PLACES)}."
    few, little = draw.one([("many", "much"), ("few", "little"), ("fewer", "less")])
    start = {"many": "There were not", "few": "There were very", "fewer": "There were"}[few]
    if draw.below(2) == 0:
        return f"{start} {few} {counted} {tail}", f"{start} {little} {counted} {tail}"
    start = start.replace("were", "was")
    return f"{start} {little} {mass} {tail}", f"{start} {few} {mass} {tail}"


_PHENOMENA: dict[str, Callable[[Draw], tuple[str, str]]] = {
    "agreement across a phrase": _agreement_across_phrase,
    "agreement across a clause": _agreement_across_clause,
    "pronoun case": _pronoun_case,
    "reflexive number": _reflexive_number,
    "determiner and noun": _determiner_noun,
    "polarity item": _polarity,
    "past and participle": _participle,
    "transitivity": _transitivity,
    "filler and gap": _filler_gap,
    "count and mass": _quantity,
}


def generate(seed: int) -> list[dict[str, object]]:
    """`ITEMS_PER_PHENOMENON` different pairs of each phenomenon, the phenomena taking turns."""
    draw = Draw(seed)
    by_phenomenon = []
    for phenomenon, make in _PHENOMENA.items():
        pairs: dict[tuple[str, str], None] = {}
        while len(pairs) < ITEMS_PER_PHENOMENON:
            pairs[make(draw)] = None
        by_phenomenon.append([(phenomenon, good, bad) for good, bad in pairs])
    items: list[dict[str, object]] = []
    for turn in zip(*by_phenomenon, strict=True):
        for phenomenon, good, bad in turn:
            choices, answer = draw.placed(good, [bad])
            items.append({"slice": phenomenon, "source": f"grammar-{len(items)}", "choices": choices, "answer": answer})
    return items
