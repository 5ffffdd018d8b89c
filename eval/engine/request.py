"""A request: its tokens, how to sample them, and how far its KV cache has come.

The one idea: a request is a list of tokens and a count of those already computed. Whatever happens to it (a prefill
chunk, a prefix-cache hit, a decode step with or without drafts, preemption and resumption) only moves
`num_computed_tokens` towards `num_tokens`. Torch-free, so that scheduling is tested with plain values.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from eval.errors import EvalError


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded; temperature 0 is greedy. `n` parallel samples share one computation of the prompt;
    where there is a seed, sample i draws from seed + i. `stop_token_ids` come on top of the model's own
    end-of-sequence ids, which `ignore_eos` switches off. `logprobs=k` asks for the sampled token's logprob and the
    k most likely ones, at temperature 1 and before any penalty or filter. Penalties as in vLLM: `presence_penalty` and
    `frequency_penalty` are taken off the logits of tokens that the output has (once, or once per occurrence);
    `repetition_penalty` divides positive and multiplies negative logits of tokens that prompt or output has."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        limits: list[tuple[str, bool, str]] = [
            ("n", self.n >= 1, "at least 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "None or 0 or more"),
            ("stop", all(stops), "non-empty strings"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100"),
        ]
        for name, holds, wanted in limits:
            if not holds:
                raise EvalError(f"SamplingParams.{name} is {getattr(self, name)!r}: it must be {wanted}")

    def of_sample(self, index: int) -> "SamplingParams":
        """The parameters of sample `index` alone: a request of its own with these gives the same tokens."""
        return replace(self, n=1, seed=None if self.seed is None else self.seed + index)

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprob of the token that came, and of the most likely ones as (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request's state. Invariants: `num_computed_tokens <= num_tokens`; while RUNNING it owns
    ceil(num_computed_tokens / block_size) blocks or more and a `row` of the step's tables; otherwise neither.
    `draft_token_ids` are guesses at the tokens after `token_ids`, which the next step computes along; only a request
    whose next token is all that is missing has any.

    Parallel samples of one prompt are requests with the same `group_id`. Until the prompt is computed only the first of
    them runs, and the others are its `siblings`.

    A scoring request carries `targets`: the token that follows each prompt position from `first_scored` on. It samples
    nothing and ends when its prompt is computed."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    sequence: int = 0
    priority: int = 0
    arrival: float = 0.0
    labels: dict[str, Any] = field(default_factory=dict)

    group_id: str = ""
    index: int = 0
    siblings: list["Request"] = field(default_factory=list)

    first_scored: int = 0
    targets: list[int] | None = None
    scored: list[float] = field(default_factory=list)
    scored_greedy: bool = True
    logprob_sink: Callable[[int, Any], None] | None = None

    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    uniforms: list[float] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    row: int = -1
    preemptions: int = 0
    prompt_cache_hit: int | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.group_id = self.group_id or self.request_id
        seed = self.params.seed
        # Random drops an integer's sign; a text keeps it.
        self.random = random.Random(str(seed) if seed is not None and seed < 0 else seed)

    def uniform(self, index: int) -> float:
        """The number in [0, 1) that decides output token `index`. It is the same however often it is asked for, so what
        becomes of a draft uses up no randomness."""
        while len(self.uniforms) <= index:
            self.uniforms.append(self.random.random())
        return self.uniforms[index]

    @property
    def is_decoding(self) -> bool:
        """Whether all but its newest token, which it sampled itself, is computed."""
        return self.num_tokens - self.num_computed_tokens == 1 and self.num_output_tokens > 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def max_total_tokens(self) -> int:
        """Tokens whose KV may have to be held at once: the last sampled token is never fed back."""
        return self.num_prompt_tokens + (0 if self.targets is not None else self.params.max_tokens - 1)

    @property
    def first_needed_position(self) -> int:
        """The first position whose logits are still wanted; prefix hits must stop before it."""
        if self.targets is None:
            return self.num_tokens - 1
        return min(self.first_scored + len(self.scored), self.num_tokens - 1)

    def logit_rows(self, start: int, count: int) -> int:
        """How many of the positions [start, start + count) need logits."""
        return max(0, start + count - max(start, self.first_needed_position))
