"""The speed metrics, as pure functions over what happened to each request and in each step.

Definitions follow the industry's where it agrees: TPOT leaves the first token out (vLLM), every wait from the *planned*
arrival counts (a request that the engine could not look at yet is already queueing), a failed request has no latency
but counts against goodput. Times are seconds on one clock; metrics are milliseconds or per second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from eval.engine.telemetry import Speculation

PERCENTILES = (50, 90, 95, 99)
STATISTICS = (*(f"p{percentile}" for percentile in PERCENTILES), "mean", "max")

DEFINITIONS = {
    "queue_ms": "arrival to first scheduled step",
    "prefill_ms": "first scheduled step to first token",
    "ttft_ms": "arrival to first token",
    "itl_ms": "each gap between tokens of one request; tokens that one step hands out together share its gap equally",
    "tpot_ms": "(last - first token) / (output tokens - 1)",
    "e2e_ms": "arrival to last token",
    "decode_tokens_per_second": "decode tokens / time, over the measured window's steps that only decode",
    "prefill_tokens_per_second": "prefill tokens / time, over the measured window's steps that prefill",
    "output_tokens_per_second": "output tokens of measured requests / measured window",
    "requests_per_second": "finished measured requests / measured window",
    "goodput": "measured requests per second that kept the SLO's TTFT and TPOT limits",
    "speculative_accept_rate": "accepted / drafted tokens, warm-up included; position_N: the share that came true up "
    "to place N, of the drafts that reached it",
    "speculative_accepted_length": "1 + accepted tokens / drafts: what a step with a draft gives a request",
    "window": "first measured arrival to last measured token; warm-up requests come before it and are left out",
    "percentiles": "linear interpolation between order statistics, over the requests (or gaps) of all blocks",
}


@dataclass(frozen=True)
class RequestTiming:
    """One request. `token_times_s` has one entry per output token; `error` is None for a finished request."""

    request_id: str
    arrival_s: float
    first_scheduled_s: float
    token_times_s: tuple[float, ...]
    input_tokens: int
    requested_output_tokens: int
    warmup: bool = False
    prompt_cache_hit: int = 0
    shared_prefix_tokens: int = 0
    preemptions: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.error is None and bool(self.token_times_s)


@dataclass(frozen=True)
class StepTiming:
    """One engine step: when it began and ended, the tokens it computed, and the KV context its decodes read."""

    start_s: float
    end_s: float
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int = 0
    """Tokens of KV cache that the step's decode requests read, all of them together."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Block:
    """One side's run of one repeat of a workload."""

    requests: tuple[RequestTiming, ...]
    steps: tuple[StepTiming, ...]
    speculation: Speculation = field(default_factory=Speculation)

    def measured(self) -> list[RequestTiming]:
        """The requests after warm-up."""
        return [request for request in self.requests if not request.warmup]

    def window_s(self) -> tuple[float, float]:
        """First measured arrival, last measured token."""
        measured = [request for request in self.measured() if request.token_times_s]
        if not measured:
            return (0.0, 0.0)
        return (min(r.arrival_s for r in measured), max(r.token_times_s[-1] for r in measured))

    def measured_steps(self) -> list[StepTiming]:
        """The steps that lie wholly inside the window."""
        start, end = self.window_s()
        return [step for step in self.steps if step.start_s >= start and step.end_s <= end]


@dataclass(frozen=True)
class SloLimits:
    """Limits in milliseconds."""

    ttft_ms: float
    tpot_ms: float


def spread_token_times(delivered: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """One time per token from (time, tokens handed out then): tokens of one delivery share the gap before it equally.

    Without this a step that hands out k tokens (speculation) looks like one slow token and k - 1 instant ones.
    """
    times: list[float] = []
    for time, count in delivered:
        previous = times[-1] if times else time
        times.extend(previous + (time - previous) * (index + 1) / count for index in range(count))
    return tuple(times)


def queue_ms(request: RequestTiming) -> float:
    return 1e3 * (request.first_scheduled_s - request.arrival_s)


def prefill_ms(request: RequestTiming) -> float:
    return 1e3 * (request.token_times_s[0] - request.first_scheduled_s)


def ttft_ms(request: RequestTiming) -> float:
    return 1e3 * (request.token_times_s[0] - request.arrival_s)


def itl_ms(request: RequestTiming) -> list[float]:
    """The gaps, one fewer than output tokens."""
    return [1e3 * float(gap) for gap in np.diff(request.token_times_s)]


def tpot_ms(request: RequestTiming) -> float | None:
    """None for a single token: it has no time per further token."""
    tokens = request.token_times_s
    return None if len(tokens) < 2 else 1e3 * (tokens[-1] - tokens[0]) / (len(tokens) - 1)


def e2e_ms(request: RequestTiming) -> float:
    return 1e3 * (request.token_times_s[-1] - request.arrival_s)


LATENCIES: dict[str, Callable[[RequestTiming], list[float]]] = {
    "queue_ms": lambda request: [queue_ms(request)],
    "prefill_ms": lambda request: [prefill_ms(request)],
    "ttft_ms": lambda request: [ttft_ms(request)],
    "itl_ms": itl_ms,
    "tpot_ms": lambda request: [value for value in [tpot_ms(request)] if value is not None],
    "e2e_ms": lambda request: [e2e_ms(request)],
}
"""Each latency's values of one finished request."""


def latency_values(block: Block, metric: str) -> list[list[float]]:
    """The values of every measured request of the block, in planned order; an empty list for a failed one."""
    of = LATENCIES[metric]
    return [of(request) if request.finished else [] for request in block.measured()]


def statistics(values: Sequence[float] | np.ndarray, names: Sequence[str] = STATISTICS) -> dict[str, float]:
    """`p50`..`p99` (linear interpolation), `mean` and `max` of at least one value."""
    ordered = np.sort(np.asarray(values, dtype=float))
    found = {}
    for name in names:
        if name == "mean":
            found[name] = float(ordered.mean())
        elif name == "max":
            found[name] = float(ordered[-1])
        else:
            place = (len(ordered) - 1) * float(name[1:]) / 100
            below, above = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
            found[name] = float(below + (above - below) * (place - int(place)))
    return found


def kept_slo(request: RequestTiming, limits: SloLimits) -> bool:
    """A request with one output token has no TPOT and is held to TTFT alone."""
    if not request.finished or ttft_ms(request) > limits.ttft_ms:
        return False
    tpot = tpot_ms(request)
    return tpot is None or tpot <= limits.tpot_ms


@dataclass(frozen=True)
class Rate:
    """An amount per second, kept as its two parts so that blocks add up."""

    amount: float
    seconds: float

    @property
    def per_second(self) -> float:
        return self.amount / self.seconds


def pooled(rates: Sequence[Rate]) -> Rate:
    """All the work over all the time."""
    return Rate(sum(rate.amount for rate in rates), sum(rate.seconds for rate in rates))


def decode_slices(block: Block) -> list[Rate]:
    """(decode tokens, seconds) of each measured step that only decodes; a mixed step's time cannot be told apart."""
    steps = block.measured_steps()
    return [Rate(step.decode_tokens, step.seconds) for step in steps if step.decode_tokens and not step.prefill_tokens]


def prefill_slices(block: Block) -> list[Rate]:
    """(prefill tokens, seconds) of each measured step that prefills; decodes that ride along are part of its time."""
    return [Rate(step.prefill_tokens, step.seconds) for step in block.measured_steps() if step.prefill_tokens]


STEP_RATES: dict[str, Callable[[Block], list[Rate]]] = {
    "decode_tokens_per_second": decode_slices,
    "prefill_tokens_per_second": prefill_slices,
}


def window_rates(block: Block, limits: SloLimits | None = None) -> dict[str, Rate]:
    """What one block got done in its measured window; nothing when no request finished."""
    start, end = block.window_s()
    if end <= start:
        return {}
    finished = [request for request in block.measured() if request.finished]
    found = {
        "output_tokens_per_second": Rate(sum(len(request.token_times_s) for request in finished), end - start),
        "requests_per_second": Rate(len(finished), end - start),
    }
    if limits is not None:
        found["goodput"] = Rate(sum(kept_slo(request, limits) for request in block.measured()), end - start)
    return found


def bandwidth_utilization(
    block: Block, weights_read_bytes: float, kv_bytes_per_token: float, read_bytes_per_second: float
) -> float | None:
    """The share of the machine's measured read bandwidth that pure decode steps used, as the median over steps.

    A decode step must read every served weight once and the KV cache of each request it decodes; what a cache keeps
    between steps makes values above 1 possible for small models. None when no step only decoded.
    """
    shares = [
        (weights_read_bytes + kv_bytes_per_token * step.context_tokens) / step.seconds / read_bytes_per_second
        for step in block.measured_steps()
        if step.decode_tokens and not step.prefill_tokens
    ]
    return float(np.median(shares)) if shares else None
