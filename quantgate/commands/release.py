"""`quantgate release`: take a judged candidate to a decision, with every act in the ledger."""

import getpass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from quantgate.commands.options import ActorOption, JsonOption
from quantgate.screen import Screen

release_app = typer.Typer(
    help="Submit, show, approve or reject a candidate; every act is one line in a hash-chained ledger.",
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

    _show(release.submit(variant, name=name, actor=actor or _login()), Screen(json_output))


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

    _show(release.approve(release_id, actor=actor or _login(), override=override), Screen(json_output))


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

    _show(release.reject(release_id, actor=actor or _login(), reason=reason), Screen(json_output))
