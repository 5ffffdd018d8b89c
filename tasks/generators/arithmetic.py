"""Arithmetic by likelihood: which of three results does the model find most likely?

Sums and products follow three solved examples, the same for every question of the kind. Wrong results are the slips
that people make (off by one, a carry lost, the neighbouring product), as long and as plausible as the right one.
"""

from tasks.generators.draw import Draw

ITEMS = 360
WRONG_CHOICES = 2


def _sum(draw: Draw) -> tuple[str, int, list[int]]:
    a, b = draw.between(2, 25), draw.between(2, 25)
    shown = "4 + 9 = 13\n12 + 7 = 19\n15 + 11 = 26\n"
    return f"{shown}{a} + {b} =", a + b, [a + b + 1, a + b - 1, a + b + 10, a + b - 10, a + b + 2, a + b - 2]


def _product(draw: Draw) -> tuple[str, int, list[int]]:
    a, b = draw.between(2, 14), draw.between(2, 14)
    shown = "3 * 5 = 15\n7 * 4 = 28\n11 * 6 = 66\n"
    return f"{shown}{a} * {b} =", a * b, [a * (b + 1), a * (b - 1), a * b + 1, a * b - 1, (a + 1) * b, a * b + 10]


def _sequence(draw: Draw) -> tuple[str, int, list[int]]:
    start, step = draw.between(1, 40), draw.between(2, 11)
    shown = [start + step * index for index in range(4)]
    following = shown[-1] + step
    slips = [following + 1, following - 1, following + step, following + 10, following - 2, following + 2]
    return ", ".join(map(str, shown)) + ",", following, slips


_KINDS = {"sum": _sum, "product": _product, "sequence": _sequence}


def generate(seed: int) -> list[dict[str, object]]:
    """`ITEMS` different questions; the kinds take turns while they have new ones."""
    draw = Draw(seed)
    items: list[dict[str, object]] = []
    asked: set[str] = set()
    kinds = list(_KINDS.items())
    turn = 0
    while len(items) < ITEMS:
        kind, make = kinds[turn % len(kinds)]
        turn += 1
        question, right, slips = make(draw)
        if question in asked:
            continue
        asked.add(question)
        wrong = list(dict.fromkeys(slip for slip in slips if slip > 0 and slip != right))
        choices, answer = draw.placed(str(right), [str(slip) for slip in draw.some(wrong, WRONG_CHOICES)])
        items.append(
            {
                "slice": kind,
                "source": f"arithmetic-{len(items)}",
                "context": question,
                "choices": choices,
                "answer": answer,
            }
        )
    return items
