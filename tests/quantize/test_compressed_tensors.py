"""Our compressed-tensors files are the library's own, bit for bit."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.errors import QuantizeError
from quantize.formats.compressed_tensors import (
    pack_codes,
    pack_weight,
    quantization_config,
    schemes_of,
    stored_names,
    unpack_codes,
    unpack_weight,
)
from quantize.scheme import Scheme, dequantize, quantize_rtn

SCHEMES = [
    Scheme(8),
    Scheme(8, activations="int8"),
    Scheme(8, 32, symmetric=False),
    Scheme(4, 32),
    Scheme(4, 64, symmetric=False),
    Scheme(4, -1),
    Scheme(3, 32, symmetric=False),
    Scheme(5, 32),
    Scheme(2, 32, symmetric=False),
]


def library_scheme(scheme: Scheme) -> QuantizationScheme:
    settings = quantization_config({"layer": scheme}, [])
    return next(iter(QuantizationConfig.model_validate(settings).config_groups.values()))


def test_the_worked_values_of_the_docstring():
    assert pack_codes(torch.arange(-8, 0, dtype=torch.int8)[None], 4).tolist() == [[0x76543210]]
    codes = torch.tensor([[-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2]], dtype=torch.int8)
    assert (pack_codes(codes, 3) & 0xFFFFFFFF).tolist() == [[0x88FAC688 - 2**32, 0]]


@settings(deadline=None, max_examples=60)
@given(bits=st.integers(2, 8), rows=st.integers(1, 5), columns=st.integers(1, 100), seed=st.integers(0, 2**31))
def test_packing_is_the_library_s_and_reverses(bits, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)
    words = pack_codes(codes, bits)
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(unpack_codes(words, bits, columns), codes)
    assert torch.equal(unpack_from_int32(words, bits, codes.shape), codes)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("outputs", [48, 37], ids=["N48", "odd-N37"])
def test_a_packed_weight_is_what_the_library_s_compressor_makes(scheme, outputs):
    torch.manual_seed(0)
    weight = quantize_rtn(torch.randn(outputs, 192), scheme, torch.float32)
    stored = pack_weight("layer", weight)
    args = library_scheme(scheme)
    compressor = BaseCompressor.get_value_from_registry(args.format)
    zero_point = weight.zero_point if weight.zero_point is not None else torch.zeros_like(weight.scale).to(torch.int8)
    theirs = compressor.compress(
        {"weight": dequantize(weight), "weight_scale": weight.scale, "weight_zero_point": zero_point}, args
    )
    assert {f"layer.{name}" for name in theirs} == set(stored)
    assert {f"layer.{name}" for name in stored_names(scheme, args.format)} == set(stored)
    for name, tensor in theirs.items():
        ours = stored[f"layer.{name}"]
        assert ours.dtype == tensor.dtype, name
        assert ours.is_contiguous(), name
        assert torch.equal(ours, tensor), name


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unpacking_gives_back_every_code(scheme, dtype):
    torch.manual_seed(1)
    weight = quantize_rtn(torch.randn(37, 128), scheme, dtype)
    stored = {name.removeprefix("layer."): tensor for name, tensor in pack_weight("layer", weight).items()}
    back = unpack_weight(stored, scheme)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale, weight.scale)
    assert (back.zero_point is None) == scheme.symmetric
    if not scheme.symmetric:
        assert torch.equal(back.zero_point, weight.zero_point)


def test_a_scale_that_does_not_fit_is_named():
    stored = pack_weight("layer", quantize_rtn(torch.randn(8, 64), Scheme(4, 32)))
    tensors = {name.removeprefix("layer."): tensor for name, tensor in stored.items()}
    with pytest.raises(QuantizeError, match="weight_scale"):
        unpack_weight(tensors, Scheme(4, 16))


def test_one_scheme_targets_linear_and_several_name_their_modules():
    uniform = quantization_config({"a": Scheme(4, 64), "b": Scheme(4, 64)}, ["lm_head"])
    assert [group["targets"] for group in uniform["config_groups"].values()] == [["Linear"]]
    assert uniform["ignore"] == ["lm_head"]
    assert uniform["format"] == "pack-quantized"
    mixed = quantization_config(
        {"a": Scheme(4, 64), "b": Scheme(8, activations="int8"), "c": Scheme(4, 64)}, ["lm_head"]
    )
    assert [group["targets"] for group in mixed["config_groups"].values()] == [["a", "c"], ["b"]]
    assert mixed["format"] == "mixed-precision"
    assert {group["format"] for group in mixed["config_groups"].values()} == {"pack-quantized", "int-quantized"}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_config_is_valid_for_the_library_and_read_back(scheme):
    modules = {"model.layers.0.q_proj": scheme, "model.layers.0.k_proj": Scheme(6, 32)}
    for schemes in ({"model.layers.0.q_proj": scheme}, modules):
        written = quantization_config(schemes, ["lm_head"])
        parsed = QuantizationConfig.model_validate(written)
        assert parsed.quantization_status.value == "compressed"
        assert schemes_of(written, [*schemes, "lm_head"]) == schemes
        # and what the library writes for the same thing
        assert schemes_of(parsed.model_dump(mode="json"), [*schemes, "lm_head"]) == schemes


def test_nothing_quantized_is_an_error():
    with pytest.raises(QuantizeError, match="nothing is quantized"):
        quantization_config({}, ["lm_head"])


def test_patterns_and_precedence_are_the_library_s():
    group = quantization_config({"x": Scheme(4, 32)}, [])["config_groups"]["group_0"]
    eight = quantization_config({"x": Scheme(8)}, [])["config_groups"]["group_0"]
    settings = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "mixed-precision",
        "config_groups": {
            "a": {**group, "targets": ["Linear"]},
            "b": {**eight, "targets": ["re:.*down_proj$"]},
        },
        "ignore": ["re:.*lm_head"],
    }
    chosen = schemes_of(settings, ["l.0.up_proj", "l.0.down_proj", "lm_head"])
    assert chosen == {"l.0.up_proj": Scheme(4, 32), "l.0.down_proj": Scheme(8)}


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}},
        {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}},
        {"input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False}},
        {"format": "nvfp4-pack-quantized"},
    ],
    ids=["fp8", "block", "static", "nvfp4"],
)
def test_what_we_do_not_run_is_left_to_transformers(change):
    settings = quantization_config({"x": Scheme(8, activations="int8")}, [])
    settings["config_groups"]["group_0"].update(change)
    assert schemes_of(settings, ["x"]) is None
