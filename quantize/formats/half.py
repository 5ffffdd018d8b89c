"""Scales as fp16, which GPTQ, AWQ and GGUF store: exactly, or not at all.

bf16 has fewer digits than fp16 and so loses none there, but it reaches further down and up; a scale out of fp16's reach
would change the weights without a word.
"""

from dataclasses import replace

import torch

from quantize.errors import QuantizeError
from quantize.scheme import Grid, QuantizedWeight, Scheme, dequantize, round_to_grid

LARGEST = torch.finfo(torch.float16).max
SMALLEST_SHARED = 2.0**-17
"""The smallest power of two from which on fp16 holds every bf16 number: its last digit is worth 2^-24, bf16 has 8."""


def half_scale(scale: torch.Tensor, module_name: str) -> torch.Tensor:
    """`scale` in fp16. Raises QuantizeError with the first value that fp16 does not hold exactly."""
    half = scale.to(torch.float16)
    lost = (half.double() != scale.double()) | ~torch.isfinite(half)
    if bool(lost.any()):
        row, group = (int(index) for index in lost.nonzero()[0])
        raise QuantizeError(
            f"{module_name}: the scale of output {row}, group {group} is {scale[row, group].item():.9g}, "
            f"which fp16 rounds to {half[row, group].item():.9g}; {int(lost.sum())} of {scale.numel()} do not fit"
        )
    return half


def refuse_large_weight(name: str, largest: float, scheme: Scheme, form: str) -> None:
    """Raises QuantizeError, before anything is calibrated, where the weight's `largest` magnitude needs a scale that
    fp16 does not hold."""
    steps = float(scheme.highest - scheme.lowest)
    scale = largest / (steps / 2 if scheme.symmetric else steps)
    if scale > LARGEST:
        raise QuantizeError(
            f"{name}: a weight of {largest:.4g} needs a scale above {LARGEST:g}, the largest that format {form} "
            "stores; use format compressed-tensors, or skip it by an override"
        )


def raise_small_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with no scale below what bf16 and fp16 both hold. Groups with a smaller one (weights of 1e-4 and less)
    are rounded again, on a grid of the smallest scale around their old zero point: coarser, and never narrower."""
    small = weight.scale.float() < SMALLEST_SHARED
    if not bool(small.any()):
        return weight
    scale = torch.where(small, SMALLEST_SHARED, weight.scale.float()).to(weight.scale.dtype)
    rounded = round_to_grid(dequantize(weight, torch.float32), Grid(scale, weight.zero_point, weight.scheme))
    moved = small.repeat_interleave(weight.codes.shape[1] // small.shape[1], dim=1)
    return replace(rounded, codes=torch.where(moved, rounded.codes, weight.codes))
