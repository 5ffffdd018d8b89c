"""Measures a checkpoint, alone or against its baseline: the same blocks of traffic on both sides, in the order A B B A.

Each side is a process of its own and only one of them works at a time, so that what disturbs the machine disturbs both
alike and what is left is their ratio. The result folder appears whole or not at all.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.engine.fingerprint import engine_fingerprint
from eval.engine.speculative import PROMPT_LOOKUP
from eval.engine.telemetry import Speculation
from eval.errors import EvalError
from eval.speed.bootstrap import RESAMPLING
from eval.speed.machine import QUIET_CORES, Machine, describe_machine
from eval.speed.metrics import DEFINITIONS, Block, RequestTiming, SloLimits, StepTiming, bandwidth_utilization
from eval.speed.plan import has_priorities, plan_traffic
from eval.speed.prompts import PromptSource, shipped_text
from eval.speed.resources import ResourceSampler
from eval.speed.result import SPEED_FILE, SpeedResult
from eval.speed.summary import cost_per_million_tokens, measured_metrics, memory_metrics, ratio_metrics
from eval.speed.traffic import Traffic
from eval.speed.validity import check_validity
from eval.speed.worker_process import WorkerProcess
from eval.speed.workload import Workload, load_workload
from quantize.atomic import atomic_directory
from quantize.checkpoint import Checkpoint
from quantize.errors import QuantizeError
from quantize.progress import Progress

PROTOCOL_VERSION = 1
PROBE_REPEAT, PROBE_OUTPUT_TOKENS = 10**6, 2
"""The memory probe's traffic: a repeat that no measurement reaches, and just one decode step."""


@dataclass
class _Side:
    """What one side has answered so far."""

    worker: WorkerProcess
    identity: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, list[Block]] = field(default_factory=lambda: defaultdict(list))
    request_records: list[dict[str, Any]] = field(default_factory=list)
    step_records: list[dict[str, Any]] = field(default_factory=list)


def measure(
    candidate: Path,
    *,
    against: Path | None = None,
    workload: Workload | str | Path,
    out: Path,
    repeats: int | None = None,
    engine_options: Mapping[str, Any] | None = None,
    candidate_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    price_per_hour: float | None = None,
    confidence: float = 0.95,
    reuse: bool = True,
    progress: Progress | None = None,
) -> SpeedResult:
    """Runs the workload on `candidate` (and `against`, its baseline) and writes the result folder `out`.

    Args:
        repeats: blocks per side; None takes the workload's own. Even numbers balance the order A B B A.
        engine_options: keywords of `Engine.from_checkpoint`, the same for both sides. Where they do not say, a workload
            whose requests have priorities is scheduled by them.
        candidate_options: those in which the candidate's variant differs from its baseline's (`kv_dtype`,
            `speculative`).
        threads: torch threads of a worker; None leaves torch's choice.
        price_per_hour: what the machine costs, for `cost_per_million_tokens`.
        confidence: of the ratios' two-sided intervals; a policy is held against intervals of its own confidence.
        reuse: give back what `out` holds when it measured the very same thing.

    Raises EvalError, one line; nothing is left in `out` then.
    """
    workload = workload if isinstance(workload, Workload) else load_workload(workload)
    repeats = workload.repeats if repeats is None else repeats
    if repeats < 1:
        raise EvalError(f"repeats is {repeats}: measure at least one block")
    by_default = {"scheduler_policy": "priority"} if has_priorities(workload) else {}
    out, options = Path(out), by_default | dict(engine_options or {})
    options_of = {"baseline": options, "candidate": options | dict(candidate_options or {})}
    sides = (
        {"candidate": Path(candidate)} if against is None else {"baseline": Path(against), "candidate": Path(candidate)}
    )
    checkpoints = {side: _opened(path) for side, path in sides.items()}
    drafts = {
        f"draft of the {side}": _opened(Path(drafter))
        for side in sides
        if (drafter := options_of[side].get("speculative")) not in (None, PROMPT_LOOKUP)
    }
    machine = describe_machine()
    settings = {
        "engine_options": options,
        "candidate_options": dict(candidate_options or {}),
        "threads": threads,
        "repeats": repeats,
        "price_per_hour": price_per_hour,
        "confidence": confidence,
    }
    key = _key(checkpoints | drafts, workload, settings, machine)
    if reuse and (out / SPEED_FILE).is_file():
        with_same_key = _read_if_same(out, key)
        if with_same_key is not None:
            return with_same_key
    started = time.monotonic()
    with atomic_directory(out, replace=(out / SPEED_FILE).is_file(), error=EvalError) as partial, ExitStack() as stack:
        workers = {side: _Side(stack.enter_context(WorkerProcess(side))) for side in sides}
        source = _load(workers, sides, options_of, threads, progress)
        sampler = _run_blocks(workers, workload, repeats, source, progress)
        for side, state in workers.items():
            state.memory["checkpoint_bytes"] = float(checkpoints[side].bytes())
            state.memory |= _measured_memory(state.worker, workload, source)
        metrics, baseline_metrics = _summarise(workers, workload, machine, price_per_hour, confidence)
        result = SpeedResult(
            directory=out,
            key=key,
            workload=workload.model_dump(mode="json", exclude_none=True) | {"digest": workload.digest()},
            baseline=workers["baseline"].identity if "baseline" in workers else None,
            candidate=workers["candidate"].identity,
            metrics=metrics,
            baseline_metrics=baseline_metrics,
            validity=_validity(workers, workload, sampler),
            machine=machine.to_mapping() | {"foreign_cores_while_measuring": _mean(sampler.foreign_cores)},
            protocol={
                "version": PROTOCOL_VERSION,
                "order": _order(list(sides), repeats),
                "resampling": RESAMPLING,
                "pairs": repeats if against is not None else 0,
                "definitions": DEFINITIONS,
                **settings,
            },
            seconds=time.monotonic() - started,
        )
        evidence = {
            "requests": [record for state in workers.values() for record in state.request_records],
            "steps": [record for state in workers.values() for record in state.step_records],
            "resources": [asdict(record) for record in sampler.records],
        }
        result.write(partial, evidence)
    return result


def _opened(path: Path) -> Checkpoint:
    try:
        return Checkpoint.open(path)
    except QuantizeError as cause:
        raise EvalError(str(cause)) from cause


def _key(checkpoints: dict[str, Checkpoint], workload: Workload, settings: dict[str, Any], machine: Machine) -> str:
    """A sha256 over everything that another run would have to share for its numbers to stand for this one's."""
    try:
        # The same folder on both sides (the noise floor) is read once.
        digests = {path: Checkpoint.open(path).content_digest() for path in {c.path for c in checkpoints.values()}}
    except QuantizeError as cause:
        raise EvalError(str(cause)) from cause
    described = [
        PROTOCOL_VERSION,
        [engine_fingerprint(), version("transformers")],
        {side: digests[opened.path] for side, opened in checkpoints.items()},
        workload.name,
        workload.digest(),
        settings,
        machine.identity(),
        hashlib.sha256(shipped_text().encode()).hexdigest(),
    ]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def _read_if_same(out: Path, key: str) -> SpeedResult | None:
    try:
        kept = SpeedResult.read(out)
    except EvalError:
        return None
    return kept if kept.key == key else None


def _load(
    workers: dict[str, _Side],
    sides: dict[str, Path],
    options: dict[str, dict[str, Any]],
    threads: int | None,
    progress: Progress | None,
) -> PromptSource:
    """Loads all sides at once (loading is not measured); the prompts' source, in the tokens that they share."""
    if progress is not None:
        progress("loading", 0, len(workers))
    text = shipped_text()
    for side, state in workers.items():
        state.worker.send(
            "load",
            checkpoint=str(sides[side].resolve()),
            options=options[side],
            threads=threads,
            variant=side,
            text=text,
        )
    text_ids: dict[str, list[int]] = {}
    for done, (side, state) in enumerate(workers.items(), start=1):
        answer = state.worker.receive()
        state.identity, state.memory, text_ids[side] = answer["identity"], answer["memory"], answer["text_ids"]
        if progress is not None:
            progress("loading", done, len(workers))
    if text_ids.get("baseline", text_ids["candidate"]) != text_ids["candidate"]:
        raise EvalError(
            f"{sides['candidate']}: its tokenizer differs from that of {sides['baseline']}; speed is compared on the "
            "same tokens, so measure the two apart"
        )
    return PromptSource(text_ids["candidate"])


def _order(sides: list[str], repeats: int) -> list[str]:
    """Blocks in time: A B B A A B B A ..."""
    return [side for repeat in range(repeats) for side in (sides if repeat % 2 == 0 else sides[::-1])]


def _run_blocks(
    workers: dict[str, _Side], workload: Workload, repeats: int, source: PromptSource, progress: Progress | None
) -> ResourceSampler:
    points = workload.points()
    planned = [[plan_traffic(point, repeat, source) for repeat in range(repeats)] for point in points]
    total = len(workers) * sum(len(traffic.requests) for of_point in planned for traffic in of_point)
    done = 0
    with ResourceSampler({side: state.worker.pid for side, state in workers.items()}) as sampler:
        for traffics in planned:
            for index, side in enumerate(_order(list(workers), repeats)):
                traffic = traffics[index // len(workers)]
                report = _reporter(progress, f"{traffic.workload} {side}", done, total)
                report(0)
                sampler.active = side
                workers[side].worker.send("block", traffic=traffic.to_mapping())
                _keep(workers[side], side, traffic, workers[side].worker.receive(report))
                sampler.active = None
                done += len(traffic.requests)
                report(len(traffic.requests))
    return sampler


def _reporter(progress: Progress | None, what: str, before: int, total: int) -> Any:
    return lambda finished: progress(what, before + finished, total) if progress is not None else None


def _keep(state: _Side, side: str, traffic: Traffic, answer: dict[str, Any]) -> None:
    requests = tuple(
        RequestTiming(**{**request, "token_times_s": tuple(request["token_times_s"])}) for request in answer["requests"]
    )
    if not any(request.finished for request in requests if not request.warmup):
        failed = next(request for request in requests if not request.warmup)
        raise EvalError(f"{side}: every request of {traffic.workload} failed, the first with: {failed.error}")
    steps = tuple(StepTiming(**step) for step in answer["steps"])
    state.blocks[traffic.workload].append(Block(requests, steps, Speculation(**answer["speculation"])))
    state.request_records += answer["request_records"]
    state.step_records += [{**record, "variant": side} for record in answer["step_records"]]


def _measured_memory(worker: WorkerProcess, workload: Workload, source: PromptSource) -> dict[str, float]:
    """Peaks, after all blocks: the process's own, and of activations over a short probe with fresh prompts."""
    point = workload.points()[-1]
    traffic = plan_traffic(point, PROBE_REPEAT, source)
    requests = sorted(traffic.requests, key=lambda request: -len(request.prompt_token_ids))[: point.concurrency or 1]
    probe = replace(
        traffic,
        concurrency=len(requests),
        requests=[replace(request, output_tokens=PROBE_OUTPUT_TOKENS, warmup=False) for request in requests],
    )
    worker.send("memory", traffic=probe.to_mapping())
    return {name: float(value) for name, value in worker.receive().items() if value is not None}


def _summarise(
    workers: dict[str, _Side], workload: Workload, machine: Machine, price_per_hour: float | None, confidence: float
) -> tuple[dict[str, float], dict[str, float]]:
    limits = SloLimits(workload.slo.ttft_ms, workload.slo.tpot_ms) if workload.slo else None
    flat: dict[str, dict[str, float]] = {side: {} for side in workers}
    for side, state in workers.items():
        for name, blocks in state.blocks.items():
            flat[side] |= measured_metrics(name, blocks, limits)
            if state.identity["speculative"] in (None, PROMPT_LOOKUP):
                # A draft model reads its weights once per token that it drafts, which nobody counts.
                flat[side] |= _bandwidth(name, blocks, state.memory, machine)
            rate = flat[side].get(f"speed.{name}.output_tokens_per_second")
            if price_per_hour is not None and rate:
                flat[side][f"speed.{name}.cost_per_million_tokens"] = cost_per_million_tokens(price_per_hour, rate)
    memory = memory_metrics({side: state.memory for side, state in workers.items()})
    for side in workers:
        flat[side] |= memory[side]
    if "baseline" in workers:
        for name, blocks in workers["candidate"].blocks.items():
            before = workers["baseline"].blocks[name]
            flat["candidate"] |= ratio_metrics(name, before, blocks, limits, seed=workload.seed, confidence=confidence)
    return flat["candidate"], flat.get("baseline", {})


def _bandwidth(name: str, blocks: list[Block], memory: dict[str, float], machine: Machine) -> dict[str, float]:
    if machine.gpus:
        return {}
    shares = [
        bandwidth_utilization(
            block, memory["weights_read_bytes"], memory["kv_bytes_per_token"], machine.read_bandwidth.best
        )
        for block in blocks
    ]
    known = [share for share in shares if share is not None]
    return {f"speed.{name}.bandwidth_utilization": sum(known) / len(known)} if known else {}


def _validity(workers: dict[str, _Side], workload: Workload, sampler: ResourceSampler) -> dict[str, str]:
    pairs = min(len(blocks) for blocks in workers["candidate"].blocks.values()) if "baseline" in workers else None
    return check_validity(
        {side: [block for of_point in state.blocks.values() for block in of_point] for side, state in workers.items()},
        {side: state.request_records for side, state in workers.items()},
        foreign_cores=sampler.foreign_cores,
        quiet_cores=QUIET_CORES,
        open_loop=any(point.mode in ("open", "trace") for point in workload.points()),
        pairs=pairs,
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
