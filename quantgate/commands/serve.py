"""`serve`: a checkpoint behind OpenAI's API, on the engine that every measurement ran on."""

from typing import Annotated

import typer

from quantgate.commands.options import (
    CheckpointArgument,
    ComputeOption,
    KVDtypeOption,
    SpeculativeOption,
    SpeculativeTokensOption,
)


def serve_command(
    checkpoint: CheckpointArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="QUANTGATE_API_KEY", help="Ask clients for this key.", show_envvar=True)
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Name in /v1/models; default: CKPT as given.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 64,
    kv_dtype: KVDtypeOption = "auto",
    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes for keys and values; default: 2 GiB on a CPU, 60 % of a GPU's free memory."),
    ] = None,
    compute: ComputeOption = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and answer; default: all.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt that is accepted.")] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered 429.")] = 256,
    speculative: SpeculativeOption = None,
    speculative_tokens: SpeculativeTokensOption = 4,
    drain_seconds: Annotated[int, typer.Option(min=0, help="On SIGTERM, time for running requests to end.")] = 30,
) -> None:
    """Serve a checkpoint with an OpenAI-compatible API: completions, chat completions, models, health, metrics.

    Example: quantgate serve smollm2-135m --port 8000
    """
    from eval.engine import Engine
    from eval.server.app import ServerConfig
    from eval.server.serve import serve
    from quantgate.source import resolve_checkpoint, speculative_options

    path = resolve_checkpoint(checkpoint)
    drafting = speculative_options(speculative, speculative_tokens)
    engine = Engine.from_checkpoint(
        path,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_dtype=kv_dtype,
        kv_cache_bytes=kv_cache_bytes,
        compute=compute,
        **drafting,
    )
    config = ServerConfig(
        model_name or checkpoint, api_key, max_prompt_tokens=max_prompt_tokens, max_waiting=max_waiting
    )

    def ready(address: str) -> None:
        typer.echo(f"serving {config.model_name} on {address}/v1", err=True)

    serve(engine, config, host, port, drain_seconds, ready)
