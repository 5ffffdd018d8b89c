"""torch's own CPU kernels for int8 and int4 weights with bf16 activations, which pay for small batches only.

Both decode the weight once per row of the batch, so from some batch on it is cheaper to decode it once into bf16 and
use the ordinary matrix product. Measured with one thread on Zen 4 (AVX-512, torch 2.13), microseconds, kernel against
decoding and bf16 product:

| outputs x inputs | int8, batch 8 | 16         | 32         | int4, batch 32 | 64          | 128          |
|------------------|---------------|------------|------------|----------------|-------------|--------------|
| 576 x 576        | 70 / 155      | 136 / 177  | 269 / 224  | 246 / 394      | 489 / 486   | 997 / 672    |
| 1536 x 576       | 191 / 367     | 379 / 430  | 759 / 554  | 659 / 950      | 1488 / 1198 | 6606 / 1712  |
| 576 x 1536       | 177 / 361     | 349 / 422  | 698 / 541  | 649 / 960      | 1347 / 1208 | 3999 / 1717  |
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from quantize.kernels.dequantized import grouped_weight
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme

INT8_LARGEST_BATCH = 16
INT4_LARGEST_BATCH = 48
# Measured: with K % 16 != 0 the int8 kernel reads past its rows and returns garbage or crashes.
INT8_INPUTS_MULTIPLE = 16
INT4_OUTPUTS_MULTIPLE = 16
INT4_GROUPS = (256, 128, 64, 32)


class BuiltinInt8(nn.Module):
    """`_weight_int8pack_mm`: symmetric int8 per output channel; the weight is not rounded, the scale comes last."""

    name = "torch-int8"
    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def supports(scheme: Scheme, outputs: int, inputs: int) -> bool:
        plain = scheme == Scheme(8, PER_CHANNEL, symmetric=True, activations=None)
        return plain and inputs % INT8_INPUTS_MULTIPLE == 0

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scale", weight.scale.to(torch.bfloat16).reshape(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= INT8_LARGEST_BATCH:
            return torch._weight_int8pack_mm(x.contiguous(), self.codes, self.scale)
        return functional.linear(x, grouped_weight(self.codes, self.scale.unsqueeze(1), None, x.dtype))


class BuiltinInt4(nn.Module):
    """`_weight_int4pack_mm_for_cpu`: up to 4 bits, groups of 32 to 256, with or without zero points.

    The kernel computes (nibble - 8) * scale + offset with scale and offset in bf16. Our code is nibble - 8, so the
    offset is -zero_point * scale, rounded to bf16: off by at most 8 * scale * 2^-8, a 32nd of a quantization step.
    """

    name = "torch-int4"
    packed: torch.Tensor
    scale_and_offset: torch.Tensor

    @staticmethod
    def supports(scheme: Scheme, outputs: int, inputs: int) -> bool:
        if scheme.bits > 4 or scheme.activations is not None or outputs % INT4_OUTPUTS_MULTIPLE:
            return False
        return any(scheme.group_width(inputs) % group == 0 for group in INT4_GROUPS)

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        inputs = weight.codes.shape[1]
        width = weight.scheme.group_width(inputs)
        self.group_size = next(group for group in INT4_GROUPS if width % group == 0)
        nibbles = weight.codes.to(torch.int32) + 8
        packed = torch._convert_weight_to_int4pack_for_cpu(nibbles, 1)
        repeats = width // self.group_size
        scale = weight.scale.float().repeat_interleave(repeats, dim=1)
        offset = torch.zeros_like(scale)
        if weight.zero_point is not None:
            offset = -weight.zero_point.float().repeat_interleave(repeats, dim=1) * scale
        self.register_buffer("packed", packed)
        self.register_buffer("scale_and_offset", torch.stack([scale.T, offset.T], dim=-1).bfloat16().contiguous())
        self.block = next((block for block in (64, 32) if _is_blocked(packed, nibbles, block)), 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= INT4_LARGEST_BATCH or not self.block:
            return torch._weight_int4pack_mm_for_cpu(
                x.contiguous(), self.packed, self.group_size, self.scale_and_offset
            )
        return torch.mm(x, self._transposed_weight(x.dtype))

    def _transposed_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as [K, N], which is how the packing runs within a block of outputs."""
        # Unbound, scale and offset lie two apart in memory, and broadcasting from there is 15 times slower.
        scale, offset = (part.contiguous().unsqueeze(1) for part in self.scale_and_offset.unbind(-1))
        groups, _, outputs = scale.shape
        codes = unblock(self.packed, self.block).transpose(0, 1).reshape(groups, self.group_size, outputs)
        return codes.to(dtype).mul_(scale).add_(offset).view(-1, outputs)


def unblock(packed: torch.Tensor, block: int) -> torch.Tensor:
    """Signed codes int8 [N / block, K, block] from torch's packing, which per block of outputs and input channel holds
    the block's first half in the low nibbles and its second half in the high ones."""
    outputs, half_inputs = packed.shape
    pairs = packed.view(outputs // block, half_inputs * 2, block // 2)
    return torch.cat([pairs & 15, pairs >> 4], dim=-1).view(torch.int8).sub_(8)


def _is_blocked(packed: torch.Tensor, nibbles: torch.Tensor, block: int) -> bool:
    """Whether this CPU's packing is the one that `unblock` undoes: it is torch's private matter, so it is checked."""
    if packed.shape[0] % block:
        return False
    return torch.equal(unblock(packed, block).transpose(1, 2).reshape(nibbles.shape).int() + 8, nibbles)
