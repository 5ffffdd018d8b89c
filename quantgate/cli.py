"""`quantgate`: the command line. Heavy libraries are imported by the commands that need them, so `--help` is quick."""

import os
import sys

import typer

from quantgate.commands.decide import register_decision_commands
from quantgate.commands.external import external_app
from quantgate.commands.measure import register_measuring_commands
from quantgate.commands.prepare import register_preparing_commands
from quantgate.commands.release import release_app
from quantgate.commands.sensitivity import sensitivity_command
from quantgate.commands.serve import serve_command
from quantgate.errors import explained_errors, operating_system_errors_explained, refuse_what_is_no_text

INTERRUPTED = 130

app = typer.Typer(
    name="quantgate",
    help="Quantize a language model, measure it in pairs against the original, decide whether it may replace it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
register_preparing_commands(app)
app.command("sensitivity")(sensitivity_command)
register_measuring_commands(app)
register_decision_commands(app)
app.command("serve")(serve_command)
app.add_typer(release_app, name="release")
app.add_typer(external_app, name="external")


def main() -> None:
    """Run a command; a mistake that a room explained becomes one line on stderr and exit code 1."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        refuse_what_is_no_text(sys.argv[1:])
        with operating_system_errors_explained():
            app()
    except (KeyboardInterrupt, SystemExit) as end:
        # Typer turns Ctrl-C into this exit code itself, and says nothing.
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        sys.stderr.write("\ninterrupted: run the same command again to go on\n")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if not isinstance(error, explained_errors()):
            raise
        sys.stderr.write(f"quantgate: {' '.join(str(error).split())}\n")
        sys.exit(1)
