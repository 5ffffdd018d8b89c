"""What every side of benchmarks/engine_peers.py does: it loads once, then answers jobs, so that sides can take turns.

A job is one line on stdin, `{"prompts": [[ids], ...], "new_tokens": N}`, its answer one line on what was stdout; what
libraries print goes to stderr. Times are seconds since the job was handed to the library. Decoding is counted from the
moment when every prompt has its first token, whatever an engine did for the early ones before.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """`first_s`: every prompt has one token; `last_s`: all have all; `later_tokens`: those that came between. `tokens`:
    the first prompt's."""

    first_s: float
    last_s: float
    later_tokens: int
    tokens: list[int]


class Tally:
    """The tokens of a batch as they come, and the clock."""

    def __init__(self, batch: int) -> None:
        self._counts = [0] * batch
        self._tokens: list[int] = []
        self._first: tuple[float, int] | None = None
        self._start = time.perf_counter()
        self._last = 0.0

    def add(self, index: int, tokens: list[int]) -> None:
        self._counts[index] += len(tokens)
        if index == 0:
            self._tokens += tokens

    def step_ended(self) -> None:
        self._last = time.perf_counter() - self._start
        if self._first is None and all(self._counts):
            self._first = self._last, sum(self._counts)

    def answer(self) -> Answer:
        assert self._first is not None, "a prompt got no token"
        first_s, so_far = self._first
        return Answer(first_s, self._last, sum(self._counts) - so_far, self._tokens)


def take_jobs(load: Callable[[], tuple[dict[str, Any], Callable[[list[list[int]], int], Answer]]]) -> None:
    """`load` gives what the side is, and the function that does a job. Returns at the end of stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    identity, generate = load()
    print(json.dumps(identity), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(asdict(generate(job["prompts"], job["new_tokens"]))), file=answers, flush=True)
