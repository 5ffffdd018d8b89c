"""The integer grid: what rounding to nearest promises, against compressed-tensors' own arithmetic."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.errors import QuantizeError
from quantize.scheme import PER_CHANNEL, Scheme, dequantize, grouped, quantize_rtn

SCHEMES = [Scheme(8), Scheme(8, 32), Scheme(4, 32), Scheme(4, 32, symmetric=False), Scheme(4), Scheme(3, 16)]


def weight_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_one_step_and_half_a_step_inside_the_range(scheme, dtype):
    weight = weight_of(0, dtype)
    quantized = quantize_rtn(weight, scheme)
    step = grouped(quantized.scale.float().repeat_interleave(64 // quantized.scale.shape[1], 1), scheme)
    error = grouped((dequantize(quantized, torch.float32) - weight.float()).abs(), scheme)
    inside = (grouped(quantized.codes, scheme) > scheme.lowest) & (grouped(quantized.codes, scheme) < scheme.highest)
    assert (error <= 1.05 * step).all()
    assert (error[inside] <= 0.5001 * step[inside]).all()


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.bits != 3], ids=str)
def test_grid_and_codes_are_those_of_compressed_tensors(scheme):
    weight = weight_of(1, torch.float32)
    ours = quantize_rtn(weight, scheme)
    args = QuantizationArgs(
        num_bits=scheme.bits,
        symmetric=scheme.symmetric,
        strategy="channel" if scheme.group_size == PER_CHANNEL else "group",
        group_size=None if scheme.group_size == PER_CHANNEL else scheme.group_size,
    )
    groups = grouped(weight, scheme)
    scale, zero_point = calculate_qparams(groups.amin(2), groups.amax(2), args)
    codes = their_quantize(weight, scale, zero_point, args, dtype=torch.int8)
    torch.testing.assert_close(ours.scale, scale, rtol=1e-6, atol=0)
    if not scheme.symmetric:
        assert torch.equal(ours.zero_point, zero_point.to(torch.int8))
    assert (ours.codes != codes).float().mean() < 0.001  # a scale's last bit may move a weight that lies on a boundary


def test_codes_are_computed_against_the_scale_as_stored():
    weight = weight_of(2)
    quantized = quantize_rtn(weight, Scheme(8))
    assert quantized.scale.dtype is torch.bfloat16
    nearest = (weight.float() / quantized.scale.float()).round().clamp(-128, 127)
    assert torch.equal(quantized.codes.float(), nearest)


def test_zeros_stay_zeros_and_no_scale_is_zero():
    weight = weight_of(3)
    weight[5] = 0
    for scheme in SCHEMES:
        quantized = quantize_rtn(weight, scheme)
        assert (quantized.scale > 0).all()
        assert (dequantize(quantized)[5] == 0).all()


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-30, 1e30), st.sampled_from(SCHEMES))
def test_any_magnitude_gives_finite_scales(magnitude, scheme):
    quantized = quantize_rtn((weight_of(4, torch.float32) * magnitude).to(torch.bfloat16), scheme)
    assert torch.isfinite(quantized.scale).all()
    assert torch.isfinite(dequantize(quantized)).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((9,), "bits"),
        ((1,), "bits"),
        ((4, 0), "group_size"),
        ((4, -2), "group_size"),
        ((8, -1, True, "int4"), "activations"),
    ],
)
def test_impossible_schemes_name_their_field(arguments, named):
    with pytest.raises(QuantizeError, match=named):
        Scheme(*arguments)


def test_a_group_that_does_not_divide_is_an_error():
    with pytest.raises(QuantizeError, match="48 does not divide 64"):
        quantize_rtn(weight_of(0), Scheme(4, 48))
