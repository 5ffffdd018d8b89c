"""What the engine records: one line per finished request and one per step, with the names that the evidence files use.

The one idea: a record is frozen and flat, so that a list of them is a table. Times are milliseconds unless a name says
otherwise; `time` is seconds since the epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from eval.engine.request import Request


@dataclass(frozen=True)
class RequestRecord:
    request_id: str
    generation_id: str
    route_id: str
    engine_version: str
    trace_id: str
    variant: str
    input_tokens: int
    output_tokens: int
    sequence_length: int
    queue_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    prompt_cache_hit: int
    priority_class: int
    preemptions: int
    speculative_accept_rate: float | None
    finish_reason: str
    error: str | None


@dataclass(frozen=True)
class StepRecord:
    """`batch_size` counts the requests that ran, `active_sequences` those that hold blocks; `kv_cache_bytes` is in
    use, a draft model's with it, `block_usage` the share of the model's own blocks; `reuse_rate` is the prefix-cache
    share of the prompt tokens admitted in this step (None when none were). `decode_tokens` are those that decoding
    requests were given; a rejected draft is none."""

    step: int
    time: float
    batch_size: int
    active_sequences: int
    waiting_queue: int
    scheduler_policy: str
    prefill_tokens: int
    decode_tokens: int
    step_ms: float
    kv_cache_bytes: int
    block_usage: float
    eviction_count: int
    reuse_rate: float | None
    max_context: int
    attention_backend: str
    tokens_per_second: float


@dataclass
class Speculation:
    """What became of drafts. `drafted[i]` counts those that had a token at place i, `accepted[i]` those whose tokens
    came true up to that place."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """One draft of `drafted` tokens, of which the first `accepted` came true."""
        for counts, length in ((self.drafted, drafted), (self.accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            for place in range(length):
                counts[place] += 1

    @classmethod
    def of_all(cls, parts: Iterable["Speculation"]) -> "Speculation":
        """The sum of the parts."""
        parts = list(parts)
        drafted, accepted = (
            [sum(column) for column in zip_longest(*rows, fillvalue=0)]
            for rows in ([part.drafted for part in parts], [part.accepted for part in parts])
        )
        return cls(drafted, accepted)

    @property
    def drafts(self) -> int:
        return self.drafted[0] if self.drafted else 0

    @property
    def accept_rate(self) -> float | None:
        """Accepted tokens / drafted tokens; None without drafts."""
        return sum(self.accepted) / sum(self.drafted) if self.drafted else None

    @property
    def accept_rate_per_position(self) -> list[float]:
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted tokens / drafts: the tokens that a step with a draft gives a request (vLLM's "mean acceptance
        length"); None without drafts."""
        return 1 + sum(self.accepted) / self.drafts if self.drafted else None


@dataclass
class Telemetry:
    """Grows by one record per step and per request until `clear`."""

    variant: str = ""
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    speculation: Speculation = field(default_factory=Speculation)

    def clear(self) -> None:
        self.requests.clear()
        self.steps.clear()
        self.speculation = Speculation()

    def record_request(self, request: Request, finished: float, engine_version: str) -> None:
        """`finished`: seconds on the clock that the request's times were read from."""
        first, last = request.first_token, request.last_token
        outputs = request.num_output_tokens
        self.requests.append(
            RequestRecord(
                request_id=request.request_id,
                generation_id=str(request.labels.get("generation_id", request.request_id)),
                route_id=str(request.labels.get("route_id", "")),
                engine_version=engine_version,
                trace_id=str(request.labels.get("trace_id", request.request_id)),
                variant=self.variant,
                input_tokens=request.num_prompt_tokens,
                output_tokens=outputs,
                sequence_length=request.num_tokens,
                queue_ms=_milliseconds(request.arrival, request.first_scheduled),
                prefill_ms=_milliseconds(request.first_scheduled, first),
                decode_ms=_milliseconds(first, last),
                ttft_ms=_milliseconds(request.arrival, first),
                tpot_ms=None if first is None or last is None or outputs < 2 else 1e3 * (last - first) / (outputs - 1),
                e2e_ms=_milliseconds(request.arrival, last if last is not None else finished),
                prompt_cache_hit=request.prompt_cache_hit or 0,
                priority_class=request.priority,
                preemptions=request.preemptions,
                speculative_accept_rate=(
                    request.accepted_tokens / request.drafted_tokens if request.drafted_tokens else None
                ),
                finish_reason=request.finish_reason or "",
                error=request.error,
            )
        )


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else 1e3 * (end - start)
