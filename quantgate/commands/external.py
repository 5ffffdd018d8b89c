"""`quantgate external …`: the environments of quantizers that are not ours, made on request and never by themselves."""

from typing import Annotated

import typer
from rich.table import Table

from quantgate.commands.options import JsonOption
from quantgate.screen import Screen

external_app = typer.Typer(
    help="Other quantizers (AutoAWQ, AutoGPTQ, GPTQModel, llm-compressor), each in an environment of its own.\n\n"
    "Example: quantgate external install llmcompressor, then quantize with --method external:llmcompressor:gptq",
    no_args_is_help=True,
)


@external_app.command("install")
def install_command(
    name: Annotated[str, typer.Argument(help="autoawq, autogptq, gptqmodel or llmcompressor.")],
    json_output: JsonOption = False,
) -> None:
    """Make an external quantizer's environment from pinned versions; one that stands is left as it is.

    Example: quantgate external install llmcompressor
    """
    from quantize.external.environments import install

    screen = Screen(json_output)
    with screen.progress() as progress:
        folder = install(name, progress)
    screen.result({"name": name, "path": str(folder)}, f"{name} is installed in {folder}")


@external_app.command("list")
def list_command(json_output: JsonOption = False) -> None:
    """Show the external quantizers, the methods that use them, and which are installed.

    Example: quantgate external list
    """
    from quantize.external.environments import LIBRARIES, is_installed
    from quantize.method import EXTERNAL_METHODS

    table = Table("name", "installed", "methods", "versions", title="external quantizers")
    found = []
    for library in LIBRARIES.values():
        methods = [method for method in EXTERNAL_METHODS if method.split(":")[1] == library.name]
        installed = is_installed(library)
        found.append(
            {
                "name": library.name,
                "installed": installed,
                "path": str(library.folder),
                "methods": methods,
                "versions": library.pins,
            }
        )
        table.add_row(library.name, "yes" if installed else "no", ", ".join(methods), ", ".join(library.pins))
    Screen(json_output).result({"external": found}, table)
