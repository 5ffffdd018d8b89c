"""What may be chosen about an engine, with the defaults that serve."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from eval.engine.kv_cache import KV_DTYPES
from eval.errors import EvalError
from quantize.kernels.native import DIGITS

COMPUTE_MODES = tuple(DIGITS)
"""How quantized weights meet their inputs: as they come, or rounded to 8 bits (see quantize.load.load_model)."""


def compute_named(compute: str) -> str | None:
    """The mode to load a model in; None, for "auto", is the checkpoint's own. Raises EvalError for any other name."""
    if compute == "auto":
        return None
    if compute not in COMPUTE_MODES:
        raise EvalError(f"compute {compute!r} is unknown: use auto, {', '.join(COMPUTE_MODES)}")
    return compute


@dataclass(frozen=True)
class EngineConfig:
    """`num_blocks` None: what `max_num_seqs` requests of `max_model_len` tokens need, within `kv_cache_bytes` (None:
    see kv_cache.choose_num_blocks). `kv_dtype`: "auto" (the model's) or a name of kv_cache.KV_DTYPES. `logits_bytes`
    bounds the logits of one step, in the model's dtype, and with them how many tokens per step are scored.
    `attention_backend`: "auto", "native", "triton" or "torch". `speculative`: None, "prompt-lookup", or the folder of a
    checkpoint that drafts (a smaller model with the same tokens); `speculative_tokens` is how many are drafted per
    request and step, at most."""

    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_dtype: str = "auto"
    scheduler_policy: str = "fcfs"
    prefix_caching: bool = True
    max_prefill_chunk: int | None = None
    max_model_len: int | None = None
    logits_bytes: int = 64 * 2**20
    attention_backend: str = "auto"
    speculative: str | None = None
    speculative_tokens: int = 4

    def __post_init__(self) -> None:
        if self.kv_dtype != "auto" and self.kv_dtype not in KV_DTYPES:
            raise EvalError(f"kv_dtype {self.kv_dtype!r} is unknown: use auto, {', '.join(KV_DTYPES)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise EvalError(f"{field.name} is {value}: it must be at least 1")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """The config with these fields set. Raises EvalError naming a field that does not exist."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise EvalError(
                f"unknown engine option {', '.join(unknown)}: known are device, dtype, compute, {', '.join(known)}"
            )
        return cls(**options)
