"""The last screen of a campaign: one table and three lines.

Each figure of a candidate stands with its paired difference from the baseline, so that one look says which variant is
smaller, faster, worse, and what was decided about it and why.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from eval.quality.samples import PERPLEXITY_METRICS
from quantgate.pipeline import CampaignOutcome
from registry.headline import task_accuracies
from registry.variant import VariantRecord

COLOURS = {"pass": "green", "fail": "red", "inconclusive": "yellow"}
NO_FIGURE = "-"
DTYPE_BITS = {"bfloat16": "16", "float16": "16", "float32": "32"}
LEGEND = (
    "second lines: paired difference from the baseline in points, or ratio to it (x); a speed ratio is to the "
    "baseline's run beside this one"
)


def summary_document(outcome: CampaignOutcome) -> dict[str, Any]:
    """What `quantgate run --json` prints; `metrics` has the flat names of MLflow behind each variant's name."""
    record = outcome.record
    return {
        "campaign": record.name,
        "directory": str(record.directory),
        "report": str(outcome.report),
        "tracking_uri": outcome.tracking_uri,
        "variants": {
            variant.name: {
                "checkpoint": str(variant.checkpoint),
                "run_id": outcome.runs.get(variant.name),
                "verdict": variant.verdict,
                "reasons": list((variant.comparison or {}).get("reasons", [])),
                "metrics": variant.metrics(),
            }
            for variant in record.variants
        },
        "metrics": {
            f"{variant.name}.{name}": value for variant in record.variants for name, value in variant.metrics().items()
        },
    }


def summary_table(outcome: CampaignOutcome) -> Table:
    """Bits, bytes, perplexity, task scores with paired differences, TTFT, tokens/s, verdict with its reason."""
    record = outcome.record
    tasks = _headline_tasks(record.baseline)
    table = Table(
        title=f"{record.name}: {record.model}",
        caption=LEGEND,
        box=box.HORIZONTALS,
        padding=(0, 1, 0, 0),
        show_lines=True,
    )
    table.add_column("variant", style="bold", no_wrap=True)
    for column in ("bits", "weights\nMB", *(_short(name) for name in tasks), "TTFT\np50 ms", "decode\ntok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict, with its reason", overflow="fold", min_width=24, ratio=1)
    for variant in record.variants:
        table.add_row(*_row(variant, tasks))
    return table


def summary_lines(outcome: CampaignOutcome) -> list[str]:
    """What is doubtful, where to look and how to decide."""
    record = outcome.record
    # A release is named by the campaign's folder, wherever `output` put that.
    first, *others = record.candidates
    release = f"{record.directory.absolute().name}-{first.name}"
    submit = f"quantgate release submit {_shown(record.directory)}/variants/{first.name}"
    approve = f"quantgate release approve {release}{_override(first)}"
    reject = f'quantgate release reject {release} --reason "REASON"'
    more = f" (so for {', '.join(other.name + _override(other) for other in others)})" if others else ""
    doubts = [
        f"doubt about the speed of {variant.name}: {check}: {said}"
        for variant in record.candidates
        for check, said in variant.doubts.items()
    ]
    return [
        *doubts,
        f"compare the variants:  quantgate ui   (MLflow on http://127.0.0.1:5000, store {outcome.tracking_uri})",
        f"read the report:       {_shown(outcome.report)}",
        f"approve or reject:     {submit}, then {approve} or {reject}{more}",
    ]


def _override(candidate: VariantRecord) -> str:
    """What its approval needs beside its name."""
    return "" if candidate.verdict == "pass" else ' --override "REASON"'


def _row(variant: VariantRecord, tasks: list[str]) -> list[str | Text]:
    metrics = variant.metrics()
    cells: list[str | Text] = [variant.name, _bits(variant), _megabytes(metrics)]
    cells += [_score(metrics, name) for name in tasks]
    workload = _workload(variant)
    cells.append(_with_ratio(metrics, f"speed.{workload}.ttft_ms.p50", ".0f"))
    cells.append(_with_ratio(metrics, f"speed.{workload}.decode_tokens_per_second", ".0f"))
    cells.append(_verdict(variant))
    return cells


def _verdict(variant: VariantRecord) -> str | Text:
    if variant.comparison is None:
        return "the baseline; its ratios are the noise floor"
    verdict = str(variant.comparison["verdict"])
    reasons = [str(reason) for reason in variant.comparison["reasons"]]
    first = reasons[0].partition(";")[0] if reasons else ""
    for prefix in ("quality.quantgate_", "quality.", f"speed.{_workload(variant)}.", "memory."):
        first = first.removeprefix(prefix)
    more = f" (and {len(reasons) - 1} more in the report)" if len(reasons) > 1 else ""
    return Text.assemble((verdict, COLOURS[verdict]), f": {first}{more}")


def _bits(variant: VariantRecord) -> str:
    """The weights', then a8 and the KV cache's dtype where they are not the model's."""
    if variant.manifest is None:
        lines = [DTYPE_BITS.get(str(variant.identity.get("dtype")), NO_FIGURE)]
    else:
        sizes = sorted({(module["bits"], module["group_size"]) for module in variant.manifest["modules"]})
        lines = [f"{bits}" if group == -1 else f"{bits} g{group}" for bits, group in sizes]
    return "\n".join([*lines, *variant.other_numerics])


def _megabytes(metrics: Mapping[str, float]) -> str:
    return _with_ratio(
        {name: value / 1e6 if not name.endswith("ratio") else value for name, value in metrics.items()},
        "memory.weights_bytes",
        ".0f",
    )


def _score(metrics: Mapping[str, float], name: str) -> str:
    value = metrics.get(name)
    if value is None:
        return NO_FIGURE
    if _is_perplexity(name):
        return _with_ratio(metrics, name, ".2f")
    delta = metrics.get(f"{name}.delta")
    return f"{value * 100:.1f}" + (f"\n{delta * 100:+.1f}" if delta is not None else "")


def _with_ratio(metrics: Mapping[str, float], name: str, form: str) -> str:
    value = metrics.get(name)
    if value is None:
        return NO_FIGURE
    ratio = metrics.get(f"{name}.ratio")
    return f"{value:{form}}" + (f"\n{ratio:.2f}x" if ratio is not None else "")


def _headline_tasks(baseline: VariantRecord) -> list[str]:
    """Perplexities first, then one accuracy per task, in the suite's order."""
    names = [str(task["metric_name"]) for task in (baseline.quality or {}).get("tasks", [])]
    return [*(name for name in names if _is_perplexity(name)), *task_accuracies(baseline)]


def _is_perplexity(name: str) -> bool:
    return name.rpartition(".")[2] in PERPLEXITY_METRICS


def _short(name: str) -> str:
    """A column head: the task without its protocol."""
    parts = name.split(".")
    if _is_perplexity(name):
        return "perplexity\n" + parts[2 if parts[1] == "perplexity" else 1].replace("_", " ")[:10]
    return parts[1].removeprefix("quantgate_") + "\n%"


def _workload(variant: VariantRecord) -> str:
    return str(((variant.speed or {}).get("workload") or {}).get("name", ""))


def _shown(path: Path) -> str:
    """A path as a person would type it: relative where it lies below the working directory."""
    absolute = path.resolve()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
