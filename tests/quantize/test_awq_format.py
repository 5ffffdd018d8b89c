"""AWQ GEMM checkpoints: bit for bit what the format says, and read back whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.errors import QuantizeError
from quantize.formats.awq_gemm import misfit, pack_weight, quantization_config, read_scheme, unpack_weight
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme, dequantize

NIBBLE_OF_COLUMN = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}


def words(elements: np.ndarray) -> np.ndarray:
    """Unsigned elements [rows, N] as AutoAWQ's words [rows, N / 8], one at a time."""
    out = np.zeros((elements.shape[0], elements.shape[1] // 8), dtype=np.int64)
    for row in range(elements.shape[0]):
        for column in range(elements.shape[1]):
            out[row, column // 8] |= int(elements[row, column]) << (4 * NIBBLE_OF_COLUMN[column % 8])
    return out.astype(np.uint32).view(np.int32)


def random_weight(outputs: int, inputs: int, group_size: int, symmetric: bool, seed: int = 0) -> QuantizedWeight:
    random = torch.Generator().manual_seed(seed)
    scheme = Scheme(4, group_size, symmetric)
    groups = inputs // scheme.group_width(inputs)
    codes = torch.randint(-8, 8, (outputs, inputs), generator=random, dtype=torch.int8)
    scale = (torch.rand(outputs, groups, generator=random) * 0.1 + 0.001).to(torch.bfloat16)
    zero_point = None if symmetric else torch.randint(-8, 8, (outputs, groups), generator=random, dtype=torch.int8)
    return QuantizedWeight(codes, scale, zero_point, scheme)


def without_module(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("m."): tensor for name, tensor in tensors.items()}


@given(
    outputs=st.sampled_from((8, 24, 64)),
    groups=st.integers(1, 3),
    group_size=st.sampled_from((32, 64, PER_CHANNEL)),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_written_is_the_definition_bit_for_bit_and_comes_back(outputs, groups, group_size, symmetric, seed):
    inputs = groups * (40 if group_size == PER_CHANNEL else group_size)
    weight = random_weight(outputs, inputs, group_size, symmetric, seed)
    written = without_module(pack_weight("m", weight))
    zero = torch.zeros(weight.scale.shape) if symmetric else weight.zero_point
    assert torch.equal(written["qweight"], torch.from_numpy(words(weight.codes.numpy().T.astype(np.int64) + 8)))
    assert torch.equal(written["qzeros"], torch.from_numpy(words(zero.numpy().T.astype(np.int64) + 8)))
    assert torch.equal(written["scales"], weight.scale.T.to(torch.float16))
    read = unpack_weight(written, weight.scheme)
    assert torch.equal(read.codes, weight.codes)
    assert torch.equal(dequantize(read, torch.float32), dequantize(weight, torch.float32))
    assert read.scheme.symmetric == (not zero.any())


def test_the_worked_values_hold():
    codes = torch.arange(-8, 0, dtype=torch.int8).reshape(8, 1)
    tensors = without_module(pack_weight("m", QuantizedWeight(codes, torch.ones(8, 1), None, Scheme(4))))
    assert tensors["qweight"].tolist() == [[0x75316420]]
    assert tensors["qzeros"].numpy().view(np.uint32).tolist() == [[0x88888888]]


@pytest.mark.parametrize(
    ("scheme", "shape", "words_of_it"),
    [
        (Scheme(8), (32, 64), "holds 4 bits, not 8"),
        (Scheme(4, 32), (12, 64), "12 outputs do not fill"),
        (Scheme(4, 48), (16, 64), "does not divide"),
    ],
)
def test_what_awq_cannot_hold_is_said(scheme, shape, words_of_it):
    assert words_of_it in misfit(scheme, *shape)


def test_a_scale_that_fp16_does_not_hold_is_named():
    weight = random_weight(8, 64, 32, False)
    scale = weight.scale.float()
    scale[2, 0] = 0.1
    with pytest.raises(QuantizeError, match=r"m: the scale of output 2, group 0 is 0\.1"):
        pack_weight("m", QuantizedWeight(weight.codes, scale, weight.zero_point, weight.scheme))


def test_the_config_names_what_is_left_alone_and_is_read_back():
    config = quantization_config({"a": Scheme(4, 32), "b": Scheme(4, 32, False)}, ["lm_head"])
    assert config["modules_to_not_convert"] == ["lm_head"]
    assert read_scheme(config) == Scheme(4, 32, False)
    assert read_scheme(config | {"version": "gemv"}) is None


def test_tensors_that_do_not_fit_together_are_refused():
    tensors = without_module(pack_weight("m", random_weight(16, 64, 32, True)))
    with pytest.raises(QuantizeError, match="do not fit groups of 16"):
        unpack_weight(tensors, Scheme(4, 16))
