"""From a workload to the traffic of one block, by seed.

Both sides replay the same `Traffic`; another repeat of the same workload has other prompts and arrivals, so that a pair
of blocks is one independent sample. Warm-up requests are the first of the stream and are left out of every number.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.errors import EvalError
from eval.speed.arrivals import arrival_times
from eval.speed.prompts import PromptSource
from eval.speed.traffic import PlannedRequest, Traffic
from eval.speed.workload import RequestClass, Workload


@dataclass(frozen=True)
class _Shape:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    priority: int


def plan_traffic(workload: Workload, repeat: int, source: PromptSource) -> Traffic:
    """The block number `repeat` of a single (not sweep) workload."""
    rng = np.random.default_rng([workload.seed & 0xFFFFFFFF, repeat, zlib.crc32(workload.name.encode())])
    shapes = _trace_shapes(workload) if workload.mode == "trace" else _drawn_shapes(workload, rng)
    shared = workload.shared_prefix
    prefix = source.draw(rng, shared.tokens) if shared else []
    requests = []
    for index, shape in enumerate(shapes):
        begins_shared = shared is not None and rng.random() < shared.share
        head = prefix[: shape.input_tokens - 1] if begins_shared else []
        warmup = index < workload.warmup
        label = f"warmup-{index}" if warmup else str(index - workload.warmup)
        requests.append(
            PlannedRequest(
                request_id=f"{workload.name}/r{repeat}/{label}",
                arrival_s=shape.arrival_s,
                prompt_token_ids=head + source.draw(rng, shape.input_tokens - len(head)),
                output_tokens=shape.output_tokens,
                priority=shape.priority,
                warmup=warmup,
                shared_prefix_tokens=len(head),
            )
        )
    return Traffic(workload.name, repeat, workload.concurrency, requests)


def has_priorities(workload: Workload) -> bool:
    """Whether its requests differ in priority, so that an order by arrival would not be what it asks for."""
    ranked: Iterable[_Shape | RequestClass] = _trace_shapes(workload) if workload.mode == "trace" else workload.classes
    return len({one.priority for one in ranked}) > 1


def _drawn_shapes(workload: Workload, rng: np.random.Generator) -> list[_Shape]:
    count = workload.warmup + (workload.requests or 0)
    times = [0.0] * count if workload.rate is None else arrival_times(rng, count, workload.rate, workload.burstiness)
    classes = workload.classes or (RequestClass(name="all", share=1.0),)
    shares = np.array([part.share for part in classes])
    chosen = rng.choice(len(classes), size=count, p=shares / shares.sum())
    drawn = []
    for part in classes:
        inputs, outputs = part.input_tokens or workload.input_tokens, part.output_tokens or workload.output_tokens
        assert inputs is not None
        assert outputs is not None
        drawn.append((inputs.draw(rng, count, workload.folder), outputs.draw(rng, count, workload.folder)))
    return [
        _Shape(times[index], drawn[kind][0][index], drawn[kind][1][index], classes[kind].priority)
        for index, kind in enumerate(chosen)
    ]


def _trace_shapes(workload: Workload) -> list[_Shape]:
    assert workload.trace is not None
    path = workload.folder / workload.trace
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise EvalError(f"{path}: the trace cannot be read ({cause}); check the path") from cause
    shapes = list(_parsed(path, lines))
    if len(shapes) <= workload.warmup:
        raise EvalError(f"{path}: {len(shapes)} requests, all of them warm-up; lower `warmup` or add lines")
    start = min(shape.arrival_s for shape in shapes)
    ordered = sorted(shapes, key=lambda shape: shape.arrival_s)
    limit = workload.warmup + workload.requests if workload.requests else None
    return [
        _Shape(shape.arrival_s - start, shape.input_tokens, shape.output_tokens, shape.priority) for shape in ordered
    ][:limit]


def _parsed(path: Path, lines: list[str]) -> Iterable[_Shape]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            shape = _Shape(
                float(row["timestamp"]),
                int(row["input_tokens"]),
                int(row["output_tokens"]),
                int(row.get("priority", 0)),
            )
        except (ValueError, TypeError, AttributeError) as cause:
            raise EvalError(f"{where}: not a trace line ({cause})") from cause
        except KeyError as cause:
            raise EvalError(f"{where}: no {cause}; a line has timestamp (s), input_tokens, output_tokens") from cause
        if shape.input_tokens < 1 or shape.output_tokens < 1 or not np.isfinite(shape.arrival_s):
            raise EvalError(f"{where}: lengths must be at least 1 token and the timestamp a number of seconds")
        yield shape
