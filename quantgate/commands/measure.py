"""Commands that measure one checkpoint, or a pair: `eval` for quality, `speed` for time and memory."""

from pathlib import Path
from typing import Annotated

import typer

from quantgate.commands.options import (
    CheckpointArgument,
    ComputeOption,
    DataDirOption,
    JsonOption,
    KVDtypeOption,
    LimitOption,
    SpeculativeOption,
    SpeculativeTokensOption,
)
from quantgate.screen import Screen


def register_measuring_commands(app: typer.Typer) -> None:
    """Add this file's commands."""
    app.command("eval")(eval_command)
    app.command("speed")(speed_command)


def eval_command(
    checkpoint: CheckpointArgument,
    suite: Annotated[str | None, typer.Option(help="core, standard, smoke or a YAML file; default core.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Task names, comma-separated, in place of a suite.")] = None,
    data_dir: DataDirOption = None,
    limit: LimitOption = None,
    kv_dtype: KVDtypeOption = "auto",
    compute: ComputeOption = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="Result folder; default: in the cache, by content digest.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure quality: lm-eval tasks and perplexity on the paged-KV engine, with a record of every sample.

    Example: quantgate eval smollm2-135m --suite core

    Example: quantgate eval smollm2-gptq --tasks piqa,wikitext2 --data-dir data --limit 500
    """
    from quantgate.numerics import Numerics
    from quantgate.results import evaluate_checkpoint, quality_table
    from quantgate.source import resolve_checkpoint

    screen = Screen(json_output)
    with screen.progress() as progress:
        path = resolve_checkpoint(checkpoint, progress)
        result = evaluate_checkpoint(
            path,
            suite=suite,
            tasks=task_names(tasks),
            data_dir=data_dir,
            limit=limit,
            numerics=Numerics(kv_dtype, compute),
            out=out,
            progress=progress,
        )
    screen.result(
        {"path": str(result.directory), **result.to_mapping()}, quality_table(result), f"evidence: {result.directory}"
    )


def speed_command(
    checkpoint: CheckpointArgument,
    against: Annotated[str | None, typer.Option(help="The baseline: both run interleaved on the same traffic.")] = None,
    workload: Annotated[str, typer.Option(help="A workload that ships, or a YAML file.")] = "chat",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Blocks per side, A B B A …; default: the workload's.")
    ] = None,
    kv_dtype: KVDtypeOption = "auto",
    compute: ComputeOption = "auto",
    speculative: SpeculativeOption = None,
    speculative_tokens: SpeculativeTokensOption = 4,
    out: Annotated[
        Path | None, typer.Option("--out", help="Result folder; default: in the cache, by content digest.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure memory, TTFT, TPOT and tokens/s under a workload; against a baseline, as ratios with intervals.

    --kv-dtype, --compute and --speculative are CKPT's; the baseline keeps its own numerics and drafts nothing.

    Example: quantgate speed smollm2-gptq --against smollm2-135m --workload chat

    Example: quantgate speed smollm2-135m --against smollm2-135m --kv-dtype int8 --workload rag-long-prompt

    Example: quantgate speed smollm2-gptq --against smollm2-gptq --compute a8

    Example: quantgate speed smollm2-135m --against smollm2-135m --speculative prompt-lookup --workload code-completion
    """
    from quantgate.numerics import Numerics
    from quantgate.results import measure_checkpoint, speed_table, validity_lines
    from quantgate.source import resolve_checkpoint, speculative_options

    screen = Screen(json_output)
    with screen.progress() as progress:
        path = resolve_checkpoint(checkpoint, progress)
        baseline = resolve_checkpoint(against, progress) if against else None
        result = measure_checkpoint(
            path,
            against=baseline,
            workload=workload,
            repeats=repeats,
            numerics=Numerics(kv_dtype, compute),
            drafting=speculative_options(speculative, speculative_tokens, progress),
            out=out,
            progress=progress,
        )
    screen.result(
        {"path": str(result.directory), **result.to_mapping()},
        speed_table(result),
        *validity_lines(result),
        f"evidence: {result.directory}",
    )


def task_names(commas: str | None) -> list[str]:
    """The names in a comma-separated list."""
    return [name.strip() for name in commas.split(",") if name.strip()] if commas else []
