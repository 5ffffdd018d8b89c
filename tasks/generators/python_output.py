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


Program = tuple[str, str, list[str]]
"""(setup, the expression printed, neighbouring expressions whose results are about as long)."""


def _numbers(draw: Draw, count: int) -> list[int]:
    return draw.some(range(1, 20), count)


def _index(draw: Draw) -> Program:
    values = _numbers(draw, draw.between(3, 5))
    at = draw.one([0, 1, len(values) - 1])
    name = -1 if at == len(values) - 1 and draw.below(2) == 0 else at
    return f"x = {values}", f"x[{name}]", [f"x[{other}]" for other in range(len(values)) if other != at]


def _slice(draw: Draw) -> Program:
    values = _numbers(draw, 5)
    low = draw.between(0, 3)
    return f"x = {values}", f"x[{low}:{low + 2}]", [f"x[{other}:{other + 2}]" for other in range(4) if other != low]


def _sorted(draw: Draw) -> Program:
    values = _numbers(draw, 3)
    rotations = ["sorted(x)[1:] + sorted(x)[:1]", "sorted(x)[2:] + sorted(x)[:2]", "sorted(x)[::-1]"]
    return f"x = {values}", "sorted(x)", rotations


def _reduce(draw: Draw) -> Program:
    values = _numbers(draw, draw.between(3, 4))
    call = draw.one(["max", "min", "len"])
    return f"x = {values}", f"{call}(x)", ["max(x)", "min(x)", "len(x)", "x[0]", "x[-1]", "len(x) + 1"]


def _join(draw: Draw) -> Program:
    first, second = _numbers(draw, 2), _numbers(draw, 2)
    return f"x = {first}\ny = {second}", "x + y", ["y + x", "x + x", "y + y", "x[::-1] + y", "x + y[::-1]"]


def _append(draw: Draw) -> Program:
    values, new = _numbers(draw, 3), draw.between(1, 19)
    wrong = ["x[-1:] + x[:-1]", "x[:1] + x[-1:] + x[1:-1]", "x[:-1] + x[:1]", "x[1:] + x[-1:]"]
    return f"x = {values}\nx.append({new})", "x", wrong


def _text(draw: Draw) -> Program:
    word = draw.one(_WORDS)
    asked = draw.one(["s[0]", "s[-1]", "len(s)", "s[:2]"])
    wrong = {
        "len(s)": ["len(s) + 1", "len(s) - 1", "len(s) + 2", "len(s) - 2"],
        "s[:2]": ["s[1:3]", "s[2:4]", "s[-2:]", "s[1] + s[0]"],
    }.get(asked, [f"s[{index}]" for index in range(len(word))])
    return f"s = '{word}'", asked, wrong


def _glue(draw: Draw) -> Program:
    first, second = draw.some(_WORDS, 2)
    sign = draw.one(["", " + '-'", " + ' '"])
    right = f"a{sign} + b"
    return f"a = '{first}'\nb = '{second}'", right, [f"b{sign} + a", f"a{sign} + a", f"b{sign} + b"]


def _mapping(draw: Draw) -> Program:
    keys, values = draw.some(_WORDS, 3), _numbers(draw, 3)
    entries = ", ".join(f"'{key}': {value}" for key, value in zip(keys, values, strict=True))
    key = draw.one(keys)
    return f"d = {{{entries}}}", f"d['{key}']", [f"d['{other}']" for other in keys if other != key]


def _function(draw: Draw) -> Program:
    step, value = draw.between(1, 5), draw.between(1, 12)
    sign = draw.one("+-*")
    setup = f"def f(n):\n    return n {sign} {step}"
    return setup, f"f({value})", [f"f({value}) + 1", f"f({value}) - 1", f"f({value}) + 2", f"{value}", f"{step}"]


def _swap(draw: Draw) -> Program:
    first, second = _numbers(draw, 2)
    setup = f"a = {first}\nb = {second}"
    if draw.below(2) == 0:
        setup += "\na, b = b, a"
    return setup, draw.one(["a", "b"]), ["a", "b", "a + 1", "b + 1", "a + b"]


def _product(draw: Draw) -> Program:
    first, second = draw.between(2, 9), draw.between(2, 9)
    setup = f"a = {first}\nb = {second}"
    sign = draw.one("+*")
    return setup, f"a {sign} b", [f"a {sign} b + 1", f"a {sign} b - 1", f"a {sign} b + 2", f"a {sign} b + 10"]


_KINDS: dict[str, Callable[[Draw], Program]] = {
    "index": _index,
    "slice": _slice,
    "order": _sorted,
    "reduce": _reduce,
    "join": _join,
    "append": _append,
    "text": _text,
    "glue": _glue,
    "dictionary": _mapping,
    "function": _function,
    "swap": _swap,
    "arithmetic": _product,
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
