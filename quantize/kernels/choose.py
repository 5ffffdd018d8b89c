"""Which kernel runs a linear: by device, scheme, dtype and shape. The batch is each kernel's own matter."""

from __future__ import annotations

import torch
from torch import nn

from quantize.kernels.builtin import BuiltinInt4, BuiltinInt8
from quantize.kernels.dequantized import Dequantized
from quantize.kernels.dynamic_int8 import DynamicInt8, cpu_multiplies_int8_exactly
from quantize.scheme import QuantizedWeight


def choose_kernel(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module that owns the weight, on `device`. float32 always dequantizes, which is the reference itself; torch's
    small-batch kernels want bf16 and scales that bf16 holds (elsewhere they are 10 to 70 times slower)."""
    outputs, inputs = weight.codes.shape
    scheme = weight.scheme
    if DynamicInt8.supports(scheme):
        exact = device.type == "cpu" and cpu_multiplies_int8_exactly()
        return DynamicInt8(weight, integer_product=exact).to(device)
    if device.type == "cpu" and dtype == torch.bfloat16 and weight.scale.dtype == torch.bfloat16:
        if BuiltinInt8.supports(scheme, outputs, inputs):
            return BuiltinInt8(weight)
        if BuiltinInt4.supports(scheme, outputs, inputs):
            return BuiltinInt4(weight)
    return Dequantized(weight).to(device)
