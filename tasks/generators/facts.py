"""Fact cloze: a sentence that stops before its last word, with answers of the same kind to choose from.

Facts that any school book holds, in sentences of our own. Wrong answers come from the same list, so that only the fact
tells them apart; two phrasings of one fact share their `source`.
"""

from tasks.generators.draw import Draw

WRONG_CHOICES = 3


def entries(text: str) -> list[tuple[str, str]]:
    """(key, answer) of each "key=answer" in a comma-separated text."""
    return [tuple(entry.split("=")) for entry in text.split(", ")]  # type: ignore[misc]


# Each list: what it is about, one or two sentences with a gap at the end, and its facts.
_LISTS: list[tuple[str, tuple[str, ...], list[tuple[str, str]]]] = [
    (
        "capital",
        (
            "The capital of {} is",
            "The capital city of {} is called",
        ),
        entries(
            "France=Paris, Germany=Berlin, Italy=Rome, Spain=Madrid, Portugal=Lisbon, Austria=Vienna, "
            "Greece=Athens, Poland=Warsaw, Hungary=Budapest, Norway=Oslo, Sweden=Stockholm, Finland=Helsinki, "
            "Denmark=Copenhagen, Ireland=Dublin, Belgium=Brussels, Russia=Moscow, Ukraine=Kyiv, "
            "Romania=Bucharest, Bulgaria=Sofia, Serbia=Belgrade, Croatia=Zagreb, Turkey=Ankara, Japan=Tokyo, "
            "China=Beijing, India=Delhi, Thailand=Bangkok, Vietnam=Hanoi, Indonesia=Jakarta, Iran=Tehran, "
            "Iraq=Baghdad, Egypt=Cairo, Kenya=Nairobi, Ethiopia=Addis Ababa, Nigeria=Abuja, Ghana=Accra, "
            "Senegal=Dakar, Morocco=Rabat, Tunisia=Tunis, Canada=Ottawa, Cuba=Havana, Peru=Lima, "
            "Chile=Santiago, Argentina=Buenos Aires, Colombia=Bogota, Venezuela=Caracas, Ecuador=Quito, "
            "Australia=Canberra, Nepal=Kathmandu, Lebanon=Beirut, Syria=Damascus"
        ),
    ),
    (
        "continent",
        ("{} is a country on the continent of",),
        entries(
            "France=Europe, Poland=Europe, Sweden=Europe, Greece=Europe, Portugal=Europe, Austria=Europe, "
            "Japan=Asia, India=Asia, Vietnam=Asia, Thailand=Asia, Mongolia=Asia, Nepal=Asia, Kenya=Africa, "
            "Ghana=Africa, Nigeria=Africa, Senegal=Africa, Zambia=Africa, Uganda=Africa, Brazil=South America, "
            "Peru=South America, Chile=South America, Bolivia=South America, Colombia=South America, "
            "Ecuador=South America"
        ),
    ),
    (
        "language",
        ("Most people in {} speak",),
        entries(
            "France=French, Germany=German, Italy=Italian, Spain=Spanish, Mexico=Spanish, Brazil=Portuguese, "
            "Portugal=Portuguese, Austria=German, Japan=Japanese, Russia=Russian, Egypt=Arabic, Iraq=Arabic, "
            "Argentina=Spanish, Poland=Polish, Sweden=Swedish, Turkey=Turkish, Greece=Greek, England=English, "
            "Australia=English, Norway=Norwegian, Denmark=Danish, Hungary=Hungarian, Vietnam=Vietnamese, "
            "Thailand=Thai"
        ),
    ),
    (
        "currency",
        ("The currency used in {} is the",),
        entries(
            "Japan=yen, India=rupee, Russia=ruble, Mexico=peso, China=yuan, Germany=euro, France=euro, "
            "Brazil=real, Switzerland=franc, England=pound, Canada=dollar, Australia=dollar, Turkey=lira, "
            "South Africa=rand, Sweden=krona, Poland=zloty"
        ),
    ),
    (
        "opposite",
        (
            "The opposite of {} is",
            "If something is not {}, then it is",
        ),
        entries(
            "hot=cold, big=small, fast=slow, high=low, wet=dry, hard=soft, old=new, rich=poor, strong=weak, "
            "early=late, dark=light, empty=full, open=closed, clean=dirty, loud=quiet, wide=narrow, "
            "thick=thin, deep=shallow, heavy=light, happy=sad, right=wrong, true=false, alive=dead, "
            "easy=difficult, cheap=expensive, sharp=dull, smooth=rough, tall=short, safe=dangerous, "
            "tight=loose, ugly=beautiful, public=private"
        ),
    ),
    (
        "symbol",
        ("The chemical symbol {} stands for the element",),
        entries(
            "H=hydrogen, O=oxygen, N=nitrogen, C=carbon, He=helium, Fe=iron, Au=gold, Ag=silver, Cu=copper, "
            "Na=sodium, K=potassium, Ca=calcium, Cl=chlorine, S=sulfur, P=phosphorus, Zn=zinc, Pb=lead, "
            "Sn=tin, Hg=mercury, Al=aluminum, Mg=magnesium, Ne=neon, Ni=nickel, U=uranium, Si=silicon, "
            "F=fluorine, Li=lithium, I=iodine"
        ),
    ),
    (
        "young",
        ("A young {} is called a",),
        entries(
            "dog=puppy, cat=kitten, cow=calf, horse=foal, sheep=lamb, goat=kid, pig=piglet, bear=cub, "
            "lion=cub, duck=duckling, goose=gosling, deer=fawn, kangaroo=joey, frog=tadpole, swan=cygnet, "
            "owl=owlet, elephant=calf, fish=fry"
        ),
    ),
    (
        "kind",
        (
            "A {} is a kind of",
            "The {} belongs to a group of living things or objects known as a",
        ),
        entries(
            "sparrow=bird, eagle=bird, robin=bird, penguin=bird, salmon=fish, trout=fish, shark=fish, "
            "tuna=fish, rose=flower, tulip=flower, daisy=flower, lily=flower, oak=tree, pine=tree, maple=tree, "
            "birch=tree, ant=insect, bee=insect, beetle=insect, butterfly=insect, hammer=tool, saw=tool, "
            "wrench=tool, screwdriver=tool, violin=instrument, flute=instrument, trumpet=instrument, "
            "guitar=instrument, carrot=vegetable, potato=vegetable, onion=vegetable, cabbage=vegetable, "
            "apple=fruit, banana=fruit, pear=fruit, cherry=fruit, cobra=snake, python=snake"
        ),
    ),
    (
        "place of work",
        ("The place where a {} works is a",),
        entries(
            "teacher=school, doctor=hospital, nurse=hospital, farmer=farm, judge=court, baker=bakery, "
            "librarian=library, waiter=restaurant, banker=bank, actor=theater, scientist=laboratory, "
            "pilot=plane, sailor=ship, priest=church, miner=mine, chef=kitchen"
        ),
    ),
    (
        "made by",
        ("A person who makes or does {} for a living is called a",),
        entries(
            "bread=baker, furniture=carpenter, paintings=painter, music=musician, novels=writer, poems=poet, "
            "photographs=photographer, sculptures=sculptor, buildings=builder, clothes=tailor, "
            "experiments=scientist, dances=dancer, songs=singer"
        ),
    ),
    (
        "following",
        ("The month after {} is",),
        entries(
            "January=February, February=March, March=April, April=May, May=June, June=July, July=August, "
            "August=September, September=October, October=November, November=December, December=January"
        ),
    ),
    (
        "next day",
        ("The day after {} is",),
        entries(
            "Monday=Tuesday, Tuesday=Wednesday, Wednesday=Thursday, Thursday=Friday, Friday=Saturday, "
            "Saturday=Sunday, Sunday=Monday"
        ),
    ),
    (
        "colour",
        ("The usual color of {} is",),
        entries(
            "grass=green, snow=white, coal=black, blood=red, a lemon=yellow, a ripe banana=yellow, "
            "a clear sky=blue, a carrot=orange, milk=white, a ripe strawberry=red, chocolate=brown, "
            "an emerald=green, a ruby=red, a sapphire=blue, a crow=black, a flamingo=pink, an eggplant=purple, "
            "an elephant=gray"
        ),
    ),
    (
        "organ",
        ("The part of the body that is used to {} is the",),
        entries(
            "see=eye, hear=ear, smell=nose, taste=tongue, think=brain, pump blood=heart, breathe=lungs, "
            "digest food=stomach, chew=teeth, walk=legs, filter blood=kidneys"
        ),
    ),
    (
        "author",
        ("The author of {} is",),
        entries(
            "Hamlet=William Shakespeare, Oliver Twist=Charles Dickens, Pride and Prejudice=Jane Austen, "
            "War and Peace=Leo Tolstoy, Don Quixote=Miguel de Cervantes, The Odyssey=Homer, Faust=Goethe, "
            "Moby Dick=Herman Melville, Crime and Punishment=Fyodor Dostoevsky, The Divine Comedy=Dante, "
            "Frankenstein=Mary Shelley, Dracula=Bram Stoker, Jane Eyre=Charlotte Bronte, "
            "Tom Sawyer=Mark Twain, The Raven=Edgar Allan Poe, Les Miserables=Victor Hugo, "
            "The Time Machine=H. G. Wells, Treasure Island=Robert Louis Stevenson"
        ),
    ),
    (
        "discovery",
        ("The person known for {} is",),
        entries(
            "the theory of relativity=Albert Einstein, the laws of motion=Isaac Newton, "
            "evolution by natural selection=Charles Darwin, the discovery of radium=Marie Curie, "
            "the discovery of penicillin=Alexander Fleming, the telephone=Alexander Graham Bell, "
            "the light bulb=Thomas Edison, the printing press=Johannes Gutenberg, "
            "painting the Mona Lisa=Leonardo da Vinci, the steam engine=James Watt, "
            "radio waves=Heinrich Hertz, the periodic table=Dmitri Mendeleev, "
            "the laws of heredity=Gregor Mendel, dynamite=Alfred Nobel, pasteurization=Louis Pasteur"
        ),
    ),
]


def generate(seed: int) -> list[dict[str, object]]:
    """Every fact in every phrasing, shuffled."""
    draw = Draw(seed)
    items: list[dict[str, object]] = []
    for about, sentences, facts in _LISTS:
        for key, right in facts:
            wrong_pool = list(dict.fromkeys(answer for other, answer in facts if answer != right and other != key))
            if about == "opposite":
                wrong_pool = [answer for answer in wrong_pool if answer != key]
            for sentence in sentences:
                choices, answer = draw.placed(right, draw.some(wrong_pool, WRONG_CHOICES))
                items.append(
                    {
                        "slice": about,
                        "source": f"{about}-{key}",
                        "context": sentence.format(key),
                        "choices": choices,
                        "answer": answer,
                    }
                )
    return draw.some(items, len(items))
