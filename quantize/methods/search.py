"""The grid of least squared rounding error: each group's range is cut as far as that lowers its error."""

import torch

from quantize.scheme import Grid, Scheme, grid_from_range, grouped

SHRINKS = tuple(1.0 - step / 50 for step in range(26))
"""Shares of a group's full range that are tried."""


def search_grid(
    weight: torch.Tensor, importance: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> tuple[Grid, torch.Tensor]:
    """Per group, the share of its full range whose grid has the least squared rounding error, inputs weighted by
    `importance` [K]. Returns the grid and which groups were cut, bool [N, G]."""
    groups = grouped(weight, scheme)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    weights = importance.reshape(1, groups.shape[1], groups.shape[2])
    best = torch.full_like(low, float("inf"))
    share = torch.ones_like(low)
    for shrink in SHRINKS:
        grid = grid_from_range(low * shrink, high * shrink, scheme, scale_dtype)
        scale = grid.scale.float().unsqueeze(2)
        zero_point = 0.0 if grid.zero_point is None else grid.zero_point.float().unsqueeze(2)
        rounded = ((groups / scale).round_().add_(zero_point)).clamp_(scheme.lowest, scheme.highest)
        rounded.sub_(zero_point).mul_(scale).sub_(groups).square_().mul_(weights)
        error = rounded.sum(dim=2)
        better = error < best
        best = torch.where(better, error, best)
        share = torch.where(better, torch.full_like(share, shrink), share)
    return grid_from_range(low * share, high * share, scheme, scale_dtype), share < 1.0
