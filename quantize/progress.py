"""How long work reports itself: a plain call, so that this room needs no progress-bar library."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(what is being done, units done, units in all)"""


def silent(_what: str, _done: int, _total: int) -> None:
    """The progress of somebody who does not want to see it."""
