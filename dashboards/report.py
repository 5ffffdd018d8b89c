"""report.html: a campaign on one self-contained page, the verdict first.

The page is a pure function of the campaign's record: no clock, no script, no file beside it. Jinja escapes everything
that comes from a model or a data set; only the figures, which escape their own labels, go in as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dashboards.figures import BarRow, ForestRow, bars, forest
from registry.headline import MEMORY, Headline, check_of, headline, limit_as_delta
from registry.json_files import write_text
from registry.variant import CampaignRecord, VariantRecord, flat

FLIPS_SHOWN = 12
_SPEED_STATISTICS = ("p50", "p95", "mean")


@dataclass(frozen=True)
class VariantPage:
    """One variant as the page shows it."""

    record: VariantRecord
    is_baseline: bool
    headline: Headline
    marks: dict[str, str]
    tasks: list[dict[str, Any]]
    quality_figures: list[Markup]
    speed_figure: Markup
    speed_rows: list[tuple[str, float, float | None, float | None, float | None]]
    flips: list[tuple[str, list[Mapping[str, Any]], int]]
    documents: dict[str, dict[str, Any]]

    @property
    def verdict(self) -> str:
        return "baseline" if self.is_baseline else self.record.verdict or "not compared"

    @property
    def comparison(self) -> Mapping[str, Any]:
        return self.record.comparison or {}


def write_report(campaign: CampaignRecord, out: Path) -> Path:
    """Write the campaign's page to `out`, whole or not at all; returns `out`."""
    write_text(out, render_report(campaign))
    return out


def render_report(campaign: CampaignRecord) -> str:
    """The campaign's page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"points": _points, "number": _number, "megabytes": _megabytes, "ratio": _ratio}
    pages = [_page(variant, campaign) for variant in campaign.variants]
    return environment.get_template("report.html.j2").render(
        campaign=campaign,
        pages=pages,
        candidates=[page for page in pages if not page.is_baseline],
        memory_figures=_memory_figures(campaign),
        policy=next((page.comparison["policy"] for page in pages if page.comparison.get("policy")), None),
        flips_shown=FLIPS_SHOWN,
    )


def _page(variant: VariantRecord, campaign: CampaignRecord) -> VariantPage:
    comparison = variant.comparison or {}
    tasks = [{**task, "check": check_of(comparison, task["name"])} for task in comparison.get("tasks") or []]
    speed_rows = _speed_rows(variant)
    return VariantPage(
        record=variant,
        is_baseline=variant is campaign.baseline,
        headline=headline(variant),
        marks=_marks(variant),
        tasks=tasks,
        quality_figures=_quality_figures(tasks),
        speed_figure=_speed_figure(variant.name, speed_rows),
        speed_rows=speed_rows,
        flips=_flips(comparison.get("flips") or []),
        documents=_documents(variant),
    )


def _marks(variant: VariantRecord) -> dict[str, str]:
    """For the table of verdicts: "better", "worse" or "same", by whether the whole interval lies on one side of 1."""
    metrics = variant.metrics()
    marks = {"size": "same", "decode": "same", "ttft": "same", "perplexity": "same"}
    globs = {
        "size": "memory.weights_bytes",
        "decode": "speed.*.decode_tokens_per_second",
        "ttft": "speed.*.ttft_ms.p95",
        "perplexity": "quality.*.perplexity",
    }
    for column, glob in globs.items():
        name = next((name for name in metrics if fnmatchcase(name, glob)), None)
        ratio = metrics.get(f"{name}.ratio")
        exact = None if column != "size" else ratio
        low, high = metrics.get(f"{name}.ratio.low", exact), metrics.get(f"{name}.ratio.high", exact)
        if name is not None and low is not None and high is not None:
            marks[column] = _better_or_worse(name, low, high)
    return marks


def _quality_figures(tasks: Sequence[Mapping[str, Any]]) -> list[Markup]:
    accuracy: list[ForestRow] = []
    perplexity: list[ForestRow] = []
    for task in tasks:
        check = task["check"]
        low, value, high = (100 * float(task[end]) for end in ("low", "delta", "high"))
        limit = limit_as_delta(check, task["kind"])
        limit = None if limit is None else 100 * limit
        unit = " %" if task["kind"] == "perplexity" else ""
        told = f"{value:+.1f}{unit} ({low:+.1f} to {high:+.1f})"
        row = ForestRow(str(task["task"]), low, value, high, str(check.get("status", "same")), told, limit)
        (perplexity if task["kind"] == "perplexity" else accuracy).append(row)
    figures = [
        forest(accuracy, 0.0, "accuracy, difference in points: right is better; the tick is the limit", "accuracy"),
        forest(perplexity, 0.0, "perplexity, change in %: left is better; the tick is the limit", "perplexity"),
    ]
    return [figure for figure in figures if figure]


def _speed_rows(variant: VariantRecord) -> list[tuple[str, float, float | None, float | None, float | None]]:
    """(metric, value, ratio, low, high) of the rates and of the latencies' usual statistics."""
    metrics = {name: value for name, value in variant.metrics().items() if name.startswith("speed.")}
    rows = []
    for name, value in metrics.items():
        last = name.rsplit(".", 1)[-1]
        if ".ratio" in name or ("_ms." in name and last not in _SPEED_STATISTICS):
            continue
        ends = (metrics.get(f"{name}.ratio"), metrics.get(f"{name}.ratio.low"), metrics.get(f"{name}.ratio.high"))
        rows.append((name.removeprefix("speed."), value, *ends))
    return rows


def _speed_figure(variant: str, rows: Sequence[tuple[str, float, float | None, float | None, float | None]]) -> Markup:
    drawn = [
        ForestRow(name, low, ratio, high, _better_or_worse(name, low, high), f"{ratio:.2f}x ({low:.2f} to {high:.2f})")
        for name, _, ratio, low, high in rows
        if ratio is not None and low is not None and high is not None
    ]
    unit = "times the baseline; per second: right is better; ms: left is better"
    return forest(drawn, 1.0, unit, f"speed of {variant}")


def _better_or_worse(metric: str, low: float, high: float) -> str:
    if low <= 1 <= high:
        return "same"
    lower_is_better = any(word in metric for word in ("_ms", "_bytes", "cost", "perplexity"))
    return "better" if (high < 1) == lower_is_better else "worse"


def _memory_figures(campaign: CampaignRecord) -> list[tuple[str, Markup]]:
    """One group of bars per kind of memory, a bar per variant."""
    figures = []
    for label, metric in MEMORY.items():
        rows = []
        for variant in campaign.variants:
            value, ratio = variant.metrics().get(metric), variant.metrics().get(f"{metric}.ratio")
            is_baseline = variant is campaign.baseline
            if is_baseline and value is None:
                value = _baseline_bytes(campaign, metric)
            if value is None:
                continue
            told = f"{value / 1e6:,.0f} MB" + ("" if ratio is None or is_baseline else f" ({ratio:.2f}x)")
            rows.append(BarRow(variant.name, value, told, "base" if is_baseline else "candidate"))
        if rows:
            figures.append((label, bars(rows, label)))
    return figures


def _baseline_bytes(campaign: CampaignRecord, metric: str) -> float | None:
    """The baseline's bytes as a candidate's record of them tells: its own divided by its ratio."""
    for candidate in campaign.candidates:
        metrics = candidate.metrics()
        if metric in metrics and metrics.get(f"{metric}.ratio"):
            return metrics[metric] / metrics[f"{metric}.ratio"]
    return None


def _flips(flips: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]], int]]:
    """(task and metric, the first flips of it, how many there are), losses before gains."""
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for flip in flips:
        by_task.setdefault(f"{flip['task']} {flip.get('metric', '')}".strip(), []).append(flip)
    return [
        (task, sorted(group, key=lambda flip: flip["direction"] != "lost")[:FLIPS_SHOWN], len(group))
        for task, group in by_task.items()
    ]


def _documents(variant: VariantRecord) -> dict[str, dict[str, Any]]:
    """What the evidence says about itself, flat, by heading."""
    quality, speed, manifest = variant.quality or {}, variant.speed or {}, variant.manifest or {}
    recipe = {key: manifest[key] for key in ("recipe", "calibration", "versions", "coverage") if manifest.get(key)}
    found = {
        "identity": variant.identity,
        "quality protocol": quality.get("protocol") or {},
        "integrity": quality.get("integrity") or {},
        "workload": speed.get("workload") or {},
        "speed protocol": speed.get("protocol") or {},
        "speed validity": speed.get("validity") or {},
        "machine": speed.get("machine") or {},
        "quantization": recipe,
    }
    return {heading: _flat(document) for heading, document in found.items() if document}


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for name, value in document.items():
        flattened |= flat(value, name) if isinstance(value, Mapping) else {name: value}
    return flattened


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _megabytes(value: float | None) -> str:
    return "not measured" if value is None else f"{value / 1e6:,.0f} MB"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
