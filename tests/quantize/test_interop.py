"""transformers loads our checkpoints without this package and computes what we compute, and we load the library's."""

import json
import subprocess
import sys

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM

from quantize.formats.compressed_tensors import quantization_config
from quantize.load import load_model, numerics
from quantize.scheme import Scheme

SCHEMES = {
    "int8": Scheme(8),
    "int8-w8a8": Scheme(8, activations="int8"),
    "int4-sym-g32": Scheme(4, 32),
    "int4-sym-g64": Scheme(4, 64),
    "int4-asym-g32": Scheme(4, 32, False),
    "int4-asym-g64": Scheme(4, 64, False),
    "int4-channel": Scheme(4),
    "int3-asym-g32": Scheme(3, 32, False),
    "mixed": {"mlp": Scheme(4, 32, False), "self_attn": Scheme(8)},
    "partly": {"layers.1": Scheme(4, 32)},
}
IDS = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(0))

WITHOUT_US = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
ids = torch.load(sys.argv[3])
with torch.inference_mode():
    torch.save(model(ids).logits, sys.argv[4])
assert not any(name.split(".")[0] == "quantize" for name in sys.modules)
"""


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits.float()


def assert_equal_logits(ours: torch.Tensor, expected: torch.Tensor, activations_are_rounded: bool) -> None:
    """Weights are the same floats, so only the order of additions differs. Where activations are rounded such a
    difference pushes some of them over a tie, each by one step of 127, and later tokens attend to it."""
    worst = (ours - expected).abs().max() / expected.abs().max()
    assert worst <= (0.03 if activations_are_rounded else 1e-5)


def theirs(folder, dtype) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())


@pytest.mark.parametrize("name", SCHEMES)
def test_float32_logits_are_transformers_own(rounded, name):
    folder = rounded(SCHEMES[name])
    ours = logits(load_model(folder, dtype=torch.float32))
    assert_equal_logits(ours, theirs(folder, torch.float32), name == "int8-w8a8")


@pytest.mark.parametrize("name", SCHEMES)
def test_bf16_logits_agree_within_bf16_s_own_rounding(rounded, name):
    folder = rounded(SCHEMES[name])
    exact = theirs(folder, torch.float32)
    their_error = (theirs(folder, torch.bfloat16) - exact).pow(2).mean().sqrt()
    our_error = (logits(load_model(folder, dtype=torch.bfloat16)) - exact).pow(2).mean().sqrt()
    # Both stand as far from the float32 logits as bf16 brings them; ours must not stand farther.
    assert our_error <= 1.25 * their_error
    assert their_error <= 0.02 * exact.pow(2).mean().sqrt() * (5 if name == "int8-w8a8" else 1)


def test_each_w8a8_linear_computes_what_the_library_s_does(rounded):
    folder = rounded(SCHEMES["int8-w8a8"])
    ours = load_model(folder, dtype=torch.float32)
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen = {}

    def record(module, inputs, output):
        seen[module] = (inputs[0].clone(), output.clone())

    names = {module: name for name, module in library.named_modules() if name.endswith("_proj")}
    for module in names:
        module.register_forward_hook(record)
    logits(library)
    assert len(seen) == 14
    for module, (x, expected) in seen.items():
        with torch.inference_mode():
            difference = (ours.get_submodule(names[module])(x) - expected).abs().max()
        assert difference <= 2e-6 * expected.abs().max(), names[module]


def test_transformers_needs_nothing_of_ours(rounded, tmp_path):
    folder = rounded(SCHEMES["mixed"])
    torch.save(IDS, tmp_path / "ids.pt")
    arguments = [str(folder), "float32", str(tmp_path / "ids.pt"), str(tmp_path / "logits.pt")]
    subprocess.run([sys.executable, "-c", WITHOUT_US, *arguments], check=True, cwd=tmp_path, capture_output=True)
    alone = torch.load(tmp_path / "logits.pt")
    assert torch.allclose(alone, logits(load_model(folder, dtype=torch.float32)), atol=1e-4)


@pytest.mark.parametrize("name", ["int8-w8a8", "int4-asym-g32", "int4-sym-g64", "mixed"])
def test_we_load_what_the_library_writes(tiny_llama, tmp_path, name):
    """The library quantizes, compresses and saves; llm-compressor does the same steps."""
    schemes = SCHEMES[name]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    linears = [module for module, _ in model.named_modules() if module.endswith("_proj")]
    chosen = schemes if isinstance(schemes, dict) else {"": schemes}
    by_module = {module: next(scheme for part, scheme in chosen.items() if part in module) for module in linears}
    config = quantization_config(by_module, ["lm_head"]) | {"quantization_status": "frozen"}
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    for module in linears:
        linear = model.get_submodule(module)
        args = linear.quantization_scheme.weights
        groups = linear.weight.detach().unflatten(1, (linear.weight_scale.shape[1], -1))
        scale, zero_point = calculate_qparams(groups.amin(2), groups.amax(2), args)
        linear.weight_scale.data.copy_(scale)
        linear.weight_zero_point.data.copy_(zero_point)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "theirs")
    compressor.update_config(str(tmp_path / "theirs"))
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]

    ours = load_model(tmp_path / "theirs", dtype=torch.float32)
    expected = theirs(tmp_path / "theirs", torch.float32)
    assert set(numerics(ours)["kernels"].values()) <= {
        "dequantize",
        "torch-linear",
        "torch-int8-dynamic",
        "exact-float-int8-dynamic",
        "native-int8-dynamic",
    }
    assert sum(kernel != "torch-linear" for kernel in numerics(ours)["kernels"].values()) == len(linears)
    assert_equal_logits(logits(ours), expected, name == "int8-w8a8")
