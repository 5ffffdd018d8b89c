"""Arguments and options that several commands share, so that they read the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CKPT", help="A Hugging Face folder, a .gguf file, a hub id, or smollm2-135m.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with wikitext2/, lambada/, piqa/, gsm8k/ where no hub answers."),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="At most this many samples per task.")]
KVDtypeOption = Annotated[
    str,
    typer.Option(
        "--kv-dtype", help="What keys and values are kept in: auto (the model's), bfloat16, float16, float32, int8."
    ),
]
ComputeOption = Annotated[
    str,
    typer.Option(
        help="How quantized weights meet activations: a16 (as they come), a8 (rounded to 8 bits per token and 32 "
        "inputs: faster, of another quality), auto (a16; a8 where the checkpoint was made for int8 activations)."
    ),
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(help="Draft tokens ahead: prompt-lookup, or a smaller checkpoint with the same tokens."),
]
SpeculativeTokensOption = Annotated[int, typer.Option(min=1, help="Tokens drafted per request and step, at most.")]
PolicyOption = Annotated[str, typer.Option(help="A policy file, or the name of one that ships.")]
ActorOption = Annotated[str | None, typer.Option("--as", help="Who acts; default: the login name.")]
