"""What the Triton kernels of this package share: how the work is cut for a device, and what the interpreter needs.

The one idea: few tokens leave most of a GPU idle unless the inputs are split between programs too; their float32 (or
exact int32) partial sums are then added in a fixed order by `finish`, so a result never depends on which came first.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
PROGRAMS_PER_MULTIPROCESSOR = 3
# Fewer steps than this per program, and filling the pipeline costs more than the parallelism brings.
LEAST_STEPS = 4
INTERPRETER_MULTIPROCESSORS = 4
FINISH_BLOCK = 512


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products and results. The interpreter keeps bfloat16 as bare bits and truncates where a GPU rounds,
    so there bfloat16 is computed in float32, which holds all its products exactly, and torch rounds at the end."""
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype


def triton_dtype(dtype: torch.dtype) -> Any:
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return names[computing_dtype(dtype)]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def splits_for(programs: int, steps: int, available: int) -> int:
    """Into how many parts to split `steps` along the inputs, when `programs` fill the outputs and the tokens of a
    device with `available` multiprocessors. No part is empty."""
    wanted = max(1, min(PROGRAMS_PER_MULTIPROCESSOR * available // programs, steps // LEAST_STEPS))
    return -(-steps // -(-steps // wanted))


def power_of_two_in(number: int, largest: int) -> int:
    """The largest power of two that divides `number` and is at most `largest`."""
    return min(number & -number, largest)


@triton.jit(do_not_specialize=["rows"])
def _finish(
    partial,
    row_scale,
    column_scale,
    out,
    rows,
    columns,
    partial_columns,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = partial + row * partial_columns + column
    total = tl.load(at, mask=inside, other=0)
    for _ in range(1, SPLITS):
        at += rows.to(tl.int64) * partial_columns
        total += tl.load(at, mask=inside, other=0)
    result = total.to(tl.float32)
    if SCALED:
        result = result * tl.load(row_scale + row) * tl.load(column_scale + column, mask=inside, other=0)
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)


def finish(
    partial: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
    row_scale: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds `partial` [splits, rows, at least `columns`] over its splits, multiplies by `row_scale` [rows] and
    `column_scale` [columns] where given, both float32, and rounds once to `dtype`: [rows, columns]."""
    splits, rows, partial_columns = partial.shape
    out = torch.empty(rows, columns, dtype=computing_dtype(dtype), device=partial.device)
    _finish[(rows, triton.cdiv(columns, FINISH_BLOCK))](
        partial,
        row_scale,
        column_scale,
        out,
        rows,
        columns,
        partial_columns,
        SPLITS=splits,
        SCALED=row_scale is not None,
        BLOCK=FINISH_BLOCK,
    )
    return out.to(dtype)
