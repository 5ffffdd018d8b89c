"""The handful of numbers that say at a glance whether a variant is smaller, faster or worse.

A campaign logs hundreds of metrics. `Headline` holds the few that a table shows, absolute and against the baseline.
`glance` gives the comparisons short names that begin with a digit, so that they come first in MLflow's tables and
charts and are still readable where MLflow cuts a chart's title after eight letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from registry.variant import Document, VariantRecord

GLANCE = {
    "1_size_x": "weights as served, times the baseline's (less is better)",
    "2_speed_x": "decode tokens per second, times the baseline's (more is better)",
    "3_ttft_x": "95th percentile of time to first token, times the baseline's (less is better)",
    "4_ppl_x": "perplexity, times the baseline's, on the worst corpus (less is better)",
    "5_acc_pts": "mean paired difference of accuracy, in points (more is better)",
    "6_worst_pts": "the worst task's paired difference of accuracy, in points (more is better)",
}

MEMORY = {
    "weights": "memory.weights_bytes",
    "KV cache": "memory.kv_cache_bytes",
    "activations, peak": "memory.activation_peak_bytes",
    "whole process, peak": "memory.process_peak_bytes",
    "checkpoint on disk": "memory.checkpoint_bytes",
}
"""The kinds of memory that a picture shows, by their label."""


@dataclass(frozen=True)
class Headline:
    """One variant in a table's row. `_ratio`: times the baseline's; None: not measured."""

    weights_bytes: float | None
    size_ratio: float | None
    decode_tokens_per_second: float | None
    decode_ratio: float | None
    ttft_p95_ms: float | None
    ttft_ratio: float | None
    perplexity: float | None
    perplexity_ratio: float | None
    accuracy: float | None
    accuracy_delta: float | None
    worst_task_delta: float | None


def headline(variant: VariantRecord) -> Headline:
    """The variant's headline numbers, from its flat metrics."""
    metrics = variant.metrics()
    accuracies = task_accuracies(variant)
    deltas = [metrics[f"{name}.delta"] for name in accuracies if f"{name}.delta" in metrics]
    return Headline(
        weights_bytes=_first(metrics, "memory.weights_bytes"),
        size_ratio=_first(metrics, "memory.weights_bytes.ratio"),
        decode_tokens_per_second=_first(metrics, "speed.*.decode_tokens_per_second"),
        decode_ratio=_first(metrics, "speed.*.decode_tokens_per_second.ratio"),
        ttft_p95_ms=_first(metrics, "speed.*.ttft_ms.p95"),
        ttft_ratio=_first(metrics, "speed.*.ttft_ms.p95.ratio"),
        perplexity=_first(metrics, "quality.*.perplexity"),
        perplexity_ratio=max(_all(metrics, "quality.*.perplexity.ratio"), default=None),
        accuracy=sum(accuracies.values()) / len(accuracies) if accuracies else None,
        accuracy_delta=sum(deltas) / len(deltas) if deltas else None,
        worst_task_delta=min(deltas, default=None),
    )


def glance(variant: VariantRecord, is_baseline: bool) -> dict[str, float]:
    """The metrics of GLANCE, rounded for reading (the exact values stand under their own names).

    The baseline's are 1 and 0 by definition, so that its bar stands beside the others; where it was timed against
    itself, what was measured (the noise floor).
    """
    numbers = headline(variant)
    found = {
        "1_size_x": numbers.size_ratio,
        "2_speed_x": numbers.decode_ratio,
        "3_ttft_x": numbers.ttft_ratio,
        "4_ppl_x": numbers.perplexity_ratio,
        "5_acc_pts": None if numbers.accuracy_delta is None else 100 * numbers.accuracy_delta,
        "6_worst_pts": None if numbers.worst_task_delta is None else 100 * numbers.worst_task_delta,
    }
    by_definition = {name: 1.0 if name.endswith("_x") else 0.0 for name in GLANCE} if is_baseline else {}
    return by_definition | {name: round(value, 3) for name, value in found.items() if value is not None}


def task_accuracies(variant: VariantRecord) -> dict[str, float]:
    """One accuracy per task, by flat metric name: `acc` where the task has it, else its first that should rise."""
    chosen: dict[str, tuple[str, float]] = {}
    for task in (variant.quality or {}).get("tasks") or []:
        if task.get("higher_is_better") and (task["name"] not in chosen or task["metric"] == "acc"):
            chosen[task["name"]] = (task["metric_name"], float(task["value"]))
    return dict(chosen.values())


def check_of(comparison: Document, metric: str) -> Document:
    """The check that holds the change of a metric against a limit; else the first on it; else an empty one."""
    checks = [check for check in comparison.get("checks") or [] if str(check["name"]).split(":")[0] == metric]
    of_change = [check for check in checks if check.get("limit_kind") in ("margin", "max_ratio")]
    return next(iter(of_change + checks), {})


def limit_as_delta(check: Document, kind: str) -> float | None:
    """Where the check's limit lies on the axis of the task's `delta` (`kind`: accuracy or perplexity); None where it
    limits something else, such as the candidate's own value."""
    limit = check.get("limit")
    if limit is None or check.get("limit_kind") not in ("margin", "max_ratio"):
        return None
    if check["limit_kind"] == "max_ratio":
        return float(limit) - 1 if kind == "perplexity" else None
    return float(limit) if kind == "perplexity" else -float(limit)


def markdown_table(variants: Sequence[VariantRecord]) -> str:
    """Variants in rows, headline numbers in columns, the verdict last; for MLflow's descriptions."""
    rows = [
        "| variant | verdict | size | decode speed | TTFT p95 | perplexity | accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        numbers = headline(variant)
        cells = [
            variant.name,
            f"**{variant.verdict}**" if variant.verdict else "the baseline",
            _cell("{:.0f} MB", numbers.weights_bytes, numbers.size_ratio, scale=1e-6),
            _cell("{:.0f} tok/s", numbers.decode_tokens_per_second, numbers.decode_ratio),
            _cell("{:.0f} ms", numbers.ttft_p95_ms, numbers.ttft_ratio),
            _cell("{:.2f}", numbers.perplexity, numbers.perplexity_ratio),
            _accuracy_cell(numbers),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(form: str, value: float | None, ratio: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "not measured"
    told = form.format(value * scale)
    return told if ratio is None else f"{told} ({ratio:.2f}x)"


def _accuracy_cell(numbers: Headline) -> str:
    if numbers.accuracy is None:
        return "not measured"
    told = f"{numbers.accuracy * 100:.1f} %"
    return told if numbers.accuracy_delta is None else f"{told} ({numbers.accuracy_delta * 100:+.1f})"


def _all(metrics: Mapping[str, float], glob: str) -> list[float]:
    return [value for name, value in metrics.items() if fnmatchcase(name, glob)]


def _first(metrics: Mapping[str, float], glob: str) -> float | None:
    return next(iter(_all(metrics, glob)), None)
