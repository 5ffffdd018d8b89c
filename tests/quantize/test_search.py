"""Native code finds the grid that the torch loop finds."""

import pytest
import torch

from quantize.methods.search import SOURCE, compare_grids, least_error
from quantize.native_build import load_native
from quantize.scheme import PER_CHANNEL, Scheme, dequantize, grid_from_range, grouped, round_to_grid

SCHEMES = [Scheme(4, 64), Scheme(4, 64, symmetric=False), Scheme(3, 24), Scheme(2, 8), Scheme(8, PER_CHANNEL)]


@pytest.fixture(autouse=True)
def _native():
    if load_native(SOURCE) is None:
        pytest.skip("no compiler")


@pytest.mark.parametrize("power", [2.0, 3.0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_native_code_finds_the_grid_of_least_error(scheme, power):
    torch.manual_seed(0)
    weight = torch.randn(192, 50).T  # 50 x 192, not contiguous
    weight[3] = 0.0
    weight[7] *= 1e-30
    importance = torch.rand(192)
    groups = grouped(weight, scheme)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    grids = [grid_from_range(low * share, high * share, scheme, torch.bfloat16) for share in (1.1, 1.0, 0.8, 0.6, 0.9)]
    found, expected = (find(weight, importance, grids, power) for find in (least_error, compare_grids))
    assert len(found.unique()) > 1
    errors = torch.stack([cost_of(weight, importance, grid, power) for grid in grids])
    ours, best = (errors.gather(0, choice[None])[0] for choice in (found, expected))
    # The two add up in another order, so that they may part where two grids are equally good.
    assert torch.allclose(ours, best, rtol=1e-5, atol=0.0)
    assert (found == expected).float().mean() > 0.99


def cost_of(weight, importance, grid, power):
    """Per group, the error that the search minimizes."""
    error = (dequantize(round_to_grid(weight, grid), torch.float32) - weight).abs().pow(power) * importance
    return grouped(error, grid.scheme).sum(dim=2)
