"""Python output prediction: what does this program print?

Every expression is evaluated while generating, so the answers are right by construction; the wrong ones are results of
a neighbouring expression (another index, another order, one more or less).
"""

from collections.abc import Callable

from tasks.generators.draw import Draw, words

ITEMS = 360
WRONG_CHOICES = 2

_WORDS = words(
    "apple table river cloud stone bread light house plant music paper horse train green black white happy quick brown "
    "small world north south tiger piano lemon grape chair spoon knife"
)


def _numbers(draw: Draw, count: int) -> list[int]:
    return draw.some(range(1, 20), count)


def _index(draw: Draw) -> tuple[str, str, list[str]]:
    values = _numbers(draw, draw.between(4, 6))
    at = draw.between(0, len(values) - 1)
    negative = draw.below(2) == 0
    name = at - len(values) if negative else at
    return f"x = {values}", f"x[{name}]", [f"x[{other}]" for other in range(len(values)) if other != at]


def _slice(draw: Draw) -> tuple[str, str, list[str]]:
    values = _numbers(draw, draw.between(5, 6))
    low = draw.between(0, 2)
    high = low + 2
    return (
        f"x = {values}",
        f"x[{low}:{high}]",
        [f"x[{low + 1}:{high + 1}]", f"x[{low}:{high + 1}]", f"x[{low + 1}:{high}]", "x[-2:]", "x[:3]"],
    )


def _sorted(draw: Draw) -> tuple[str, str, list[str]]:
    values = _numbers(draw, draw.between(3, 4))
    if draw.below(2) == 0:
        return f"x = {values}", "sorted(x)", ["x", "x[::-1]", "sorted(x)[::-1]", "sorted(x)[1:] + sorted(x)[:1]"]
    return f"x = {values}", "x[::-1]", ["x", "sorted(x)", "sorted(x)[::-1]", "x[1:] + x[:1]"]


def _reduce(draw: Draw) -> tuple[str, str, list[str]]:
    values = _numbers(draw, draw.between(3, 4))
    call = draw.one(["sum", "max", "min", "len"])
    return f"x = {values}", f"{call}(x)", ["max(x)", "min(x)", "len(x)", "sum(x)", "x[0]", "x[-1]", "sum(x) + 1"]


def _append(draw: Draw) -> tuple[str, str, list[str]]:
    values = _numbers(draw, 3)
    new = draw.between(1, 19)
    return (
        f"x = {values}\nx.append({new})",
        "x",
        [f"[{new}] + x[:-1]", "x[:-1]", f"x + [{new}]", "x[1:]", "sorted(x)"],
    )


def _text(draw: Draw) -> tuple[str, str, list[str]]:
    word = draw.one(_WORDS)
    right = draw.one(["s.upper()", "s[::-1]", "s[0]", "s[-1]", "s[:2]", "s[1:]", "len(s)", "s.title()", "s * 2"])
    wrong = ["s.upper()", "s[::-1]", "s[0]", "s[-1]", "s[:2]", "s[1:]", "s[:3]", "s[-2:]", "s", "s.title()"]
    if right == "len(s)":
        wrong = ["len(s) + 1", "len(s) - 1", "len(s) + 2", "len(s) - 2"]
    if right in ("s[0]", "s[-1]"):
        wrong = [f"s[{index}]" for index in range(len(word))]
    return f"s = '{word}'", right, wrong


def _mapping(draw: Draw) -> tuple[str, str, list[str]]:
    keys, values = draw.some(_WORDS, 3), _numbers(draw, 3)
    entries = ", ".join(f"'{key}': {value}" for key, value in zip(keys, values, strict=True))
    key = draw.one(keys)
    wrong = [f"d['{other}']" for other in keys if other != key] + [f"d['{key}'] + 1", f"d['{key}'] + 10"]
    return f"d = {{{entries}}}", f"d['{key}']", wrong


def _comprehension(draw: Draw) -> tuple[str, str, list[str]]:
    values = _numbers(draw, 3)
    step = draw.between(1, 3)
    sign = draw.one(["+", "*"])
    right = f"[n {sign} {step} for n in x]"
    other = [f"[n {each} {by} for n in x]" for each in "+*" for by in (1, 2, 3, 4) if (each, by) != (sign, step)]
    return f"x = {values}", right, [*other, "x[::-1]"]


_KINDS: dict[str, Callable[[Draw], tuple[str, str, list[str]]]] = {
    "index": _index,
    "slice": _slice,
    "order": _sorted,
    "reduce": _reduce,
    "append": _append,
    "text": _text,
    "dictionary": _mapping,
    "comprehension": _comprehension,
}


def _printed(setup: str, expression: str) -> str:
    """What `print(expression)` shows after `setup`; both are our own templates, nothing else is run."""
    names: dict[str, object] = {}
    exec(setup, names)
    return str(eval(expression, names))


def generate(seed: int) -> list[dict[str, object]]:
    """`ITEMS` different snippets; the kinds take turns."""
    draw = Draw(seed)
    items: list[dict[str, object]] = []
    asked: set[str] = set()
    kinds = list(_KINDS.items())
    turn = 0
    while len(items) < ITEMS:
        kind, make = kinds[turn % len(kinds)]
        turn += 1
        setup, expression, neighbours = make(draw)
        question = f"{setup}\nprint({expression})\n# Output:"
        right = _printed(setup, expression)
        wrong = [shown for shown in dict.fromkeys(_printed(setup, each) for each in neighbours) if shown != right]
        if question in asked or len(wrong) < WRONG_CHOICES:
            continue
        asked.add(question)
        choices, answer = draw.placed(right, draw.some(wrong, WRONG_CHOICES))
        items.append(
            {
                "slice": kind,
                "source": f"python-{len(items)}",
                "context": question,
                "choices": choices,
                "answer": answer,
            }
        )
    return items
