"""Results of checkpoints named on the command line: measured once, kept in the cache, shown as tables."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from eval.quality.run import QualityResult, evaluate
from eval.speed.run import SpeedResult, measure
from eval.speed.workload import load_workload
from quantgate import home
from quantgate.errors import FrontDoorError
from quantgate.fetch import Progress
from quantgate.numerics import OWN, Numerics
from quantgate.source import resolve_checkpoint
from quantize import Checkpoint
from registry.compare import compare_variants as compare_records
from registry.policy import load_policy
from registry.variant import VariantRecord
from tasks.suites import load_suite

DEFAULT_SUITE = "core"


def evaluate_checkpoint(
    checkpoint: Path,
    *,
    suite: str | None,
    tasks: Sequence[str],
    data_dir: Path | None,
    limit: int | None,
    numerics: Numerics,
    out: Path | None,
    progress: Progress,
) -> QualityResult:
    """Quality of one checkpoint, from the cache where the same measurement stands there."""
    chosen = load_suite(suite or DEFAULT_SUITE) if suite or not tasks else None
    what = f"quality-{suite or DEFAULT_SUITE}" if chosen else "quality-" + _short_digest(",".join(tasks))
    if limit is not None:
        what += f"-{limit}"
    return evaluate(
        checkpoint,
        suite=chosen,
        tasks=list(tasks),
        data_dir=data_dir,
        limit=limit,
        out=out or _kept(checkpoint, numerics) / what.replace("/", "_"),
        engine_options=numerics.engine_options(),
        progress=progress,
    )


def measure_checkpoint(
    checkpoint: Path,
    *,
    against: Path | None,
    workload: str,
    repeats: int | None,
    numerics: Numerics,
    out: Path | None,
    progress: Progress,
    drafting: Mapping[str, Any] | None = None,
    confidence: float = 0.95,
) -> SpeedResult:
    """Speed and memory of one checkpoint, alone or paired, from the cache where the same measurement stands there.
    `numerics` and `drafting` (engine options) are the checkpoint's, not the baseline's."""
    chosen = load_workload(workload)
    other = Checkpoint.open(against).content_digest()[:12] if against else "alone"
    if drafting:
        other += "-" + _short_digest(json.dumps(drafting, sort_keys=True))
    return measure(
        checkpoint,
        against=against,
        workload=chosen,
        out=out or _kept(checkpoint, numerics) / f"speed-{chosen.name}-{other}",
        candidate_options=numerics.engine_options() | dict(drafting or {}),
        repeats=repeats,
        confidence=confidence,
        progress=progress,
    )


def compare_variants(
    baseline: str,
    candidate: str,
    *,
    policy: str,
    suite: str | None,
    tasks: Sequence[str],
    workload: str,
    data_dir: Path | None,
    limit: int | None,
    numerics: Numerics,
    out: Path | None,
    progress: Progress,
) -> dict[str, Any]:
    """The comparison of two variants, each a folder with results or a checkpoint that is measured first.

    Speed is measured only where the policy limits it. `numerics` are the candidate's.
    """
    rules = load_policy(policy)
    folders = [Path(reference) for reference in (baseline, candidate)]
    if all(_holds_results(folder) for folder in folders):
        if numerics != OWN:
            raise FrontDoorError(
                f"{candidate} holds results, which say their own numerics: leave out --kv-dtype and --compute, or name "
                "a checkpoint"
            )
        records = [VariantRecord.read(folder) for folder in folders]
    else:
        paths = [resolve_checkpoint(reference, progress) for reference in (baseline, candidate)]
        quality = [
            evaluate_checkpoint(
                path,
                suite=suite,
                tasks=tasks,
                data_dir=data_dir,
                limit=limit,
                numerics=of_side,
                out=None,
                progress=progress,
            )
            for path, of_side in zip(paths, (OWN, numerics), strict=True)
        ]
        speed: list[SpeedResult | None] = [None, None]
        if any(rule.metric.startswith(("speed.", "memory.", "*")) for rule in rules.rules):
            # The baseline runs beside the candidate, so it needs no measurement of its own.
            speed[1] = measure_checkpoint(
                paths[1],
                against=paths[0],
                workload=workload,
                repeats=None,
                numerics=numerics,
                out=None,
                progress=progress,
                confidence=rules.confidence,
            )
        named = candidate + numerics.said()
        records = [
            VariantRecord.of_results(reference, path, scored.directory, timed.directory if timed else None)
            for reference, path, scored, timed in zip((baseline, named), paths, quality, speed, strict=True)
        ]
    return compare_records(records[0], records[1], rules, out)


def quality_table(result: QualityResult) -> Table:
    """Every task with its score, standard error and size."""
    table = Table("task", "metric", "value", "± s.e.", "samples", "chance", title="quality")
    for task in result.tasks:
        chance = "" if task.chance is None else f"{task.chance:.3f}"
        stderr = "" if task.stderr is None else f"{task.stderr:.4f}"
        table.add_row(task.name, task.metric, f"{task.value:.4f}", stderr, str(task.samples), chance)
    return table


def speed_table(result: SpeedResult) -> Table:
    """Latency percentiles, rates and memory, with their ratios where a baseline ran beside."""
    metrics = result.metrics
    prefix = f"speed.{result.workload['name']}."
    table = Table("metric", "value", "ratio to the baseline (interval)", title="speed and memory")
    for name, value in metrics.items():
        if ".ratio" in name or (name.startswith(prefix) and name.rpartition(".")[2] in ("p90", "max")):
            continue
        table.add_row(name, f"{value:,.2f}", _ratio(metrics, name))
    return table


def validity_lines(result: SpeedResult) -> list[str]:
    """What makes the measurement doubtful, one line each."""
    return [f"doubt: {check}: {said}" for check, said in result.warnings.items()]


def comparison_tables(comparison: Mapping[str, Any]) -> list[Table | str]:
    """Every check with its outcome, then the verdict and its reasons."""
    table = Table("check", "outcome", "critical", "why", title="checks")
    colours = {"pass": "green", "fail": "red"}
    for check in comparison["checks"]:
        colour = colours.get(check["status"], "yellow")
        table.add_row(
            check["name"],
            Text(check["status"], style=colour),
            "yes" if check["critical"] else "advice",
            check["reason"],
        )
    return [table, f"verdict: {comparison['verdict']}", *(f"  {reason}" for reason in comparison["reasons"])]


def _ratio(metrics: Mapping[str, float], name: str) -> str:
    ratio = metrics.get(f"{name}.ratio")
    if ratio is None:
        return ""
    low, high = metrics.get(f"{name}.ratio.low"), metrics.get(f"{name}.ratio.high")
    return f"{ratio:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None and high is not None else "")


def _kept(checkpoint: Path, numerics: Numerics) -> Path:
    # By all that decides the answers: two variants of the same weights must not take turns in one folder.
    return home.results() / (Checkpoint.open(checkpoint).content_digest()[:16] + numerics.folder_suffix())


def _holds_results(folder: Path) -> bool:
    return (folder / "quality" / "quality.json").is_file() or (folder / "speed" / "speed.json").is_file()


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
