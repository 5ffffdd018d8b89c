"""Commands that lead to a decision: `compare` two variants, `run` a whole campaign, open the `ui`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from quantgate.commands.options import (
    ComputeOption,
    DataDirOption,
    JsonOption,
    KVDtypeOption,
    LimitOption,
    PolicyOption,
)
from quantgate.screen import Screen

EXIT_CODES = {"pass": 0, "fail": 3, "inconclusive": 4}


def register_decision_commands(app: typer.Typer) -> None:
    """Add this file's commands."""
    app.command("compare")(compare_command)
    app.command("run")(run_command)
    app.command("ui")(ui_command)


def compare_command(
    baseline: Annotated[str, typer.Argument(help="A checkpoint, or a variant's folder with results.")],
    candidate: Annotated[str, typer.Argument(help="A checkpoint, or a variant's folder with results.")],
    policy: PolicyOption = "default",
    suite: Annotated[str | None, typer.Option(help="Suite for checkpoints that are not measured yet.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Task names, comma-separated, in place of a suite.")] = None,
    workload: Annotated[str, typer.Option(help="Workload for checkpoints that are not measured yet.")] = "demo-closed",
    data_dir: DataDirOption = None,
    limit: LimitOption = None,
    kv_dtype: KVDtypeOption = "auto",
    compute: ComputeOption = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="Also write comparison.json into this folder.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Compare a candidate with its baseline, sample by sample, and state a verdict under a policy.

    Checkpoints are measured first where their results are not in the cache. --kv-dtype and --compute are the
    candidate's; the baseline keeps its own. Exit code: 0 pass, 3 fail, 4 inconclusive.

    Example: quantgate compare smollm2-135m smollm2-gptq
    """
    from quantgate.commands.measure import task_names
    from quantgate.numerics import Numerics
    from quantgate.results import compare_variants, comparison_tables

    screen = Screen(json_output)
    with screen.progress() as progress:
        comparison = compare_variants(
            baseline,
            candidate,
            policy=policy,
            suite=suite,
            tasks=task_names(tasks),
            workload=workload,
            data_dir=data_dir,
            limit=limit,
            numerics=Numerics(kv_dtype, compute),
            out=out,
            progress=progress,
        )
    screen.result(comparison, *comparison_tables(comparison))
    raise typer.Exit(EXIT_CODES[comparison["verdict"]])


def run_command(
    campaign: Annotated[Path, typer.Argument(metavar="CAMPAIGN.YAML", help="The campaign file.")],
    json_output: JsonOption = False,
) -> None:
    """Run a whole campaign: quantize, measure, compare, log to MLflow, write report.html.

    Stages whose inputs have not changed are skipped; after a kill the same command finishes the work.

    Example: quantgate run examples/demo.yaml
    """
    from quantgate.campaign import load_campaign
    from quantgate.pipeline import run_campaign
    from quantgate.summary import summary_document, summary_lines, summary_table

    screen = Screen(json_output)
    outcome = run_campaign(load_campaign(campaign), screen)
    screen.result(summary_document(outcome), summary_table(outcome), *summary_lines(outcome))


def ui_command(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
) -> None:
    """Open MLflow's own UI on the store that campaigns log to.

    Example: quantgate ui --port 5000
    """
    from registry import tracking

    command, environment = tracking.ui_command(port)
    Screen().note(f"MLflow UI: {tracking.ui_url(port)} (Ctrl-C ends it)")
    os.execvpe(command[0], command, environment)
