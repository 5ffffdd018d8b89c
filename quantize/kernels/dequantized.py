"""Dequantize the whole weight, then multiply: any scheme, dtype and device, and the fastest way for large batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from quantize.kernels.reference import rounded_inputs
from quantize.scheme import QuantizedWeight


def grouped_weight(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """(codes - zero_point) * scale as [N, K] in `dtype`, from int8 codes [N, K] and [N, G] of the others.

    Rounds once, like the reference: a code, and the difference of two, has at most 8 significant bits and is exact even
    in bf16, so the product with a scale of the same dtype may be taken there.
    """
    working = dtype if scale.dtype == dtype else torch.float32
    groups = codes.reshape(*scale.shape, -1).to(working)
    if zero_point is not None:
        groups = groups.sub_(zero_point.unsqueeze(-1))
    return groups.mul_(scale.unsqueeze(-1)).to(dtype).view(codes.shape)


def pack_halves(codes: torch.Tensor) -> torch.Tensor:
    """Codes of at most 4 bits, int8 [N, K], two per byte: uint8 [N, K / 2], the row's first half in the low nibbles.
    Halves rather than neighbours, so that both nibbles unpack into contiguous memory."""
    low, high = codes.chunk(2, dim=1)
    return (low & 15).to(torch.uint8) | (high << 4).view(torch.uint8)


def unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_halves`: int8 [N, K], sign-extended."""
    signed = packed.view(torch.int8)
    return torch.cat([(signed << 4) >> 4, signed >> 4], dim=1)


class Dequantized(nn.Module):
    """Codes of up to 4 bits are kept two per byte, others one."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None

    def __init__(self, weight: QuantizedWeight, compute: str = "a16") -> None:
        super().__init__()
        self.name = "dequantize" if compute == "a16" else f"dequantize-{compute}"
        self.scheme, self.compute = weight.scheme, compute
        self.packed = weight.scheme.bits <= 4 and weight.codes.shape[1] % 2 == 0
        self.register_buffer("codes", pack_halves(weight.codes) if self.packed else weight.codes)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("zero_point", weight.zero_point)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        codes = unpack_halves(self.codes) if self.packed else self.codes
        return grouped_weight(codes, self.scale, self.zero_point, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(rounded_inputs(x, self.scheme, self.compute), self.weight(x.dtype))
