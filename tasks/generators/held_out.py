"""Text for perplexity: the part of Python 3.11's own documentation that calibration never sees.

Of `pydoc_data.topics`, in alphabetical order, calibration takes the positions whose last digit is below 7; this takes
the rest, so that no quantizer is judged on the text it was fitted to.
"""

import sys
from pydoc_data.topics import topics


def available() -> bool:
    """Whether this Python is the one whose documentation ships; the topics change from version to version."""
    return sys.version_info[:2] == (3, 11)


def text() -> str:
    """The held-out topics, one after another."""
    names = [name for position, name in enumerate(sorted(topics)) if position % 10 >= 7]
    return "\n\n".join(topics[name].strip() for name in names) + "\n"
