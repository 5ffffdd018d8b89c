"""Key-value retrieval: a list of "The KEY is in the VALUE." lines, then a question whose answer stands in one of them.

The task that needs nothing but reading back: it fails when attention over the KV cache does. Four lengths; the answer
counts when it is what the model would write greedily.
"""

from tasks.generators.draw import Draw, words

LENGTHS = (2, 4, 8, 16)
LISTS_PER_LENGTH = 100

_KEYS = words(
    "anchor apple arrow badge basket beacon bell blade boat bone book bottle box branch brick bridge brush bucket "
    "button cable candle canvas carpet chain chair chalk clock cloth coat coin crown cup curtain desk diamond drum "
    "engine feather flag flute fork glass glove hammer hat helmet horn iron jacket jar jewel kettle key kite knife "
    "ladder lamp lantern leaf lemon letter lock map medal mirror needle oven paddle pencil piano pillow ring rope"
)
_VALUES = words(
    "kitchen garden bedroom bathroom garage office attic cellar hall library closet barn car tent shed tower"
)


def generate(seed: int) -> list[dict[str, object]]:
    """One question about each list; the lengths take turns."""
    draw = Draw(seed)
    items: list[dict[str, object]] = []
    for index in range(LISTS_PER_LENGTH):
        for length in LENGTHS:
            keys, values = draw.some(_KEYS, length), draw.some(_VALUES, length)
            asked = draw.below(length)
            lines = [f"The {key} is in the {value}." for key, value in zip(keys, values, strict=True)]
            question = f"Question: Where is the {keys[asked]}?"
            items.append(
                {
                    "slice": f"{length} lines",
                    "source": f"retrieval-{length}-{index}",
                    "context": "\n".join([*lines, question, f"Answer: The {keys[asked]} is in the"]),
                    "target": f" {values[asked]}",
                }
            )
    return items
