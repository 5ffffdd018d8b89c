"""Plots of one variant against its baseline, as matplotlib figures for MLflow's artifact view.

Three pictures, one question each: how did quality change (a forest plot, every interval beside its limit), what does it
cost in memory, how much faster is it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from registry.headline import MEMORY, check_of, limit_as_delta
from registry.variant import VariantRecord

STATUS_COLOURS = {"pass": "#1a7f37", "fail": "#c62828", "inconclusive": "#b26a00", "nodata": "#6b7280"}
_NEUTRAL = "#4b5563"


def quality_forest(variant: VariantRecord) -> Figure | None:
    """Paired differences with intervals: accuracy in points, perplexity in per cent, coloured by their check."""
    comparison = variant.comparison or {}
    tasks: Sequence[Mapping[str, Any]] = comparison.get("tasks") or []
    accuracy = [task for task in tasks if task["kind"] == "accuracy"]
    perplexity = [task for task in tasks if task["kind"] == "perplexity"]
    panels = [
        (group, label)
        for group, label in (
            (accuracy, "accuracy, points (right is better)"),
            (perplexity, "perplexity, % (left is better)"),
        )
        if group
    ]
    if not panels:
        return None
    figure = Figure(figsize=(9, 1.4 + 0.42 * len(tasks) + 0.5 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(group) + 1 for group, _ in panels])[:, 0]
    for axis, (group, label) in zip(axes, panels, strict=True):
        _forest(axis, group, comparison)
        axis.set_xlabel(label)
    figure.suptitle(
        f"{variant.name}: quality against the baseline, {100 * float(tasks[0]['confidence']):g} % intervals"
    )
    return figure


def _forest(axis: Axes, tasks: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any]) -> None:
    axis.axvline(0, color=_NEUTRAL, linewidth=1)
    for row, task in enumerate(reversed(tasks)):
        check = check_of(comparison, task["name"])
        colour = STATUS_COLOURS.get(str(check.get("status")), _NEUTRAL)
        value, low, high = (100 * float(task[end]) for end in ("delta", "low", "high"))
        axis.plot([low, high], [row, row], color=colour, linewidth=2.5, solid_capstyle="round")
        axis.plot([value], [row], "o", color=colour, markersize=7)
        limit = limit_as_delta(check, task["kind"])
        if limit is not None:
            axis.plot([100 * limit] * 2, [row - 0.35, row + 0.35], color="#c62828", linewidth=1.2, linestyle=":")
    axis.set_yticks(range(len(tasks)), [str(task["task"]) for task in reversed(tasks)])
    axis.set_ylim(-0.6, len(tasks) - 0.4)
    _quiet(axis)


def memory_bars(variant: VariantRecord) -> Figure | None:
    """Bytes of baseline and variant side by side, in 10^6 bytes."""
    metrics = variant.metrics()
    rows = [
        (label, metrics[name] / metrics[f"{name}.ratio"] / 1e6, metrics[name] / 1e6)
        for label, name in MEMORY.items()
        if name in metrics and metrics.get(f"{name}.ratio")
    ]
    if not rows:
        return None
    figure = Figure(figsize=(9, 1.2 + 0.7 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for row, (_, before, after) in enumerate(reversed(rows)):
        axis.barh(row + 0.2, before, height=0.36, color="#c3c8d0")
        axis.barh(row - 0.2, after, height=0.36, color="#1d4ed8")
        axis.text(before, row + 0.2, f" {before:,.0f}", va="center", color=_NEUTRAL)
        axis.text(after, row - 0.2, f" {after:,.0f}  ({after / before:.2f}x)", va="center", color="#1d4ed8")
    axis.set_yticks(range(len(rows)), [label for label, _, _ in reversed(rows)])
    axis.set_xlim(0, 1.22 * max(max(before, after) for _, before, after in rows))
    axis.set_xlabel("MB (10^6 bytes); grey: baseline, blue: variant")
    _quiet(axis)
    figure.suptitle(f"{variant.name}: memory")
    return figure


def speed_ratios(variant: VariantRecord) -> Figure | None:
    """Every paired speed ratio with its interval; green where the whole interval is better than the baseline."""
    metrics = variant.metrics()
    rows = []
    for name in metrics:
        if name.startswith("speed.") and name.endswith(".ratio") and f"{name}.low" in metrics:
            rows.append((name.removesuffix(".ratio"), metrics[f"{name}.low"], metrics[name], metrics[f"{name}.high"]))
    if not rows:
        return None
    figure = Figure(figsize=(9, 1.2 + 0.36 * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(1, color=_NEUTRAL, linewidth=1)
    for row, (name, low, value, high) in enumerate(reversed(rows)):
        colour = speed_colour(name, low, high)
        axis.plot([low, high], [row, row], color=colour, linewidth=2.5, solid_capstyle="round")
        axis.plot([value], [row], "o", color=colour, markersize=6)
    axis.set_yticks(range(len(rows)), [name.removeprefix("speed.") for name, *_ in reversed(rows)])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xlabel("variant / baseline; per second: right is better; ms: left is better")
    _quiet(axis)
    figure.suptitle(f"{variant.name}: speed against the baseline, interleaved")
    return figure


def speed_colour(name: str, low: float, high: float) -> str:
    """Green, red or grey: wholly better, wholly worse, or not told apart from the baseline."""
    lower_is_better = "_ms" in name
    if low > 1:
        return STATUS_COLOURS["fail" if lower_is_better else "pass"]
    if high < 1:
        return STATUS_COLOURS["pass" if lower_is_better else "fail"]
    return _NEUTRAL


def _quiet(axis: Axes) -> None:
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    axis.set_axisbelow(True)
