"""Seeded choices that give the same items on every Python version.

Only `random.Random.random` is promised to stay the same across versions, so every choice is made from it.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def words(text: str) -> list[str]:
    """A list of words, written as text so that it stays readable."""
    return text.split()


class Draw:
    """A stream of choices; the same seed and the same calls give the same answers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, bound: int) -> int:
        """A whole number in [0, bound)."""
        return int(self._random() * bound)

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + self.below(high - low + 1)

    def one(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def some(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different positions of `items`, in random order."""
        pool = list(items)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]

    def placed(self, right: str, wrong: Sequence[str]) -> tuple[list[str], int]:
        """The right answer at a random place among the wrong ones: choices and the index of the right one."""
        choices = list(wrong)
        position = self.below(len(wrong) + 1)
        choices.insert(position, right)
        return choices, position
