"""GPTQ checkpoints: bit for bit what the format says, read back whole in both versions, and never misread."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.errors import QuantizeError
from quantize.formats.gptq import Settings, misfit, pack_weight, quantization_config, read_settings, unpack_weight
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme, dequantize


def words(elements: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned elements [count, columns], written one after another as one long bit string per column."""
    out = np.zeros((elements.shape[0] * bits // 32, elements.shape[1]), dtype=np.int64)
    for column in range(elements.shape[1]):
        string = 0
        for index, element in enumerate(elements[:, column]):
            string |= int(element) << (index * bits)
        for row in range(out.shape[0]):
            out[row, column] = (string >> (32 * row)) & 0xFFFFFFFF
    return out.astype(np.uint32).view(np.int32)


def random_weight(bits: int, outputs: int, inputs: int, group_size: int, symmetric: bool, seed: int = 0):
    random = torch.Generator().manual_seed(seed)
    scheme = Scheme(bits, group_size, symmetric)
    groups = inputs // scheme.group_width(inputs)
    low, high = scheme.lowest, scheme.highest + 1
    codes = torch.randint(low, high, (outputs, inputs), generator=random, dtype=torch.int8)
    scale = (torch.rand(outputs, groups, generator=random) * 0.1 + 0.001).to(torch.bfloat16)
    zero_point = None if symmetric else torch.randint(low, high, (outputs, groups), generator=random, dtype=torch.int8)
    return QuantizedWeight(codes, scale, zero_point, scheme)


def stored_plainly(weight: QuantizedWeight, version: int) -> dict[str, torch.Tensor]:
    """The tensors by their definition, element by element."""
    bits, offset = weight.scheme.bits, 1 << (weight.scheme.bits - 1)
    codes = weight.codes.numpy().astype(np.int64) + offset
    zero = np.zeros(weight.scale.shape, dtype=np.int64) if weight.zero_point is None else weight.zero_point.numpy()
    zero = zero.astype(np.int64) + offset - (version == 1)
    return {
        "qweight": torch.from_numpy(words(codes.T, bits)),
        "qzeros": torch.from_numpy(words(zero, bits).T.copy()),
        "scales": weight.scale.T.contiguous().to(torch.float16),
        "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // weight.scheme.group_width(codes.shape[1]),
    }


def without_module(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("m."): tensor for name, tensor in tensors.items()}


def assert_same(read: QuantizedWeight, weight: QuantizedWeight) -> None:
    assert torch.equal(read.codes, weight.codes)
    assert torch.equal(read.scale.double(), weight.scale.double())
    if weight.zero_point is None:
        assert read.zero_point is None
    else:
        assert torch.equal(read.zero_point, weight.zero_point)
    assert read.scheme.symmetric == weight.scheme.symmetric


@given(
    bits=st.sampled_from((3, 4, 8)),
    outputs=st.sampled_from((32, 96)),
    groups=st.integers(1, 3),
    group_size=st.sampled_from((32, 64, PER_CHANNEL)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_written_is_the_definition_bit_for_bit_and_comes_back(bits, outputs, groups, group_size, seed):
    inputs = groups * (64 if group_size == PER_CHANNEL else group_size)
    weight = random_weight(bits, outputs, inputs, group_size, True, seed)
    written = without_module(pack_weight("m", weight))
    expected = stored_plainly(weight, version=1)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name
    read, order = unpack_weight(written, weight.scheme)
    assert order is None
    assert_same(read, weight)
    assert torch.equal(dequantize(read, torch.float32), dequantize(weight, torch.float32))


def test_the_worked_values_hold():
    four = QuantizedWeight(torch.arange(-8, 0, dtype=torch.int8).repeat(8, 1), torch.ones(8, 1), None, Scheme(4))
    tensors = without_module(pack_weight("m", four))
    assert tensors["qweight"][0].tolist() == [0x76543210] * 8
    assert tensors["qzeros"].tolist() == [[0x77777777]]
    three = random_weight(3, 32, 32, PER_CHANNEL, True)
    first = without_module(pack_weight("m", three))["qzeros"].numpy().view(np.uint32)
    assert first.tolist() == [[0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]]
    second = stored_plainly(three, version=2)["qzeros"].numpy().view(np.uint32)
    assert second.tolist() == [[0x24924924, 0x49249249, 0x92492492]]


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("label", [1, 2])
@pytest.mark.parametrize("version", [1, 2])
def test_a_symmetric_checkpoint_is_read_right_whatever_its_label(bits, version, label):
    weight = random_weight(bits, 32, 64, 32, True)
    read, _ = unpack_weight(stored_plainly(weight, version), weight.scheme, label)
    assert_same(read, weight)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_are_read_in_both_versions(bits, version):
    weight = random_weight(bits, 32, 64, 32, False)
    lowest = weight.scheme.lowest
    if version == 1:
        weight.zero_point[weight.zero_point == lowest] = 0
    read, _ = unpack_weight(stored_plainly(weight, version), weight.scheme, version)
    assert_same(read, weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptqmodel_s_borrowed_zero_points_are_read_and_others_refused(bits):
    """GPTQModel subtracts one from each field in a single subtraction of the word."""
    weight = random_weight(bits, 32, 64, 32, False)
    weight.zero_point[3, 1] = weight.scheme.lowest
    stored = stored_plainly(weight, version=2)
    stored["qzeros"] -= sum(1 << shift for shift in range(0, 32, bits))
    read, _ = unpack_weight(stored, weight.scheme, version=1, borrows=True)
    assert_same(read, weight)
    with pytest.raises(QuantizeError, match="no room"):
        unpack_weight(stored, weight.scheme, version=1)


def test_act_order_puts_the_columns_of_a_group_together():
    weight = random_weight(4, 32, 128, 32, True)
    g_idx = torch.arange(4).repeat_interleave(32)[torch.randperm(128, generator=torch.Generator().manual_seed(3))]
    stored = stored_plainly(weight, version=1) | {"g_idx": g_idx.to(torch.int32)}
    read, order = unpack_weight(stored, weight.scheme)
    expected = weight.codes.float() * weight.scale.float()[:, g_idx]
    assert torch.equal(dequantize(read, torch.float32), expected[:, order])


def test_a_g_idx_that_is_no_act_order_is_refused():
    weight = random_weight(4, 32, 64, 32, True)
    uneven = torch.cat([torch.zeros(33), torch.ones(31)]).to(torch.int32)
    with pytest.raises(QuantizeError, match="g_idx does not give each of 2 groups 32 inputs"):
        unpack_weight(stored_plainly(weight, 1) | {"g_idx": uneven}, weight.scheme)


@pytest.mark.parametrize(
    ("scheme", "shape", "words_of_it"),
    [
        (Scheme(4, 32, False), (32, 64), "symmetric only"),
        (Scheme(8, activations="int8"), (32, 64), "activations"),
        (Scheme(5, 32), (32, 64), "3, 4, 8 bits, not 5"),
        (Scheme(4, 32), (12, 64), "12 outputs do not fill"),
        (Scheme(3, PER_CHANNEL), (32, 40), "40 inputs do not fill"),
    ],
)
def test_what_gptq_cannot_hold_is_said(scheme, shape, words_of_it):
    assert words_of_it in misfit(scheme, *shape)


def test_a_scale_that_fp16_does_not_hold_is_named():
    weight = random_weight(4, 32, 64, 32, True)
    weight.scale[5, 1] = 1e-7
    with pytest.raises(QuantizeError, match=r"m: the scale of output 5, group 1 is 1\.0\d+e-07.*1 of 64"):
        pack_weight("m", weight)


def test_two_schemes_do_not_go_into_one_config():
    with pytest.raises(QuantizeError, match=r"a is 4 bits groups of 32 and b 8 bits per channel"):
        quantization_config({"a": Scheme(4, 32), "b": Scheme(8)}, [])


def test_modules_left_alone_are_named_for_each_loader():
    chosen = {"model.layers.0.q": Scheme(4, 32), "model.layers.0.k": Scheme(4, 32)}
    config = quantization_config(chosen, ["lm_head", "model.layers.0.v"])
    assert config["modules_in_block_to_quantize"] == [["model.layers.0.k", "model.layers.0.q"]]
    assert config["dynamic"] == {r"-:^model\.layers\.0\.v$": {}}
    assert "dynamic" not in quantization_config(chosen, ["lm_head"])


def test_settings_of_others_are_read():
    config = {"bits": 4, "group_size": 128, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"}
    assert read_settings(config) == Settings(4, 128, False, 2, {}, False)
    read = read_settings({"bits": 4, "meta": {"quantizer": ["gptqmodel:7.6.0"]}, "dynamic": {r".*v$": {"bits": 8}}})
    assert read.borrows
    assert read.scheme_of("model.v") == Scheme(8, 128)
    assert read.scheme_of("model.k") == Scheme(4, 128)
    assert read_settings({"bits": 4, "checkpoint_format": "marlin"}) is None
    with pytest.raises(QuantizeError, match="bits None"):
        read_settings({"group_size": 64})
