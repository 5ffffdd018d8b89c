"""bitsandbytes' own methods come out as the library saves them, counted and measured like ours."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quantize import Manifest, Recipe, load_model, quantize_checkpoint
from quantize.errors import QuantizeError

IDS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))
installed = importlib.util.find_spec("bitsandbytes") is not None
with_library = pytest.mark.skipif(not installed, reason="bitsandbytes is not installed (pip install quantgate[bnb])")


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits.float()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("bnb") / "source"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@with_library
@pytest.mark.parametrize(("method", "bits", "error"), [("bnb-int8", 8, 1e-3), ("bnb-nf4", 4, 2e-2)])
def test_the_result_loads_and_stays_close(source, tmp_path, method, bits, error):
    manifest = quantize_checkpoint(source, Recipe(method), tmp_path / "out")
    assert manifest.coverage == {"expected": 14, "packed": 14}
    assert all(0 < module.relative_error < error for module in manifest.modules)
    assert bits < manifest.bits_per_weight < bits + 3
    assert manifest.versions["bitsandbytes"]
    assert Manifest.read(tmp_path / "out") == manifest
    original = logits(load_model(source))
    ours = logits(load_model(tmp_path / "out"))
    assert (ours - original).pow(2).mean() < 0.3 * original.pow(2).mean()
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map={"": "cpu"}).eval())
    assert torch.allclose(ours, theirs)
    assert quantize_checkpoint(source, Recipe(method), tmp_path / "out") == manifest


@with_library
def test_what_is_saved_is_what_was_measured(source, tmp_path):
    """A forward before the save would spoil NF4's scales; the loaded weights are within the recorded error."""
    import bitsandbytes as bnb

    manifest = quantize_checkpoint(source, Recipe("bnb-nf4"), tmp_path / "out")
    exact = load_model(source, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map={"": "cpu"})
    for module in manifest.modules:
        weight = model.get_submodule(module.name).weight
        floats = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()
        original = exact.get_submodule(module.name).weight
        assert (floats - original).pow(2).sum() / original.pow(2).sum() == pytest.approx(
            module.relative_error, rel=1e-3
        )


@with_library
def test_ignored_modules_keep_their_weights(source, tmp_path):
    recipe = Recipe("bnb-nf4", ignore=("lm_head", "*down_proj"))
    manifest = quantize_checkpoint(source, recipe, tmp_path / "out")
    assert manifest.coverage == {"expected": 12, "packed": 12}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map={"": "cpu"})
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear


@pytest.mark.skipif(installed, reason="bitsandbytes is installed")
def test_without_the_library_the_command_that_installs_it_is_said(source, tmp_path):
    with pytest.raises(
        QuantizeError, match=r"bnb-nf4: bitsandbytes is not installed; run: pip install 'quantgate\[bnb\]'"
    ):
        quantize_checkpoint(source, Recipe("bnb-nf4"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "field", [{"group_size": 64}, {"symmetric": False}, {"format": "gptq"}, {"activations": "int8"}]
)
def test_settings_that_the_library_does_not_take_are_refused(field):
    with pytest.raises(QuantizeError, match=f"recipe: {next(iter(field))}"):
        Recipe("bnb-int8", **field)
