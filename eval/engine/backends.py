"""Which attention backend serves a model.

The one idea: "auto" takes the fastest that has the case; a backend asked for by name is used or refused, never swapped.
"""

import torch

from eval.engine.attention import AttentionBackend, TorchAttention
from eval.engine.native_attention import NativeAttention, native_library, supports
from eval.errors import EvalError

NAMES = ("auto", "native", "torch")


def choose_backend(
    name: str, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend of that name. Raises EvalError for an unknown one, and for "native" where it has no such case."""
    if name not in NAMES:
        raise EvalError(f"attention backend {name!r} is unknown: use one of {', '.join(NAMES)}")
    if name == "torch":
        return TorchAttention()
    supported = supports(head_dim, dtype, kv_dtype, device)
    library = native_library() if supported else None
    if library is not None:
        return NativeAttention(library)
    if name == "native":
        case = f"head_dim {head_dim}, {dtype} over {kv_dtype} on {device}"
        raise EvalError(f"the native attention does not run here ({case}): use attention_backend auto or torch")
    return TorchAttention()
