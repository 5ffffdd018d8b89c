"""What a quantized linear computes, written down once: dequantize and multiply. Every kernel is tested against it."""

from __future__ import annotations

import torch
from torch.nn import functional

from quantize.scheme import QuantizedWeight, dequantize

TOKEN_STEPS = 255.0


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [M, K] as int8 codes [M, K] and one float32 scale per token [M, 1].

    Symmetric, by compressed-tensors' formula for dynamic tokens (`calculate_qparams`): scale = max |x| / (255 / 2), so
    that the largest value is code 127 after clamping; a token of zeros takes the smallest step instead of 0.
    """
    values = x.float()
    scale = values.abs().amax(dim=-1, keepdim=True) / (TOKEN_STEPS / 2)
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return (values / scale).round_().clamp_(-128, 127).to(torch.int8), scale


def reference_linear(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x [M, K] times the weight [N, K] transposed, in the dtype of x, after quantizing tokens if the scheme says so."""
    if weight.scheme.activations == "int8":
        codes, scale = quantize_tokens(x)
        x = (codes.float() * scale).to(x.dtype)
    return functional.linear(x, dequantize(weight, x.dtype))
