"""Weights of up to 8 bits times 16-bit activations on a GPU: W4A16, W8A16, grouped or per channel, with zero points.

The one idea: a code minus its zero point has at most 8 significant bits, so it is exact in bfloat16 and float16. The
tensor cores therefore multiply the integers themselves, and a group's float32 sum takes its scale once, after the
product: no weight is ever rounded, and the scale costs one multiplication per group instead of one per weight. The
weights are the left operand (outputs are many, tokens few). From LARGEST_BATCH tokens on it is cheaper to write the
weight out once in the activations' dtype and call the ordinary matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional

from quantize.kernels.custom_op import traceable
from quantize.kernels.triton.launch import (
    INTERPRETED,
    computing_dtype,
    finish,
    multiprocessors,
    power_of_two_in,
    splits_for,
    triton_dtype,
)
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme

LARGEST_BATCH = 64
BLOCK_OUTPUTS = 64
LEAST_BLOCK = 16
"""Inputs that one tensor-core instruction takes at least."""
MOST_CODE_BYTES = 128
"""Code bytes per output and step: a whole cache line."""
CHANNEL_BLOCK = 128
"""Where the scheme has no groups, the inputs are padded to a multiple of this, and nibbles are packed within it."""


# Four bytes in $4, each two signed nibbles, become pairs: the low nibbles in $0 and $1, the high ones in $2 and $3.
# A nibble whose sign bit is flipped counts from -8; put under the exponent of 128 it reads 136 + code, and 136 is taken
# off again. One and a half instructions per weight, where conversion takes seven and leaves the memory waiting.
_UNPACK = """{{
.reg .b32 even, odd;
prmt.b32 even, $4, 0, 0x4140;
prmt.b32 odd, $4, 0, 0x4342;
lop3.b32 $0, even, 0x000f000f, {offset:#x}, 0x6a;
lop3.b32 $1, odd, 0x000f000f, {offset:#x}, 0x6a;
shr.u32 even, even, 4;
shr.u32 odd, odd, 4;
lop3.b32 $2, even, 0x000f000f, {offset:#x}, 0x6a;
lop3.b32 $3, odd, 0x000f000f, {offset:#x}, 0x6a;
mov.b32 even, {one:#x};
mov.b32 odd, {minus_offset:#x};
fma.rn.{kind} $0, $0, even, odd;
fma.rn.{kind} $1, $1, even, odd;
fma.rn.{kind} $2, $2, even, odd;
fma.rn.{kind} $3, $3, even, odd;
}}"""
UNPACK_BF16 = tl.constexpr(_UNPACK.format(kind="bf16x2", offset=0x43084308, one=0x3F803F80, minus_offset=0xC308C308))
UNPACK_FP16 = tl.constexpr(_UNPACK.format(kind="f16x2", offset=0x64086408, one=0x3C003C00, minus_offset=0xE408E408))


@triton.jit
def _halves(at, mask, DOT: tl.constexpr, NIBBLES: tl.constexpr, INTERPRET: tl.constexpr):
    """Codes [BLOCK_N, BLOCK_K] as DOT: the low nibbles and the high ones, or the bytes and the bytes again."""
    codes = tl.load(at, mask=mask, other=0)
    if NIBBLES:
        if INTERPRET:
            low, high = ((codes << 4) >> 4).to(DOT), (codes >> 4).to(DOT)
        elif DOT == tl.float16:  # noqa: SIM300
            low, high = tl.inline_asm_elementwise(
                UNPACK_FP16, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                UNPACK_BF16, "=r,=r,=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    else:
        low = codes.to(DOT)
        high = low
    return low, high


# A count of tokens or steps that is 1 or even is no reason to compile anew.
@triton.jit(do_not_specialize=["tokens", "steps", "steps_per_split"])
def _weight_only(
    x,
    codes,
    scale,
    zero_point,
    out,
    tokens,
    outputs,
    inputs,
    row_bytes,
    group_bytes,
    half,
    steps,
    steps_per_split,
    DOT: tl.constexpr,
    NIBBLES: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile [BLOCK_N outputs, BLOCK_M tokens] over one part of the inputs. A step is BLOCK_K code bytes of each
    output; it never crosses a group."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    within = tl.arange(0, BLOCK_K)
    real_output = output < outputs
    real_token = token[:, None] < tokens
    x_rows = x + token[:, None].to(tl.int64) * inputs
    code_rows = codes + output[:, None].to(tl.int64) * row_bytes
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first = split * steps_per_split
    for step in range(first, tl.minimum(first + steps_per_split, steps)):
        byte = step * BLOCK_K
        group = byte // group_bytes
        low, high = _halves(code_rows + (byte + within)[None, :], real_output[:, None], DOT, NIBBLES, INTERPRET)
        if HAS_ZERO:
            zero = tl.load(zero_point + group * outputs + output, mask=real_output, other=0).to(DOT)[:, None]
            low -= zero
            high -= zero
        k = (byte + byte // half * half if NIBBLES else byte) + within[None, :]
        part = tl.load(x_rows + k, mask=real_token & (k < inputs), other=0).to(DOT)
        sums = tl.dot(low, tl.trans(part), input_precision="ieee")
        if NIBBLES:
            k += half
            part = tl.load(x_rows + k, mask=real_token & (k < inputs), other=0).to(DOT)
            sums = tl.dot(high, tl.trans(part), sums, input_precision="ieee")
        factor = tl.load(scale + group * outputs + output, mask=real_output, other=0).to(tl.float32)
        total += sums * factor[:, None]
    at = out + split.to(tl.int64) * tokens * outputs + token[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=real_output[:, None] & (token[None, :] < tokens))


@triton.jit
def _dequantize(
    codes,
    scale,
    zero_point,
    out,
    outputs,
    inputs,
    row_bytes,
    group_bytes,
    half,
    DOT: tl.constexpr,
    NIBBLES: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(code - zero point) * scale in float32, rounded once: [outputs, inputs]."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.program_id(1) * BLOCK_K
    within = tl.arange(0, BLOCK_K)[None, :]
    real = (output < outputs)[:, None]
    rows = output[:, None].to(tl.int64)
    group = byte // group_bytes
    low, high = _halves(codes + rows * row_bytes + byte + within, real, DOT, NIBBLES, INTERPRET)
    low, high = low.to(tl.float32), high.to(tl.float32)
    factor = tl.load(scale + group * outputs + output, mask=output < outputs, other=0).to(tl.float32)[:, None]
    if HAS_ZERO:
        zero = tl.load(zero_point + group * outputs + output, mask=output < outputs, other=0).to(tl.float32)[:, None]
        low -= zero
        high -= zero
    k = (byte + byte // half * half if NIBBLES else byte) + within
    at = out + rows * inputs + k
    tl.store(at, (low * factor).to(out.dtype.element_ty), mask=real & (k < inputs))
    if NIBBLES:
        tl.store(at + half, (high * factor).to(out.dtype.element_ty), mask=real & (k + half < inputs))


def pack_nibbles(codes: torch.Tensor, block: int) -> torch.Tensor:
    """Codes of up to 4 bits, int8 [N, K], two per byte: int8 [N, K / 2]. Of every `block` inputs the first half lies in
    the low nibbles and the second half in the high ones, so that both unpack into contiguous inputs."""
    low, high = codes.view(codes.shape[0], -1, 2, block // 2).unbind(2)
    return ((low & 15) | (high << 4)).flatten(1).contiguous()


def _empty(x: torch.Tensor, codes: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


@traceable("triton_weight_only", _empty)
def weight_only_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, half: int, block: int
) -> torch.Tensor:
    """x [M, K] times the weight [N, K] transposed, in the dtype of x. `codes` int8 [N, bytes], `scale` and
    `zero_point` [groups, N]; `half`: bytes after which the packing of nibbles starts anew, 0 for whole bytes."""
    x = x.contiguous()
    tokens, inputs = x.shape
    outputs, row_bytes = codes.shape
    if tokens == 0:
        return x.new_empty(0, outputs)
    group_bytes, steps = row_bytes // scale.shape[0], row_bytes // block
    across = triton.cdiv(outputs, BLOCK_OUTPUTS)
    shape: dict[str, Any] = {"NIBBLES": half > 0, "HAS_ZERO": zero_point is not None, "INTERPRET": INTERPRETED}
    shape |= {"DOT": triton_dtype(x.dtype), "BLOCK_N": BLOCK_OUTPUTS, "BLOCK_K": block}
    layout = (outputs, inputs, row_bytes, group_bytes, half)
    if tokens > LARGEST_BATCH:
        weight = torch.empty(outputs, inputs, dtype=computing_dtype(x.dtype), device=x.device)
        _dequantize[(across, steps)](codes, scale, zero_point, weight, *layout, **shape)
        return functional.linear(x, weight.to(x.dtype))
    block_tokens = max(16, triton.next_power_of_2(tokens))
    splits = splits_for(across, steps, multiprocessors(x.device))
    dtype = torch.float32 if splits > 1 else computing_dtype(x.dtype)
    out = torch.empty(splits, tokens, outputs, dtype=dtype, device=x.device)
    _weight_only[(across, 1, splits)](
        x,
        codes,
        scale,
        zero_point,
        out,
        tokens,
        *layout,
        steps,
        triton.cdiv(steps, splits),
        BLOCK_M=block_tokens,
        **shape,
    )
    return finish(out, outputs, x.dtype) if splits > 1 else out[0].to(x.dtype)


class TritonWeightOnly(nn.Module):
    """Codes of up to 4 bits are kept two per byte, others one; scales and zero points as stored, but [groups, N]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None

    @staticmethod
    def supports(scheme: Scheme) -> bool:
        least = 2 * LEAST_BLOCK if scheme.bits <= 4 else LEAST_BLOCK
        return scheme.activations is None and (scheme.group_size == PER_CHANNEL or scheme.group_size % least == 0)

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        nibbles = weight.scheme.bits <= 4
        self.name = "triton-int4" if nibbles else "triton-int8"
        group = CHANNEL_BLOCK if weight.scheme.group_size == PER_CHANNEL else weight.scheme.group_size
        self.half_bytes = group // 2 if nibbles else 0
        self.block = power_of_two_in(self.half_bytes or group, MOST_CODE_BYTES)
        padded = functional.pad(weight.codes, (0, -weight.codes.shape[1] % group))
        self.register_buffer("codes", pack_nibbles(padded, group) if nibbles else padded)
        self.register_buffer("scale", weight.scale.T.contiguous())
        zero_point = weight.zero_point
        self.register_buffer("zero_point", None if zero_point is None else zero_point.T.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = weight_only_linear(x, self.codes, self.scale, self.zero_point, self.half_bytes, self.block)
        return out
