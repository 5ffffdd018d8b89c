"""Prompts that read like text and that no prefix cache can answer: windows of tokenised text at seeded places.

The invariant of `PromptSource`: no two prompts that it hands out begin with the same `DISTINCT_TOKENS` tokens, over all
blocks of a measurement, so a cache hit can only come from a shared prefix that the workload asked for.
"""

import json
from importlib.resources import files

import numpy as np

from eval.errors import EvalError

DISTINCT_TOKENS = 8
TEXT_CHARACTERS = 400_000


def shipped_text() -> str:
    """Plain English that ships with the project: the documents of the calibration file, up to TEXT_CHARACTERS."""
    lines = (files("quantize") / "data" / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    return "\n\n".join(json.loads(line)["text"] for line in lines)[:TEXT_CHARACTERS]


class PromptSource:
    """Hands out windows of `text_ids`, each beginning unlike every other."""

    def __init__(self, text_ids: list[int]) -> None:
        if len(text_ids) < 2 * DISTINCT_TOKENS:
            raise EvalError(
                f"the tokenizer makes {len(text_ids)} tokens of the prompt text; is it this model's tokenizer?"
            )
        self._text_ids = np.asarray(text_ids, dtype=np.int64)
        self._beginnings: set[bytes] = set()

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        """A prompt of `length` token ids; text past its end goes on at the start.

        Where the text has no fresh place left, the first tokens are shuffled out of the text instead, so that the
        invariant holds however many prompts are asked for.
        """
        for attempt in range(200):
            start = int(rng.integers(len(self._text_ids)))
            window = np.take(self._text_ids, np.arange(start, start + length), mode="wrap")
            if attempt >= 100:
                window[:DISTINCT_TOKENS] = rng.choice(self._text_ids, size=min(length, DISTINCT_TOKENS))
            beginning = window[:DISTINCT_TOKENS].tobytes()
            if beginning not in self._beginnings or length < DISTINCT_TOKENS:
                self._beginnings.add(beginning)
                return [int(token) for token in window]
        raise EvalError("the prompt text is too uniform to make distinct prompts; is it this model's tokenizer?")
