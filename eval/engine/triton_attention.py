"""Paged attention in Triton for a GPU: one kernel writes a step's keys and values, one attends, one joins splits.

The one idea: a program takes all query heads of a kv head over a few tokens of one request, so a key is read once for
all that share it. A decode step has too few such programs to fill a GPU, so each request's context is split too, and
the parts, each with its own maximum, are joined afterwards. Which request a program serves is looked up on the device:
a launch depends on the step's shape alone, and can be captured in a CUDA graph.

Scores and sums are float32. Between 16-bit tensors the attention weights are rounded to 16 bits before they meet the
values, which moves an output by at most 2^-8 (bfloat16) or 2^-11 (float16) of the largest value in sight.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from eval.engine.attention import StepContext
from quantize.kernels.triton.launch import computing_dtype, multiprocessors, splits_for, triton_dtype

PREFILL_ROWS = 64
"""Query rows (tokens times the heads that share a kv head) of a program, unless every request has one token."""
LEAST_ROWS = 16
"""Rows that one tensor-core instruction takes at least; float32, which none takes, has registers for no more."""
KEY_BYTES = 16384
"""A program's keys of one step, in registers and shared memory: 64 of 128 16-bit values."""
LARGEST_HEAD_DIM = 256
LARGEST_CODE = tl.constexpr(127.0)
ROUNDER = tl.constexpr(1.5 * 2.0**23)
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@triton.jit
def _write_row(rows, at, scales, row, slot, mask, QUANTIZED: tl.constexpr):
    """One row of one head into its slot; as `quantize_rows` does it where the cache is int8."""
    if QUANTIZED:
        values = tl.load(rows, mask=mask, other=0).to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(values), axis=0), LARGEST_CODE)
        # Above 2^23 float32 has no fractions, so adding and subtracting this rounds half to even.
        codes = (tl.div_rn(values, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(values)) + ROUNDER) - ROUNDER
        codes = tl.where(codes == codes, tl.minimum(tl.maximum(codes, -LARGEST_CODE), LARGEST_CODE), 0.0)
        # Zero unless a value is not finite; then the scale is not either, and the request fails instead of going wrong.
        tl.store(scales + slot, scale + tl.sum(values * 0.0, axis=0))
        tl.store(at, codes.to(tl.int8), mask=mask)
    else:
        tl.store(at, tl.load(rows, mask=mask), mask=mask)


@triton.jit
def _write(
    key,
    value,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """One token's key and value of one kv head. A negative slot is padding and is not written."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        dim = tl.arange(0, BLOCK_D)
        mask = dim < HEAD_DIM
        row = slot * tl.num_programs(1) + head
        at = row * HEAD_DIM + dim
        _write_row(key + token * key_token + head * key_head + dim, keys + at, key_scales, row, row, mask, QUANTIZED)
        rows = value + token * value_token + head * value_head + dim
        _write_row(rows, values + at, value_scales, row, row, mask, QUANTIZED)


@triton.jit
def _request_of(tile, query_starts, num_requests, BLOCK_Q: tl.constexpr):
    """The request of a tile, when request r's tiles begin at query_starts[r] // BLOCK_Q + r: more than all tiles before
    need, so that no table of tiles has to be made."""
    low = tile * 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


# What changes from step to step must not be a reason to compile anew.
@triton.jit(do_not_specialize=["num_requests", "num_tokens", "table_stride", "window"])
def _attend(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    maxima,
    totals,
    query_starts,
    context_lens,
    block_tables,
    num_requests,
    num_tokens,
    query_token,
    query_head,
    table_stride,
    block_size,
    scaling,
    window,
    softcap,
    DOT: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """BLOCK_Q tokens of one request, all GROUP query heads of one kv head, over one part of the context."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    if DECODE:
        request = tile
        first = 0
    else:
        request = _request_of(tile, query_starts, num_requests, BLOCK_Q)
        first = (tile - tl.load(query_starts + request) // BLOCK_Q - request) * BLOCK_Q
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    context = tl.load(context_lens + request)

    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < BLOCK_Q * GROUP) & (token < count)
    position = context - count + token
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    rows = (start + token).to(tl.int64)
    q = tl.load(
        query + (rows * query_token + head * query_head)[:, None] + dim[None, :],
        mask=real[:, None] & in_head[None, :],
        other=0,
    ).to(DOT)

    end = tl.minimum(context, context - count + first + BLOCK_Q)
    begin = 0
    if WINDOW:
        begin = tl.maximum(context - count + first - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        part = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), tl.num_programs(2)) * BLOCK_N
        begin += tl.program_id(2) * part
        end = tl.minimum(end, begin + part)
    if first >= count:
        end = begin

    largest = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for key_start in range(begin, end, BLOCK_N):
        key_position = key_start + tl.arange(0, BLOCK_N)
        inside = key_position < end
        block = tl.load(block_tables + request * table_stride + key_position // block_size, mask=inside, other=0)
        slot = (block.to(tl.int64) * block_size + key_position % block_size) * kv_heads + kv_head
        at = keys + slot[None, :] * HEAD_DIM + dim[:, None]
        k = tl.load(at, mask=inside[None, :] & in_head[:, None], other=0).to(DOT)
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        if QUANTIZED:
            scores *= tl.load(key_scales + slot, mask=inside, other=0)[None, :]
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        visible = inside[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (key_position[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, -float("inf"))
        next_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps -inf, and must not meet -inf - -inf.
        shift = tl.where(next_largest == -float("inf"), 0.0, next_largest)
        weights = tl.exp(scores - shift[:, None])
        fade = tl.exp(largest - shift)
        total = total * fade + tl.sum(weights, axis=1)
        largest = next_largest
        at = values + slot[:, None] * HEAD_DIM + dim[None, :]
        v = tl.load(at, mask=inside[:, None] & in_head[None, :], other=0).to(DOT)
        if QUANTIZED:
            weights *= tl.load(value_scales + slot, mask=inside, other=0)[None, :]
        sums = sums * fade[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")

    heads = kv_heads * GROUP
    if SPLIT:
        rows += tl.program_id(2).to(tl.int64) * num_tokens
        tl.store(maxima + rows * heads + head, largest, mask=real)
        tl.store(totals + rows * heads + head, total, mask=real)
    else:
        sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    at = out + ((rows * heads + head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=real[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["splits"])
def _join(partial, maxima, totals, out, splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One token and head: its splits' sums, each scaled to the common maximum."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    dim = tl.arange(0, BLOCK_D)
    mask = dim < HEAD_DIM
    largest = tl.load(maxima + row)
    for split in range(1, splits):
        largest = tl.maximum(largest, tl.load(maxima + row + split * rows))
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    total = 0.0
    sums = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for split in range(splits):
        at = row + split * rows
        factor = tl.exp(tl.load(maxima + at) - shift)
        total += factor * tl.load(totals + at)
        sums += factor * tl.load(partial + at * HEAD_DIM + dim, mask=mask, other=0)
    sums = sums / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dim, sums.to(out.dtype.element_ty), mask=mask)


def supports(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether the kernels have this case; asked before they are compiled."""
    return head_dim <= LARGEST_HEAD_DIM and dtype in KV_DTYPES[:3] and kv_dtype in KV_DTYPES


class TritonAttention:
    """The kernels behind the backend interface. A row of the step with a negative slot or without context is padding:
    it changes nothing, and comes out as zeros."""

    name = "triton"

    def attend(
        self,
        step: StepContext,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        kv = step.kv
        quantized = kv.scales is not None
        keys, values = kv.blocks[layer]
        key_scales, value_scales = (None, None) if kv.scales is None else kv.scales[layer]
        if not quantized:
            key, value = key.to(kv.dtype), value.to(kv.dtype)
        query, key, value = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (query, key, value))
        tokens, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        shape: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim))}
        _write[(tokens, kv_heads)](
            key,
            value,
            keys,
            values,
            key_scales,
            value_scales,
            step.slot_mapping,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            QUANTIZED=quantized,
            **shape,
        )
        group, requests = heads // kv_heads, step.context_lens.shape[0]
        decode = tokens == requests
        # What has one 16-bit dtype meets on tensor cores, all else in float32.
        common = query.dtype if quantized or kv.dtype == query.dtype else torch.float32
        block_q = 1 if decode else max(1, (LEAST_ROWS if common == torch.float32 else PREFILL_ROWS) // group)
        block_n = max(16, min(64, KEY_BYTES // (shape["BLOCK_D"] * common.itemsize)))
        tiles = requests if decode else tokens // block_q + requests
        splits = 1
        if decode:
            steps = triton.cdiv(step.block_tables.shape[1] * kv.block_size, block_n)
            splits = splits_for(tiles * kv_heads, steps, multiprocessors(query.device))
        out = torch.empty(tokens, heads, head_dim, dtype=computing_dtype(query.dtype), device=query.device)
        partial, maxima, totals = out, None, None
        if splits > 1:
            partial = out.new_empty(splits, tokens, heads, head_dim, dtype=torch.float32)
            maxima, totals = out.new_empty(2, splits, tokens, heads, dtype=torch.float32)
        _attend[(tiles, kv_heads, splits)](
            query,
            keys,
            values,
            key_scales,
            value_scales,
            partial,
            maxima,
            totals,
            step.query_starts,
            step.context_lens,
            step.block_tables,
            requests,
            tokens,
            query.stride(0),
            query.stride(1),
            step.block_tables.stride(0),
            kv.block_size,
            scaling,
            window or 0,
            softcap or 0.0,
            DOT=triton_dtype(common),
            GROUP=group,
            BLOCK_Q=block_q,
            BLOCK_M=max(LEAST_ROWS, triton.next_power_of_2(block_q * group)),
            BLOCK_N=block_n,
            DECODE=decode,
            SPLIT=splits > 1,
            QUANTIZED=quantized,
            WINDOW=window is not None,
            SOFTCAP=softcap is not None,
            **shape,
        )
        if splits > 1:
            _join[(tokens * heads,)](partial, maxima, totals, out, splits, **shape)
        return out.to(query.dtype)
