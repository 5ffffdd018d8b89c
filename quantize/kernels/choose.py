"""Which kernel runs a linear: by device, scheme, dtype and shape. The batch is each kernel's own matter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import nn

from quantize.kernels.builtin import BuiltinInt4, BuiltinInt8
from quantize.kernels.dequantized import Dequantized
from quantize.kernels.dynamic_int8 import DynamicInt8, cpu_multiplies_int8_exactly
from quantize.kernels.native import DIGITS, NativeDynamicInt8, NativeInt4, NativeInt8, library
from quantize.scheme import QuantizedWeight


def choose_kernel(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype, compute: str = "a16") -> nn.Module:
    """A module that owns the weight, on `device`. float32 always dequantizes, which is the reference itself, except
    that int8 activations meet int8 weights in every dtype, since their product is exact. `compute`: "a8" rounds the
    inputs of a weight whose scheme does not say how."""
    if weight.scheme.activations is not None:
        compute = "a16"  # it says how
    kernel = None
    if device.type == "cpu":
        kernel = _on_cpu(weight, dtype, compute)
    elif device.type == "cuda" and runs_triton(device) and compute == "a16":
        kernel = in_triton(weight, dtype)
    if kernel is None and DynamicInt8.supports(weight.scheme):
        kernel = DynamicInt8(weight, integer_product=device.type == "cpu" and cpu_multiplies_int8_exactly())
    return (kernel or Dequantized(weight, compute)).to(device)


def _on_cpu(weight: QuantizedWeight, dtype: torch.dtype, compute: str) -> nn.Module | None:
    """Ours where they can be built, else torch's, which want bf16 and scales that bf16 holds (with other activations
    they are 10 to 70 times slower), and round no inputs."""
    outputs, inputs = weight.codes.shape
    scheme = weight.scheme
    native = library() is not None
    if native and dtype in (torch.bfloat16, torch.float32) and NativeDynamicInt8.supports(scheme, inputs):
        return NativeDynamicInt8(weight)
    if dtype != torch.bfloat16:
        return None
    if native and NativeInt8.supports(scheme, inputs):
        return NativeInt8(weight, DIGITS[compute])
    if native and NativeInt4.supports(scheme, inputs):
        return NativeInt4(weight, DIGITS[compute])
    if weight.scale.dtype != torch.bfloat16 or compute == "a8":
        return None
    if BuiltinInt8.supports(scheme, outputs, inputs):
        return BuiltinInt8(weight)
    return BuiltinInt4(weight) if BuiltinInt4.supports(scheme, outputs, inputs) else None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton is installed and this GPU has the instructions of our kernels: NVIDIA's, from Ampere on. In
    Triton's interpreter (TRITON_INTERPRET=1) they run on any device, at a crawl."""
    if torch.version.hip is not None or find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def in_triton(weight: QuantizedWeight, dtype: torch.dtype) -> nn.Module | None:
    """Our GPU kernel for this weight, still where the weight is; None where there is no such case."""
    # Only here, because Triton takes half a second to import and a machine without a GPU never needs it.
    from quantize.kernels.triton.dynamic_int8 import TritonDynamicInt8
    from quantize.kernels.triton.weight_only import TritonWeightOnly

    if TritonDynamicInt8.supports(weight.scheme):
        return TritonDynamicInt8(weight)
    if dtype in (torch.bfloat16, torch.float16) and TritonWeightOnly.supports(weight.scheme):
        return TritonWeightOnly(weight)
    return None
