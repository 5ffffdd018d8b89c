"""`quantgate release`: take a judged candidate to a decision, with every act in the ledger."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from quantgate.commands.options import ActorOption, JsonOption
from quantgate.screen import Screen

release_app = typer.Typer(
    help="Submit, show, approve or reject a candidate; every act is one line in a hash-chained ledger.\n\n"
    "Example: quantgate release submit runs/demo/variants/int8",
    no_args_is_help=True,
)
ReleaseArgument = Annotated[str, typer.Argument(metavar="RELEASE", help="The release's id, as `submit` printed it.")]


@release_app.command("submit")
def submit_command(
    variant: Annotated[Path, typer.Argument(help="A variant's folder in a campaign, or its comparison.json.")],
    name: Annotated[str | None, typer.Option(help="The release's id; default: campaign and variant.")] = None,
    actor: ActorOption = None,
    json_output: JsonOption = False,
) -> None:
    """Hand a judged candidate in for a decision.

    Example: quantgate release submit runs/demo/variants/int8
    """
    from registry import release

    _show(release.submit(variant, name=name, actor=actor), Screen(json_output))


@release_app.command("show")
def show_command(release_id: ReleaseArgument, json_output: JsonOption = False) -> None:
    """Show a release: its state, its verdict and the evidence that it rests on.

    Example: quantgate release show demo-int8
    """
    from registry import release

    _show(release.show(release_id), Screen(json_output))


@release_app.command("approve")
def approve_command(
    release_id: ReleaseArgument,
    override: Annotated[
        str | None, typer.Option(metavar="REASON", help="Approve without a passing verdict, for this reason.")
    ] = None,
    actor: ActorOption = None,
    json_output: JsonOption = False,
) -> None:
    """Approve a release. It needs a passing verdict, or --override with a reason.

    Example: quantgate release approve demo-int8

    Example: quantgate release approve demo-int4 --override "internal traffic only"
    """
    from registry import release

    _show(release.approve(release_id, actor=actor, override=override), Screen(json_output))


@release_app.command("reject")
def reject_command(
    release_id: ReleaseArgument,
    reason: Annotated[str, typer.Option(help="Why; it goes into the ledger.")],
    actor: ActorOption = None,
    json_output: JsonOption = False,
) -> None:
    """Reject a release.

    Example: quantgate release reject demo-int4 --reason "loses 4 points on arithmetic"
    """
    from registry import release

    _show(release.reject(release_id, actor=actor, reason=reason), Screen(json_output))


@release_app.command("list")
def list_command(json_output: JsonOption = False) -> None:
    """List all releases with their states.

    Example: quantgate release list
    """
    from registry import release

    releases = release.list_releases()
    table = Table("release", "state", "verdict", "candidate", title="releases")
    for each in releases:
        table.add_row(each.id, each.state, each.verdict, each.candidate)
    Screen(json_output).result({"releases": [each.to_mapping() for each in releases]}, table)


@release_app.command("history")
def history_command(release_id: ReleaseArgument, json_output: JsonOption = False) -> None:
    """Show every act on a release: who, when, what, why.

    Example: quantgate release history demo-int8
    """
    from registry import release

    lines = release.history(release_id)
    table = Table("when (UTC)", "who", "act", "state", "why", "hash", title=release_id)
    for line in lines:
        table.add_row(
            line.at, line.actor, line.action, f"{line.from_state} > {line.to_state}", line.reason, line.hash[:12]
        )
    Screen(json_output).result({"release": release_id, "history": [line.to_mapping() for line in lines]}, table)


@release_app.command("verify")
def verify_command(json_output: JsonOption = False) -> None:
    """Recompute the ledger's hash chain and compare MLflow's mirror with it. Exit code 1 when the chain is broken.

    Example: quantgate release verify
    """
    from registry import release

    outcome = release.verify()
    document = {
        "ok": outcome.ok,
        "lines": outcome.lines,
        "head": outcome.head,
        "problems": list(outcome.problems),
        "mirror_problems": list(outcome.mirror_problems),
    }
    said = (
        f"the chain of {outcome.lines} lines is whole, head {outcome.head[:16]}"
        if outcome.ok
        else "the chain is broken"
    )
    Screen(json_output).result(document, said, *outcome.problems, *outcome.mirror_problems)
    if not outcome.ok:
        raise typer.Exit(1)


def _show(release: Any, screen: Screen) -> None:
    """A release as it stands after an act."""
    lines = [
        f"release   {release.id}",
        f"state     {release.state}",
        f"verdict   {release.verdict}",
        *(f"          {reason}" for reason in release.reasons),
        f"evidence  {release.evidence} ({'as submitted' if release.evidence_intact else 'CHANGED since submitted'})",
    ]
    if release.mirror:
        lines.append(f"MLflow    {release.mirror}")
    screen.result(release.to_mapping(), *lines)
