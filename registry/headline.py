"""The handful of numbers that say at a glance whether a variant is smaller, faster or worse.

A campaign logs hundreds of metrics. These few summarize them under names that sort before all others in MLflow's tables
and charts (`headline.` < `memory.` < `quality.` < `quantize.` < `speed.`), the same for every task suite and workload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from registry.variant import VariantRecord

DEFINITIONS = {
    "headline.size_ratio": "weights as served, variant / baseline (smaller is better)",
    "headline.size_mb": "weights as served, in 10^6 bytes",
    "headline.decode_speed_ratio": "decode tokens per second, variant / baseline, interleaved (larger is better)",
    "headline.decode_tokens_per_second": "decode tokens per second on this machine",
    "headline.ttft_p95_ratio": "95th percentile of time to first token, variant / baseline (smaller is better)",
    "headline.ttft_p95_ms": "95th percentile of time to first token, in ms",
    "headline.perplexity_ratio": "perplexity, variant / baseline; the worst corpus (smaller is better)",
    "headline.perplexity": "perplexity; the first corpus of the suite",
    "headline.accuracy": "mean accuracy over the suite's tasks",
    "headline.accuracy_delta": "mean of the tasks' paired accuracy differences (larger is better)",
    "headline.worst_task_delta": "the largest loss of accuracy on any one task",
}


def headline(variant: VariantRecord) -> dict[str, float]:
    """The headline metrics that can be told from what was measured; names as in DEFINITIONS."""
    metrics = variant.metrics()
    found = {
        "headline.size_ratio": _first(metrics, "memory.weights_bytes.ratio"),
        "headline.size_mb": _scaled(_first(metrics, "memory.weights_bytes"), 1e-6),
        "headline.decode_speed_ratio": _first(metrics, "speed.*.decode_tokens_per_second.ratio"),
        "headline.decode_tokens_per_second": _first(metrics, "speed.*.decode_tokens_per_second"),
        "headline.ttft_p95_ratio": _first(metrics, "speed.*.ttft_ms.p95.ratio"),
        "headline.ttft_p95_ms": _first(metrics, "speed.*.ttft_ms.p95"),
        "headline.perplexity": _first(metrics, "quality.*.perplexity"),
        "headline.perplexity_ratio": max(_all(metrics, "quality.*.perplexity.ratio"), default=None),
    }
    accuracies = list(task_accuracies(variant).values())
    if accuracies:
        found["headline.accuracy"] = sum(accuracies) / len(accuracies)
    deltas = [metrics[f"{name}.delta"] for name in task_accuracies(variant) if f"{name}.delta" in metrics]
    if deltas:
        found |= {"headline.accuracy_delta": sum(deltas) / len(deltas), "headline.worst_task_delta": min(deltas)}
    return {name: found[name] for name in DEFINITIONS if found.get(name) is not None}  # type: ignore[misc]


def task_accuracies(variant: VariantRecord) -> dict[str, float]:
    """One accuracy per task, by flat metric name: `acc` where the task has it, else the first where higher is better."""
    chosen: dict[str, tuple[str, float]] = {}
    for task in (variant.quality or {}).get("tasks") or []:
        if not task.get("higher_is_better"):
            continue
        if task["name"] not in chosen or task["metric"] == "acc":
            chosen[task["name"]] = (task["metric"], float(task["value"]))
    return {f"quality.{task}.{metric}": value for task, (metric, value) in chosen.items()}


def workload_name(variant: VariantRecord) -> str | None:
    """The workload whose speed was measured, from the metric names."""
    names = [name for name in variant.metrics() if fnmatchcase(name, "speed.*.ttft_ms.p95")]
    return names[0].removeprefix("speed.").removesuffix(".ttft_ms.p95") if names else None


def markdown_table(variants: Sequence[VariantRecord]) -> str:
    """Variants in rows, headline metrics in columns, the verdict last; for MLflow's descriptions."""
    rows = [
        "| variant | size | decode speed | TTFT p95 | perplexity | accuracy | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        numbers = headline(variant)
        cells = [
            variant.name,
            _cell(numbers, "headline.size_mb", "headline.size_ratio", "{:.0f} MB"),
            _cell(numbers, "headline.decode_tokens_per_second", "headline.decode_speed_ratio", "{:.0f} tok/s"),
            _cell(numbers, "headline.ttft_p95_ms", "headline.ttft_p95_ratio", "{:.0f} ms"),
            _cell(numbers, "headline.perplexity", "headline.perplexity_ratio", "{:.2f}"),
            _accuracy_cell(numbers),
            f"**{variant.verdict}**" if variant.verdict else "the baseline",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(numbers: Mapping[str, float], absolute: str, ratio: str, form: str) -> str:
    if absolute not in numbers:
        return "not measured"
    told = form.format(numbers[absolute])
    return f"{told} ({numbers[ratio]:.2f}x)" if ratio in numbers else told


def _accuracy_cell(numbers: Mapping[str, float]) -> str:
    if "headline.accuracy" not in numbers:
        return "not measured"
    told = f"{numbers['headline.accuracy'] * 100:.1f} %"
    delta = numbers.get("headline.accuracy_delta")
    return told if delta is None else f"{told} ({delta * 100:+.1f})"


def _all(metrics: Mapping[str, float], glob: str) -> list[float]:
    return [value for name, value in metrics.items() if fnmatchcase(name, glob)]


def _first(metrics: Mapping[str, float], glob: str) -> float | None:
    return next(iter(_all(metrics, glob)), None)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
