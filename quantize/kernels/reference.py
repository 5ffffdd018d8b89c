"""What a quantized linear computes, written down once: dequantize and multiply. Every kernel is tested against it."""

from __future__ import annotations

import torch
from torch.nn import functional

from quantize.scheme import QuantizedWeight, Scheme, dequantize

TOKEN_STEPS = 255.0
DIGIT = 127
DIGIT_GROUP = 32
"""Inputs that share a scale where a8 rounds them, at most: as many as in a block of llama.cpp's Q8_0."""


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [M, K] as int8 codes [M, K] and one float32 scale per token [M, 1].

    Symmetric, by compressed-tensors' formula for dynamic tokens (`calculate_qparams`): scale = max |x| / (255 / 2), so
    that the largest value is code 127 after clamping; a token of zeros takes the smallest step instead of 0.
    """
    values = x.float()
    scale = values.abs().amax(dim=-1, keepdim=True) / (TOKEN_STEPS / 2)
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return (values / scale).round_().clamp_(-128, 127).to(torch.int8), scale


def quantize_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [M, K] as int8 digits [M, K] and float32 scales [M, ceil(K / group)], one per token and `group` of
    inputs, of which the last may be smaller: digit = round(x / scale), scale = max |x| / 127.

    An input is off by half a scale at most, max |x| / 254 of its group. What is too small for 1 / scale becomes 0; what
    is not finite stays visible in the scale.
    """
    tokens, inputs = x.shape
    groups = functional.pad(x.float(), (0, -inputs % group)).view(tokens, -1, group)
    scale = groups.abs().amax(dim=2) / DIGIT
    inverse = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, 1 / scale)
    digits = (groups * inverse.unsqueeze(2)).round_().clamp_(-DIGIT, DIGIT).to(torch.int8)
    return digits.view(tokens, -1)[:, :inputs], scale


def digit_group(scheme: Scheme, inputs: int) -> int:
    """How many inputs share a scale under a8: as many of 32, 24, 16, 8 as fill the weight's groups evenly, so that a
    group of theirs lies in one of the weight's; else 32."""
    width = scheme.group_width(inputs)
    return next((size for size in range(DIGIT_GROUP, 0, -8) if width % size == 0), DIGIT_GROUP)


def rounded_inputs(x: torch.Tensor, scheme: Scheme, compute: str) -> torch.Tensor:
    """What of the activations x [M, K] reaches a weight, in the dtype of x: all of it under a16, the nearest of 256
    levels per token where the scheme has int8 activations, of 255 per token and group of inputs where `compute` is
    a8."""
    if scheme.activations == "int8":
        codes, scale = quantize_tokens(x)
    elif compute == "a8":
        group = digit_group(scheme, x.shape[1])
        codes, scale = quantize_groups(x, group)
        scale = scale.repeat_interleave(group, dim=1)[:, : x.shape[1]]
    else:
        return x
    return (codes.float() * scale).to(x.dtype)


def reference_linear(x: torch.Tensor, weight: QuantizedWeight, compute: str = "a16") -> torch.Tensor:
    """x [M, K], rounded if the scheme or `compute` says so, times the weight [N, K] transposed, in the dtype of x."""
    return functional.linear(rounded_inputs(x, weight.scheme, compute), dequantize(weight, x.dtype))
