"""What linears lose alone, against models that are really changed so; and recipes that spend bytes where it hurts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize import QuantizeError, Recipe, load_model, quantize_checkpoint
from quantize.linear import QuantizedLinear
from quantize.mixed_precision import mixed_recipe
from quantize.sensitivity import Sensitivity, measure_sensitivity

FRAGILE = "model.layers.1.mlp.down_proj"
TOKENS = {"samples": 4, "sequence_length": 32}


def copy_with(source: Path, out: Path, change) -> Path:
    """A copy of a checkpoint whose tensors went through `change`."""
    out.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture(scope="module")
def fragile(spelling_llama, tmp_path_factory) -> Path:
    """The same model, with one linear that has a column in every group far larger than the others (and smaller inputs
    for it), so that 4 bits lose the others."""

    def spoil(tensors):
        tensors[f"{FRAGILE}.weight"][:, ::32] *= 16
        tensors["model.layers.1.mlp.up_proj.weight"][::32] /= 16

    return copy_with(spelling_llama, tmp_path_factory.mktemp("fragile") / "llama", spoil)


@pytest.fixture(scope="module")
def measured(fragile) -> Sensitivity:
    return measure_sensitivity(fragile, Recipe("int4"), **TOKENS)


def log_probabilities(checkpoint: Path) -> torch.Tensor:
    """On text of other tokens than those of calibration, float32."""
    torch.manual_seed(7)
    ids = torch.randint(3, 90, (8, 48))
    with torch.inference_mode():
        return load_model(checkpoint, dtype=torch.float32)(ids).logits.log_softmax(-1)


def divergence(original: Path, other: Path) -> float:
    expected, found = log_probabilities(original), log_probabilities(other)
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


def test_the_fragile_linear_its_layer_and_its_kind_come_first(measured):
    assert max(measured.modules, key=lambda module: module.kl).pattern == FRAGILE
    assert max(measured.layers, key=measured.layers.__getitem__) == 1
    assert max(measured.kinds, key=measured.kinds.__getitem__) == "mlp.down_proj"
    assert len(measured.modules) == 21
    assert all(module.kl > 0 for module in measured.modules)


@pytest.mark.parametrize("part", ["model.layers.0.self_attn.q_proj", "model.layers.2.", ".mlp.up_proj"])
def test_a_loss_is_that_of_the_whole_model_with_only_that_part_rounded(fragile, measured, tmp_path, part):
    ids = calibration_ids(fragile)
    rounded = tmp_path / "rounded"
    quantize_checkpoint(fragile, Recipe("int4", group_size=measured.group_size), rounded)
    whole, original = load_model(rounded, dtype=torch.float32), load_model(fragile, dtype=torch.float32)
    with torch.inference_mode():
        expected = original(ids).logits.log_softmax(-1)
        for name, module in whole.named_modules():
            if part in f"{name}." and isinstance(module, QuantizedLinear):
                original.get_submodule(name).weight.copy_(module(torch.eye(module.in_features)).T)
        found = original(ids).logits.log_softmax(-1)
    kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
    told = (
        measured.kinds["mlp.up_proj"]
        if part.startswith(".")
        else measured.layers[2]
        if part.endswith(".")
        else next(module.kl for module in measured.modules if module.pattern == part)
    )
    assert told == pytest.approx(kl, rel=0.02)


def calibration_ids(checkpoint: Path) -> torch.Tensor:
    from transformers import AutoTokenizer

    from quantize.calibration import load_calibration

    return load_calibration(None, AutoTokenizer.from_pretrained(checkpoint), 4, 32).token_ids


def test_linears_that_read_one_input_are_decided_together(measured):
    units = measured.units()
    assert len(units) == 12
    assert sum(unit.parameters for unit in units) == sum(module.parameters for module in measured.modules)
    assert ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
            "model.layers.0.self_attn.v_proj") in [unit.patterns for unit in units]  # fmt: skip


def test_the_experts_of_a_layer_are_decided_together(measured):
    attention = measured.modules[0]
    experts = [
        replace(attention, layer=layer, kind=f"mlp.experts.*.{name}", reads=f"mlp.experts.*.{name}")
        for layer in (0, 1)
        for name in ("gate_proj", "down_proj")
    ]
    units = replace(measured, modules=(attention, *experts)).units()
    assert [len(unit.patterns) for unit in units] == [1, 2, 2]


def test_the_recipe_protects_what_is_fragile_and_beats_a_uniform_one_of_the_same_bytes(fragile, measured, tmp_path):
    uniform = quantize_checkpoint(fragile, Recipe("int4", group_size=16), tmp_path / "uniform")
    mixture = mixed_recipe(Recipe("int4"), measured.units(), uniform.bits_per_weight)
    assert mixture.recipe.override_of(FRAGILE).bits == 8
    mixed = quantize_checkpoint(fragile, mixture.recipe, tmp_path / "mixed")
    assert mixed.bits_per_weight == pytest.approx(mixture.bits_per_weight)
    assert mixed.bytes_after <= uniform.bytes_after
    assert divergence(fragile, tmp_path / "mixed") < 0.7 * divergence(fragile, tmp_path / "uniform")


def test_a_target_loss_is_met_within_the_model_s_reach(fragile, measured, tmp_path):
    everywhere = sum(module.kl for module in measured.modules)
    mixture = mixed_recipe(Recipe("int4"), measured.units(), target_kl=everywhere / 3)
    quantize_checkpoint(fragile, mixture.recipe, tmp_path / "mixed")
    assert mixture.kl <= everywhere / 3
    assert divergence(fragile, tmp_path / "mixed") < 2 * everywhere / 3


def test_measuring_again_gives_the_same(fragile, measured):
    again = measure_sensitivity(fragile, Recipe("int4"), **TOKENS)
    assert (again.modules, again.layers, again.kinds) == (measured.modules, measured.layers, measured.kinds)


def test_an_untied_head_and_a_model_without_one_s_tensor(fragile, tmp_path):
    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * 2

    untied = copy_with(fragile, tmp_path / "untied", untie)
    config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": False}
    (untied / "config.json").write_text(json.dumps(config))
    assert measure_sensitivity(untied, Recipe("int4"), **TOKENS).modules[0].kl > 0
    lacking = copy_with(untied, tmp_path / "lacking", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(QuantizeError, match=r"lm_head"):
        measure_sensitivity(lacking, Recipe("int4"), **TOKENS)


def test_a_quantized_checkpoint_is_refused(fragile, tmp_path):
    quantize_checkpoint(fragile, Recipe("int4", group_size=32), tmp_path / "q")
    with pytest.raises(QuantizeError, match="is quantized already"):
        measure_sensitivity(tmp_path / "q", Recipe("int4"), **TOKENS)


def test_a_recipe_that_leaves_all_layers_alone_is_refused(fragile):
    with pytest.raises(QuantizeError, match="leaves no linear in the layers"):
        measure_sensitivity(fragile, Recipe("int4", ignore=("model.layers.*",)), **TOKENS)
