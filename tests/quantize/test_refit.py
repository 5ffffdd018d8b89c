"""Refitted scales: the least-squares optimum for given codes, and never worse than what was there."""

import pytest
import torch

from quantize.gram import output_error
from quantize.methods.refit import refit_scales
from quantize.scheme import QuantizedWeight, Scheme, dequantize, quantize_rtn

SCHEMES = [Scheme(4, 16), Scheme(4, 16, symmetric=False), Scheme(3, 32), Scheme(8)]


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] and the second moments [K, K] of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    activations = torch.randn(300, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    return torch.randn(24, 64, generator=generator), activations.T @ activations / 300


def error(quantized: QuantizedWeight, weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    return output_error(weight - dequantize(quantized, torch.float32), gram)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_other_scales_have_less_output_error(scheme):
    weight, gram = problem(0)
    refitted = refit_scales(weight, gram, quantize_rtn(weight, scheme)).quantized
    least = error(refitted, weight, gram)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        nudged = refitted.scale * (1 + 0.01 * torch.randn(refitted.scale.shape, generator=generator))
        moved = QuantizedWeight(refitted.codes, nudged, refitted.zero_point, scheme)
        assert (error(moved, weight, gram) > least * 0.9999).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_row_gets_worse_in_the_stored_dtype_and_the_codes_stay(scheme):
    weight, gram = problem(2)
    before = quantize_rtn(weight, scheme, torch.bfloat16)
    after = refit_scales(weight, gram, before).quantized
    assert after.scale.dtype is torch.bfloat16
    assert torch.equal(after.codes, before.codes)
    assert (error(after, weight, gram) <= error(before, weight, gram)).all()
    if scheme.bits < 8:  # one scale per row of 8 bits is as good as bf16 can say it already
        assert error(after, weight, gram).sum() < error(before, weight, gram).sum()


def test_groups_that_no_input_reaches_keep_their_scales_and_do_not_spoil_the_others():
    weight, gram = problem(3)
    gram[16:32] = gram[:, 16:32] = 0
    weight[5, 32:48] = 0
    before = quantize_rtn(weight, Scheme(4, 16))
    after = refit_scales(weight, gram, before).quantized
    assert torch.equal(after.scale[:, 1], before.scale[:, 1])
    assert (after.scale > 0).all()
    assert (after.scale[:, 0] != before.scale[:, 0]).float().mean() > 0.8
