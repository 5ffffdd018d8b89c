"""GPTQ: columns are rounded one after another, and what a column loses is made good by the columns still to come.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv 2210.17323).
With the Hessian H = XᵀX of the layer's squared output error, rounding column i with error e moves the later columns by
-e · U[i, j] / U[i, i], where UᵀU = H⁻¹ and U is upper triangular. Columns with the largest inputs go first (act-order);
the grids are fixed beforehand, group by group in the stored order, so that the result needs no `g_idx` and is laid out
plainly; once all codes are chosen, the scales are fitted to them (`refit.py`).
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from quantize.gram import output_error
from quantize.methods.refit import error_of, refit_scales
from quantize.methods.search import search_grid
from quantize.native_build import load_native
from quantize.scheme import Grid, QuantizedWeight, Scheme, round_to_grid

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 128
LADDER = (1.0, 4.0, 16.0, 64.0)
"""Factors on the damping, climbed until the Cholesky factorization succeeds."""


@dataclass(frozen=True)
class GptqResult:
    """`quantized` and how it came about. error and signal [N] as in `Refitted`. clipped bool [N, G]: groups whose range
    was cut. fallback: None, or why it was rounded to nearest instead."""

    quantized: QuantizedWeight
    error: torch.Tensor
    signal: torch.Tensor
    damp: float
    dead_columns: int
    clipped: torch.Tensor
    fallback: str | None


def gptq(
    weight: torch.Tensor,
    gram: torch.Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    damp: float = 0.01,
    act_order: bool = True,
) -> GptqResult:
    """`weight` float32 [N, K], `gram` float32 [K, K] its inputs' second moments.

    A column that calibration never moved (gram[i, i] = 0) is rounded to nearest and takes no part in the compensation:
    the paper's code sets it to zero, which would break inputs that calibration happened not to reach.
    """
    diagonal = gram.diagonal()
    dead = diagonal == 0
    dead_columns = int(dead.sum())
    importance = torch.where(dead, diagonal.mean(), diagonal)
    if not torch.isfinite(gram).all() or dead_columns == len(dead):
        reason = "no calibration input reached it" if dead_columns == len(dead) else "its inputs are not finite"
        return nearest(weight, gram, torch.ones_like(diagonal), scheme, scale_dtype, dead_columns, reason)
    if act_order:
        order = torch.argsort(importance, descending=True, stable=True)
    else:
        order = torch.arange(len(dead), device=weight.device)
    for factor in LADDER:
        share = damp * factor
        upper = inverse_factor(gram, importance, share, order)
        if upper is None:
            continue
        grid, clipped = search_grid(weight, rounding_costs(upper, order), scheme, scale_dtype)
        codes = compensate(weight, upper, grid, order)
        found = refit_scales(weight, gram, QuantizedWeight(codes, grid.scale, grid.zero_point, scheme))
        return GptqResult(found.quantized, found.error, found.signal, share, dead_columns, clipped, None)
    reason = f"Cholesky failed up to damping {damp * LADDER[-1]:g}"
    return nearest(weight, gram, importance, scheme, scale_dtype, dead_columns, reason)


def rounding_costs(upper: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """What a squared rounding error costs per column [K], after the later columns have made good what they can: 1 /
    U[i, i]². The grid is searched for these; the plain second moments would cut ranges for the sake of errors that get
    repaired."""
    costs = torch.empty(len(order), device=upper.device)
    costs[order] = upper.diagonal().square().reciprocal()
    return costs


def nearest(
    weight: torch.Tensor,
    gram: torch.Tensor,
    importance: torch.Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    dead_columns: int,
    reason: str,
) -> GptqResult:
    grid, clipped = search_grid(weight, importance, scheme, scale_dtype)
    quantized = round_to_grid(weight, grid)
    error, signal = error_of(quantized, weight, gram), output_error(weight, gram)
    return GptqResult(quantized, error, signal, 0.0, dead_columns, clipped, f"round to nearest: {reason}")


def inverse_factor(
    gram: torch.Tensor, importance: torch.Tensor, damp: float, order: torch.Tensor
) -> torch.Tensor | None:
    """U float32 [K, K], upper triangular with UᵀU = (H + damp · mean(diag H) · I)⁻¹ in the given order of columns; None
    when a factorization fails."""
    hessian = gram.clone()
    hessian.diagonal().copy_(importance + damp * importance.mean())
    hessian = hessian[order][:, order]
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if failed:
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return upper if not failed and bool(torch.isfinite(upper).all()) else None


def compensate(weight: torch.Tensor, upper: torch.Tensor, grid: Grid, order: torch.Tensor) -> torch.Tensor:
    """The codes int8 [N, K], by native code on a CPU where there is a compiler."""
    library = load_native(SOURCE) if weight.device.type == "cpu" else None
    if library is None:
        return compensate_columns(weight, upper, grid, order)
    outputs, inputs = weight.shape
    scale = grid.scale.float().contiguous()
    zero_point = torch.zeros_like(scale) if grid.zero_point is None else grid.zero_point.float().contiguous()
    tensors = [weight.contiguous(), upper.T.contiguous(), order.contiguous(), scale, zero_point]
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    sizes = [ctypes.c_int64(size) for size in (outputs, inputs, scale.shape[1])]
    limits = [ctypes.c_int32(limit) for limit in (grid.scheme.lowest, grid.scheme.highest)]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in [*tensors, codes]]
    library.gptq_compensate(*pointers[:-1], *sizes, *limits, pointers[-1])
    return codes


def compensate_columns(weight: torch.Tensor, upper: torch.Tensor, grid: Grid, order: torch.Tensor) -> torch.Tensor:
    """The codes int8 [N, K]. Works on the transpose, [K, N] in processing order, so that a column is contiguous; errors
    are carried to the end of a block at once and to the blocks after it by one product per block."""
    outputs, inputs = weight.shape
    lowest, highest = grid.scheme.lowest, grid.scheme.highest
    group_of = order // grid.scheme.group_width(inputs)
    scales = grid.scale.float().T.contiguous()
    zero_points = torch.zeros_like(scales) if grid.zero_point is None else grid.zero_point.float().T.contiguous()
    groups = group_of.tolist()
    remaining = weight.T[order].contiguous()
    codes = torch.empty(inputs, outputs, dtype=torch.int8, device=weight.device)
    pivots = upper.diagonal().tolist()
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        block = remaining[start:stop]
        errors = torch.empty_like(block)
        for position in range(start, stop):
            column = block[position - start]
            scale, zero_point = scales[groups[position]], zero_points[groups[position]]
            code = (column / scale).round_().add_(zero_point).clamp_(lowest, highest)
            codes[position] = code
            error = code.sub_(zero_point).mul_(scale).sub_(column).div_(-pivots[position])
            errors[position - start] = error
            block[position - start + 1 :].addr_(upper[position, position + 1 : stop], error, alpha=-1.0)
        remaining[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1.0)
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous()
