"""`quantgate sensitivity`: where four bits hurt, and the recipe that spends its bytes there."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from quantgate.commands.options import CheckpointArgument, JsonOption
from quantgate.screen import Screen

TargetBitsOption = Annotated[
    float | None, typer.Option(help="Most bits per weight on average, scales included (5 where no target is given).")
]
TargetKlOption = Annotated[
    float | None, typer.Option(help="Most loss, in nats per token: KL of the next token's distribution.")
]


def sensitivity_command(
    checkpoint: CheckpointArgument,
    calibration: Annotated[
        Path | None, typer.Option(help='JSONL of {"text": ...} or {"messages": [...]}; default: the text that ships.')
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Windows of calibration text.")] = 4,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 128,
    method: Annotated[str, typer.Option(help="The method of the recipe: gptq, int4, awq, awq+gptq.")] = "gptq",
    group_size: Annotated[int | None, typer.Option(help="Inputs that share a scale; default: as quantize.")] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric/--asymmetric", help="Without or with zero points.")] = True,
    target_bits: TargetBitsOption = None,
    target_kl: TargetKlOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this .png, .svg or .pdf.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure what each layer, each kind of linear and each linear loses alone at 4 bits.

    With a target it also prints a recipe, alone on stdout, that loses least for its bytes.

    Example: quantgate sensitivity smollm2-135m --target-bits 5 > mixed.yaml
    """
    from quantgate.recipes import recipe_yaml
    from quantgate.sensitivity_view import loss_tables
    from quantgate.source import resolve_checkpoint
    from quantize.mixed_precision import check_target, mixed_recipe
    from quantize.recipe import Recipe
    from quantize.sensitivity import measure_sensitivity

    screen = Screen(json_output)
    recipe = Recipe.from_mapping({"method": method, "group_size": group_size, "symmetric": symmetric}, where="options")
    check_target(recipe, target_bits, target_kl)
    if plot is not None:
        from quantgate.figures import refuse_unwritable_figure

        refuse_unwritable_figure(plot)
    with screen.progress() as progress:
        source = resolve_checkpoint(checkpoint, progress)
        found = measure_sensitivity(
            source,
            recipe,
            calibration=calibration,
            samples=samples,
            sequence_length=sequence_length,
            progress=progress,
        )
    document: dict[str, Any] = asdict(found)
    tables = loss_tables(found)
    if target_bits is None and target_kl is None:
        screen.result(document, *tables)
    else:
        mixture = mixed_recipe(recipe, found.units(), target_bits, target_kl)
        document["recipe"] = mixture.recipe.to_mapping()
        document["predicted"] = {"bits_per_weight": mixture.bits_per_weight, "kl": mixture.kl}
        for table in tables if not json_output else ():
            screen.err.print(table)
        screen.result(document, recipe_yaml(mixture))
    if plot is not None:
        from quantgate.figures import save_figure, sensitivity_figure

        losses = {(module.layer, module.kind): module.kl for module in found.modules}
        save_figure(sensitivity_figure(losses, found.layers, found.kinds), plot)
