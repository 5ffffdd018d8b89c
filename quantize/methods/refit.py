"""The best scales for codes that are already chosen: a least-squares problem per output channel, solved exactly.

Rounding chose the codes on some grid; with the codes c fixed, the row's output error (w − Σ_g s_g c_g) H (w − Σ_g s_g
c_g)ᵀ is quadratic in its scales s_g, one per group, so that its minimum is one small linear system: A s = b with
A_gh = c_g H c_hᵀ and b_g = c_g H wᵀ.
"""

from dataclasses import dataclass, replace

import torch

from quantize.gram import output_error
from quantize.scheme import Grid, QuantizedWeight, dequantize, grouped

RIDGE = 1e-6
"""Share of A's mean diagonal added to it: groups without inputs have no scale of their own to find."""


@dataclass(frozen=True)
class Refitted:
    """The weight, its output error and the outputs' own size, both [N], mean square per token."""

    quantized: QuantizedWeight
    error: torch.Tensor
    signal: torch.Tensor


def refit_scales(weight: torch.Tensor, gram: torch.Tensor, quantized: QuantizedWeight) -> Refitted:
    """`quantized` with the scales of least output error, stored in their old dtype. A row keeps its old scales where
    the new ones, once rounded, are no better, or one of them is not positive. `weight` float32 [N, K], `gram` [K,
    K]."""
    outputs, inputs = weight.shape
    scheme = quantized.scheme
    width = scheme.group_width(inputs)
    points = quantized.codes.float()
    if quantized.zero_point is not None:
        points -= Grid(quantized.scale, quantized.zero_point, scheme).spread(inputs)[1]
    groups = grouped(points, scheme)
    moments = weight @ gram
    target = (grouped(moments, scheme) * groups).sum(dim=2)
    count = inputs // width
    system = torch.empty(outputs, count, count, device=weight.device)
    for group in range(count):
        moved = groups[:, group] @ gram[group * width : (group + 1) * width]
        system[:, group] = (grouped(moved, scheme) * groups).sum(dim=2)
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.mean(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scale, _ = torch.linalg.solve_ex(system, target.unsqueeze(2))
    stored = scale.squeeze(2).to(quantized.scale.dtype)
    usable = torch.isfinite(stored) & (stored > 0)
    candidate = replace(quantized, scale=torch.where(usable, stored, quantized.scale))
    before, after = error_of(quantized, weight, gram), error_of(candidate, weight, gram)
    better = after < before
    return Refitted(
        replace(quantized, scale=torch.where(better[:, None], candidate.scale, quantized.scale)),
        torch.where(better, after, before),
        (moments * weight).sum(dim=1).clamp(min=0.0),
    )


def error_of(quantized: QuantizedWeight, weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Output error per row, [N]."""
    return output_error(weight - dequantize(quantized, torch.float32), gram)
