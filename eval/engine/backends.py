"""Which attention backend serves a model.

The one idea: "auto" takes the fastest that has the case; a backend asked for by name is used or refused, never swapped.
"""

import torch

from eval.engine.attention import AttentionBackend, TorchAttention
from eval.engine.native_attention import NativeAttention, native_library, supports
from eval.errors import EvalError
from quantize.kernels.choose import runs_triton

NAMES = ("auto", "native", "triton", "torch")


def choose_backend(
    name: str, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend of that name. Raises EvalError for an unknown one, and for "native" and "triton" where they have no
    such case."""
    if name not in NAMES:
        raise EvalError(f"attention backend {name!r} is unknown: use one of {', '.join(NAMES)}")
    if name == "torch":
        return TorchAttention()
    backend = None
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        backend = _in_triton(head_dim, dtype, kv_dtype, device)
    elif supports(head_dim, dtype, kv_dtype, device):
        library = native_library()
        backend = None if library is None else NativeAttention(library)
    if backend is None and name != "auto":
        case = f"head_dim {head_dim}, {dtype} over {kv_dtype} on {device}"
        raise EvalError(f"the {name} attention does not run here ({case}): use attention_backend auto or torch")
    return backend or TorchAttention()


def _in_triton(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> AttentionBackend | None:
    if not runs_triton(device):
        return None
    # Only here, because Triton takes half a second to import and a machine without a GPU never needs it.
    from eval.engine import triton_attention

    if not triton_attention.supports(head_dim, dtype, kv_dtype):
        return None
    return triton_attention.TritonAttention()
