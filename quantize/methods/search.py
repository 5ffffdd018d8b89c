"""The grid of least rounding error: each group's range is cut, or widened, as far as that lowers its error.

The error is Σ importance · |w − ŵ|^p. p = 2 is right where every weight's cost is known, as in GPTQ. Without any
calibration it is not: it cuts off large weights for the sake of many small ones, and large weights matter more than
their number. SmolLM2-135M rounded to 4 bits in groups of 64, WikiText-2 perplexity on 8 windows of 1024: 34.0 with the
plain grid, 35.9 with p = 2, 32.1 with p = 3 and 32.3 with p = 4 (GPTQ's own code has 2.4 there: 32.9).
"""

import torch

from quantize.scheme import Grid, Scheme, grid_from_range, grouped

SHRINKS = tuple(1.0 - step / 50 for step in range(26))
"""Shares of a group's full range that are tried."""

UNCALIBRATED_POWER = 3.0
UNCALIBRATED_SHARES = tuple(1.16 - step / 50 for step in range(24))
"""Above 1, since the plain symmetric grid ends half a step short of the largest weight."""


def search_grid(
    weight: torch.Tensor,
    importance: torch.Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    power: float = 2.0,
    shares: tuple[float, ...] = SHRINKS,
) -> tuple[Grid, torch.Tensor]:
    """Per group, the share of its full range whose grid has the least rounding error to the given power, inputs
    weighted by `importance` [K]. Returns the grid and which groups were cut, bool [N, G]."""
    groups = grouped(weight, scheme)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    weights = importance.reshape(1, groups.shape[1], groups.shape[2])
    best = torch.full_like(low, float("inf"))
    share = torch.ones_like(low)
    for tried in shares:
        grid = grid_from_range(low * tried, high * tried, scheme, scale_dtype)
        scale = grid.scale.float().unsqueeze(2)
        zero_point = 0.0 if grid.zero_point is None else grid.zero_point.float().unsqueeze(2)
        rounded = ((groups / scale).round_().add_(zero_point)).clamp_(scheme.lowest, scheme.highest)
        rounded.sub_(zero_point).mul_(scale).sub_(groups)
        rounded = (rounded.square_() if power == 2.0 else rounded.abs_().pow_(power)).mul_(weights)
        error = rounded.sum(dim=2)
        better = error < best
        best = torch.where(better, error, best)
        share = torch.where(better, torch.full_like(share, tried), share)
    return grid_from_range(low * share, high * share, scheme, scale_dtype), share < 1.0
