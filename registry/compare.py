"""Candidate against baseline: two result folders and a policy in, comparison.json out.

This is the rim around registry.verdict. It reads what was measured, turns it into measurements (accuracy differences
and perplexity ratios from eval.quality.paired, speed ratios from the interleaved run, exact memory ratios), and refuses
evidence that does not belong together: what was scored must be what was timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.quality.paired import Flip, TaskComparison, compare_tasks, flips, same_protocol
from eval.quality.samples import read_samples
from registry.errors import RegistryError
from registry.json_files import write_json
from registry.policy import Policy
from registry.variant import VariantRecord, quantize_metrics
from registry.verdict import Check, Interval, Measurement, decide

_DERIVED = (".ratio", ".ratio.low", ".ratio.high")
SCORED_AS_TIMED = (
    "weights_digest",
    "tokenizer_digest",
    "compute",
    "dtype",
    "kv_dtype",
    "kernels",
    "attention_backend",
    "engine_version",
    "engine_fingerprint",
)
"""What an evaluation's identity and a speed run's must have in common."""


def compare(baseline_dir: Path, candidate_dir: Path, policy: Policy, out: Path | None) -> dict[str, Any]:
    """Compare two variant folders (each with quality/ and speed/); the document goes to `out`/comparison.json.

    Raises RegistryError where the two were not measured on the same samples, or quality and speed on other weights.
    """
    return compare_variants(VariantRecord.read(baseline_dir), VariantRecord.read(candidate_dir), policy, out)


def compare_variants(
    baseline: VariantRecord, candidate: VariantRecord, policy: Policy, out: Path | None
) -> dict[str, Any]:
    """`compare` on records, for checkpoints that lie outside their variant folders."""
    if candidate.quality is None and candidate.speed is None:
        raise RegistryError(
            f"{candidate.name} ({candidate.quality_folder.parent}): neither quality nor speed is measured; do it first"
        )
    _scored_as_timed(baseline, candidate)
    tasks, changed = _paired_quality(baseline, candidate, policy.confidence)
    measurements = [_of_task(task) for task in tasks]
    measurements += _of_speed_and_memory(baseline, candidate)
    verdict = decide(policy, measurements, _findings(baseline, candidate, policy.confidence))
    document: dict[str, Any] = {
        "verdict": verdict.verdict,
        "reasons": list(verdict.reasons),
        "checks": [check.to_mapping() for check in verdict.checks],
        "tasks": [_task_document(task) for task in tasks],
        "metrics": {name: value for task in tasks for name, value in task_metrics(task).items()},
        "flips": [asdict(flip) for flip in changed],
        "baseline": {"name": baseline.name, "identity": dict(baseline.identity)},
        "candidate": {"name": candidate.name, "identity": dict(candidate.identity)},
        "policy": policy.to_mapping(),
    }
    if out is not None:
        write_json(out / "comparison.json", document)
    return document


def metric_name(task: TaskComparison) -> str:
    """The flat name of a task's metric. A perplexity is scored as nll and reported as perplexity."""
    metric = "perplexity" if task.kind == "perplexity" and task.metric == "nll" else task.metric
    return f"quality.{task.task}.{metric}"


def task_metrics(task: TaskComparison) -> dict[str, float]:
    """What a comparison adds to MLflow for one task: the difference (or ratio) with its interval, flips, power."""
    name = metric_name(task)
    if task.kind == "perplexity":
        return {f"{name}.ratio": task.ratio, f"{name}.ratio.low": 1 + task.low, f"{name}.ratio.high": 1 + task.high}
    metrics = {f"{name}.delta": task.delta, f"{name}.delta.low": task.low, f"{name}.delta.high": task.high}
    metrics |= {f"{name}.gained": float(task.gained), f"{name}.lost": float(task.lost), f"{name}.mde": task.mde}
    if task.mcnemar_p_holm is not None:
        metrics[f"{name}.mcnemar_p_holm"] = task.mcnemar_p_holm
    return metrics


def _task_document(task: TaskComparison) -> dict[str, Any]:
    return {**asdict(task), "name": metric_name(task)}


def _paired_quality(
    baseline: VariantRecord, candidate: VariantRecord, confidence: float
) -> tuple[list[TaskComparison], list[Flip]]:
    if candidate.quality is None or baseline.quality is None:
        if candidate.quality is not None or baseline.quality is not None:
            missing = baseline if baseline.quality is None else candidate
            raise RegistryError(f"{missing.quality_folder}: not evaluated, so there is nothing to pair; evaluate it")
        return [], []
    try:
        before = read_samples(baseline.quality_folder / "samples.parquet")
        after = read_samples(candidate.quality_folder / "samples.parquet")
        return compare_tasks(before, after, confidence), flips(before, after)
    except EvalError as error:
        raise RegistryError(f"{candidate.name} against {baseline.name}: {error}") from None


def _of_task(task: TaskComparison) -> Measurement:
    interval = Interval(task.delta, task.low, task.high)
    ratio = Interval(1 + task.delta, 1 + task.low, 1 + task.high) if task.kind == "perplexity" else None
    return Measurement(
        metric_name(task),
        task.candidate,
        task.baseline,
        delta=interval,
        ratio=ratio,
        higher_is_better=task.higher_is_better,
        samples=task.samples,
        samples_needed=task.samples_needed,
    )


def _of_speed_and_memory(baseline: VariantRecord, candidate: VariantRecord) -> list[Measurement]:
    measured = _numbers(candidate.speed)
    before = _numbers(baseline.speed) | _numbers(candidate.speed, "baseline_metrics")
    if candidate.manifest is not None:
        measured = quantize_metrics(candidate.manifest) | measured
    return [
        Measurement(name, value, before.get(name), ratio=_ratio(name, measured, before))
        for name, value in measured.items()
        if not name.endswith(_DERIVED)
    ]


def _ratio(name: str, measured: Mapping[str, float], before: Mapping[str, float]) -> Interval | None:
    """The measured ratio with its interval. Bytes are exact: theirs has none, and may come from separate runs.

    A speed ratio without an interval (too few requests to resample a percentile) decides nothing, so it is left out.
    """
    ratio = measured.get(f"{name}.ratio")
    low, high = measured.get(f"{name}.ratio.low"), measured.get(f"{name}.ratio.high")
    if ratio is not None and low is not None and high is not None:
        return Interval(ratio, low, high)
    if name.startswith("memory."):
        if ratio is not None:
            return Interval.exact(ratio)
        if before.get(name):
            return Interval.exact(measured[name] / before[name])
    return None


def _numbers(document: Mapping[str, Any] | None, part: str = "metrics") -> dict[str, float]:
    return {name: float(value) for name, value in ((document or {}).get(part) or {}).items()}


def _findings(baseline: VariantRecord, candidate: VariantRecord, confidence: float) -> list[Check]:
    """Integrity failures, evaluations under two protocols and speed intervals of another confidence than the policy's
    forbid a decision; doubts about the speed run are advice, unless it says it is invalid."""
    findings = []
    for variant in (baseline, candidate):
        for name, result in ((variant.quality or {}).get("integrity") or {}).items():
            if str(result).startswith("fail"):
                findings.append(
                    _finding(f"integrity.{name}", True, f"{variant.name}: integrity check {name}: {result}")
                )
    protocols = [(variant.quality or {}).get("protocol") or {} for variant in (baseline, candidate)]
    for name, result in same_protocol(protocols[0], protocols[1]).items():
        if result != "pass":
            findings.append(_finding(f"protocol.{name}", True, f"{candidate.name}: not measured alike: {result}"))
    timed = ((candidate.speed or {}).get("protocol") or {}).get("confidence", confidence)
    if timed != confidence:
        reason = f"{candidate.name}: speed intervals hold {timed:g}, the policy asks for {confidence:g}; measure again"
        findings.append(_finding("validity.confidence", True, reason))
    for name, result in candidate.doubts.items():
        doubt = f"{candidate.name}: speed validity {name}: {result}"
        findings.append(_finding(f"validity.{name}", result.startswith("fail"), doubt))
    return findings


def _finding(name: str, critical: bool, reason: str) -> Check:
    return Check(name, "inconclusive", critical, "finding", None, None, None, None, reason)


def _scored_as_timed(baseline: VariantRecord, candidate: VariantRecord) -> None:
    if candidate.speed is None:
        return
    for variant, side in ((candidate, "candidate"), (baseline, "baseline")):
        scored = (variant.quality or {}).get("identity") or {}
        timed = candidate.speed.get(side) or {}
        for name in SCORED_AS_TIMED:
            if scored.get(name) and timed.get(name) and scored[name] != timed[name]:
                raise RegistryError(
                    f"{candidate.speed_folder}: timed the {side} with {name} {_shown(timed[name])}, but quality scored "
                    f"{_shown(scored[name])}; measure both on the same checkpoint, in the same environment"
                )


def _shown(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
