"""Runs one block of planned traffic through an engine, as its clients would meet it.

Open traffic enters at its planned time on the wall clock; what arrives while a step runs enters after it but keeps its
planned arrival, so that waiting for the engine counts as queueing. Closed traffic is topped up to its concurrency
between steps. A token's time is when `Engine.step` handed it over.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from eval.engine.engine import StepOutput
from eval.engine.request import SamplingParams
from eval.engine.telemetry import RequestRecord, StepRecord, Telemetry
from eval.errors import EvalError
from eval.speed.metrics import Block, RequestTiming, StepTiming, spread_token_times
from eval.speed.traffic import PlannedRequest, Traffic


class Steppable(Protocol):
    """What of `Engine` a block needs; `arrival` is on time.perf_counter's clock."""

    telemetry: Telemetry

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival: float | None = None,
        **labels: str,
    ) -> str: ...

    def step(self) -> list[StepOutput]: ...

    def has_unfinished(self) -> bool: ...


@dataclass(frozen=True)
class DrivenBlock:
    """What the client saw (`block`) and what the engine says of the same requests and steps."""

    block: Block
    request_records: list[RequestRecord]
    step_records: list[StepRecord]


@dataclass
class _Seen:
    """What the client knows of a request so far."""

    planned: PlannedRequest
    arrival_s: float
    delivered: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None
    refused: str | None = None


def run_block(engine: Steppable, traffic: Traffic, on_finished: Callable[[int], None] | None = None) -> DrivenBlock:
    """Runs all of the traffic to its end; clears the engine's telemetry first.

    `on_finished` hears how many requests have ended, after each step that ended some. A request that the engine
    refuses or that fails is in the block with its error.
    """
    engine.telemetry.clear()
    pending = deque(traffic.requests)
    seen: dict[str, _Seen] = {}
    in_flight: set[str] = set()
    steps: list[StepTiming] = []
    start = time.perf_counter()
    while pending or in_flight:
        now = time.perf_counter()
        while pending and _is_due(traffic, pending[0], now - start, len(in_flight)):
            _submit(engine, pending.popleft(), now if traffic.concurrency else None, start, seen, in_flight)
        if not in_flight:
            if pending and traffic.concurrency is None:
                time.sleep(max(0.0, start + pending[0].arrival_s - time.perf_counter()))
            continue
        if not engine.has_unfinished():
            raise EvalError(
                f"the engine lost {len(in_flight)} requests of {traffic.workload}; this is a defect, report it"
            )
        known_steps = len(engine.telemetry.steps)
        began = time.perf_counter()
        outputs = engine.step()
        ended = time.perf_counter()
        if len(engine.telemetry.steps) > known_steps:
            record = engine.telemetry.steps[-1]
            context = _context_read(outputs, seen)
            steps.append(StepTiming(began, ended, record.prefill_tokens, record.decode_tokens, context))
        finished = _take(outputs, ended, seen, in_flight)
        if finished and on_finished is not None:
            on_finished(len(seen) - len(in_flight))
    records = {record.request_id: record for record in engine.telemetry.requests}
    timings = tuple(_timing(one, records.get(request_id)) for request_id, one in seen.items())
    block = Block(timings, tuple(steps), engine.telemetry.speculation)
    return DrivenBlock(block, list(records.values()), list(engine.telemetry.steps))


def _is_due(traffic: Traffic, request: PlannedRequest, elapsed_s: float, in_flight: int) -> bool:
    if traffic.concurrency is None:
        return request.arrival_s <= elapsed_s
    return in_flight < traffic.concurrency


def _submit(
    engine: Steppable,
    request: PlannedRequest,
    now: float | None,
    start: float,
    seen: dict[str, _Seen],
    in_flight: set[str],
) -> None:
    arrival = start + request.arrival_s if now is None else now
    seen[request.request_id] = one = _Seen(request, arrival)
    params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
    try:
        engine.add_request(
            request.prompt_token_ids,
            params,
            request_id=request.request_id,
            priority=request.priority,
            arrival=arrival,
            trace_id=f"{request.request_id}@{engine.telemetry.variant}",
        )
    except EvalError as refusal:
        one.refused = str(refusal)
    else:
        in_flight.add(request.request_id)


def _context_read(outputs: list[StepOutput], seen: dict[str, _Seen]) -> int:
    """KV tokens that this step's decodes attended to: prompt and earlier output of those past a first token."""
    return sum(
        len(one.planned.prompt_token_ids) + one.tokens
        for one in (seen[output.request_id] for output in outputs if output.new_token_ids)
        if one.tokens
    )


def _take(outputs: list[StepOutput], time_s: float, seen: dict[str, _Seen], in_flight: set[str]) -> int:
    """Notes the step's tokens; how many requests ended."""
    ended = 0
    for output in outputs:
        one = seen[output.request_id]
        if output.new_token_ids:
            one.delivered.append((time_s, len(output.new_token_ids)))
            one.tokens += len(output.new_token_ids)
        if output.finished:
            one.finish_reason = output.finish_reason
            in_flight.discard(output.request_id)
            ended += 1
    return ended


def _timing(one: _Seen, record: RequestRecord | None) -> RequestTiming:
    error = one.refused
    if error is None and one.finish_reason not in ("length", "stop"):
        error = (record.error if record else None) or f"ended as {one.finish_reason}"
    queue_ms = record.queue_ms if record is not None else None
    return RequestTiming(
        request_id=one.planned.request_id,
        arrival_s=one.arrival_s,
        first_scheduled_s=one.arrival_s + (queue_ms or 0.0) / 1e3,
        token_times_s=spread_token_times(one.delivered),
        input_tokens=len(one.planned.prompt_token_ids),
        requested_output_tokens=one.planned.output_tokens,
        warmup=one.planned.warmup,
        prompt_cache_hit=record.prompt_cache_hit if record is not None else 0,
        shared_prefix_tokens=one.planned.shared_prefix_tokens,
        preemptions=record.preemptions if record is not None else 0,
        error=error,
    )
