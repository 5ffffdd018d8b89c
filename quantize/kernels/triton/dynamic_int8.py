"""INT8 weights times INT8 activations on a GPU: tokens are quantized in one kernel and multiplied in another.

The one idea: the integer product is exact however it is split, so few tokens go through a Triton kernel that splits the
inputs too, many go through torch's `_int_mm` (which wants more than 16 of them), and both give the same numbers: sums
in int32, then the two scales in float32, then one rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional

from quantize.kernels.custom_op import traceable
from quantize.kernels.triton.launch import finish, multiprocessors, power_of_two_in, splits_for
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme

INT_MM_LEAST_TOKENS = 17
BLOCK_OUTPUTS = 64
BLOCK_TOKENS = 16
INPUTS_MULTIPLE = 64
OUTPUTS_MULTIPLE = 16
MOST_BLOCK = 128
QUANTIZE_BLOCK = 4096
HALF_STEPS = tl.constexpr(127.5)
SMALLEST_STEP = tl.constexpr(torch.finfo(torch.float32).eps)
ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _quantize_tokens(x, codes, scale, inputs, padded_inputs, BLOCK: tl.constexpr):
    """One token, as `quantize_tokens` does it: scale = largest / 127.5, code = round half to even, clamped."""
    token = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, inputs, BLOCK):
        k = start + within
        values = tl.load(x + token * inputs + k, mask=k < inputs, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    step = tl.div_rn(tl.max(largest, axis=0), HALF_STEPS)
    step = tl.where(step == 0, SMALLEST_STEP, step)
    tl.store(scale + token, step)
    for start in range(0, padded_inputs, BLOCK):
        k = start + within
        values = tl.load(x + token * inputs + k, mask=k < inputs, other=0).to(tl.float32)
        # Above 2^23 float32 has no fractions, so adding and subtracting this rounds half to even.
        rounded = (tl.div_rn(values, tl.zeros_like(values) + step) + ROUNDER) - ROUNDER
        rounded = tl.minimum(tl.maximum(rounded, -128.0), 127.0)
        tl.store(codes + token * padded_inputs + k, rounded.to(tl.int8), mask=k < padded_inputs)


@triton.jit(do_not_specialize=["tokens", "steps", "steps_per_split"])
def _int8_product(
    tokens_codes,
    codes,
    out,
    tokens,
    padded_outputs,
    padded_inputs,
    steps,
    steps_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """int32 sums [splits, tokens, padded outputs]; outputs are the left operand, since tokens are few."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    token = tl.arange(0, BLOCK_M)
    within = tl.arange(0, BLOCK_K)
    real_output = output < padded_outputs
    first = split * steps_per_split
    weight_at = codes + output[:, None].to(tl.int64) * padded_inputs + within[None, :]
    token_at = tokens_codes + token[None, :].to(tl.int64) * padded_inputs + within[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    for step in range(first, tl.minimum(first + steps_per_split, steps)):
        weight = tl.load(weight_at + step * BLOCK_K, mask=real_output[:, None], other=0)
        part = tl.load(token_at + step * BLOCK_K, mask=token[None, :] < tokens, other=0)
        total = tl.dot(weight, part, total, out_dtype=tl.int32)
    at = out + (split.to(tl.int64) * tokens + token[None, :]) * padded_outputs + output[:, None]
    tl.store(at, total, mask=real_output[:, None] & (token[None, :] < tokens))


def quantize_on_device(x: torch.Tensor, padded_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] as int8 codes [M, padded_inputs], zeros behind K, and float32 scales [M]."""
    tokens, inputs = x.shape
    codes = torch.empty(tokens, padded_inputs, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = min(QUANTIZE_BLOCK, triton.next_power_of_2(padded_inputs))
    _quantize_tokens[(tokens,)](x, codes, scale, inputs, padded_inputs, BLOCK=block)
    return codes, scale


def _empty(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], scale.shape[0])


@traceable("triton_dynamic_int8", _empty)
def dynamic_int8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [M, K] times the weight [N, K] transposed, in the dtype of x. `codes` int8 [padded N, padded K], `scale`
    float32 [N]."""
    x = x.contiguous()
    tokens, outputs = x.shape[0], scale.shape[0]
    padded_outputs, padded_inputs = codes.shape
    if tokens == 0:
        return x.new_empty(0, outputs)
    token_codes, token_scale = quantize_on_device(x, padded_inputs)
    if tokens >= INT_MM_LEAST_TOKENS:
        sums = torch._int_mm(token_codes, codes.T).unsqueeze(0)
    else:
        block = power_of_two_in(padded_inputs, MOST_BLOCK)
        steps, across = padded_inputs // block, triton.cdiv(padded_outputs, BLOCK_OUTPUTS)
        splits = splits_for(across, steps, multiprocessors(x.device))
        sums = torch.empty(splits, tokens, padded_outputs, dtype=torch.int32, device=x.device)
        _int8_product[(across, splits)](
            token_codes,
            codes,
            sums,
            tokens,
            padded_outputs,
            padded_inputs,
            steps,
            triton.cdiv(steps, splits),
            BLOCK_M=BLOCK_TOKENS,
            BLOCK_N=BLOCK_OUTPUTS,
            BLOCK_K=block,
        )
    return finish(sums, outputs, x.dtype, token_scale, scale)


class TritonDynamicInt8(nn.Module):
    """W8A8: symmetric int8 per output channel, tokens quantized as they come. The codes are padded with zeros to the
    sizes that the products want."""

    name = "triton-int8-dynamic"
    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def supports(scheme: Scheme) -> bool:
        return scheme == Scheme(8, PER_CHANNEL, symmetric=True, activations="int8")

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        outputs, inputs = weight.codes.shape
        padding = (0, -inputs % INPUTS_MULTIPLE, 0, -outputs % OUTPUTS_MULTIPLE)
        self.register_buffer("codes", functional.pad(weight.codes, padding))
        self.register_buffer("scale", weight.scale.float().reshape(-1).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = dynamic_int8_linear(x, self.codes, self.scale)
        return out
