"""Mixtures of experts: split exactly, quantized expert by expert, loaded by transformers, by us and by the engine."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eval.engine import Engine, SamplingParams
from quantize import Recipe, load_model, quantize_checkpoint
from quantize.as_stored import shape_as_stored
from quantize.errors import QuantizeError
from quantize.experts import SplitExperts

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
PROJECTIONS = {"mixtral": ("w1", "w3", "w2"), "qwen2_moe": ("gate_proj", "up_proj", "down_proj")}


def save_mixture(folder: Path, family: str, dtype=torch.float32, **sizes) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | sizes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(spelling_llama):
    return AutoTokenizer.from_pretrained(spelling_llama)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory, tokenizer) -> Path:
    folder = save_mixture(tmp_path_factory.mktemp("moe") / "mixtral", "mixtral")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def quantized(mixtral, spelled_text, tmp_path):
    """`quantized(**recipe)`: the manifest and the folder."""

    def run(method: str, samples: int = 12, **fields):
        recipe = Recipe.from_mapping({"method": method, "samples": samples, "sequence_length": 48, **fields})
        return quantize_checkpoint(mixtral, recipe, tmp_path / "out", calibration=spelled_text), tmp_path / "out"

    return run


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "hunyuan_v1_moe"])
def test_split_experts_compute_what_the_fused_ones_do(tmp_path, family):
    folder = save_mixture(tmp_path / family, family)
    fused = AutoModelForCausalLM.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    split = AutoModelForCausalLM.from_pretrained(folder)
    shape_as_stored(split, stored)
    split.load_state_dict(stored, strict=False)
    assert {name for name, _ in split.named_parameters()} == set(stored)
    assert sum(isinstance(module, SplitExperts) for module in split.modules()) == 2
    ids = torch.arange(1, 60).reshape(1, -1)
    torch.testing.assert_close(logits(split, ids), logits(fused, ids), rtol=1e-6, atol=1e-6)


def test_every_expert_is_a_target_under_its_stored_name_and_no_gate_is(tmp_path):
    folder = save_mixture(tmp_path / "qwen", "qwen2_moe", mlp_only_layers=[0])
    manifest = quantize_checkpoint(folder, Recipe("int8"), tmp_path / "out")
    names = {record.name for record in manifest.modules}
    block = "model.layers.1.mlp"
    experts = {f"{block}.experts.{index}.{name}" for index in range(4) for name in PROJECTIONS["qwen2_moe"]}
    assert experts <= names
    assert f"{block}.shared_expert.up_proj" in names
    assert "model.layers.0.mlp.up_proj" in names
    assert not [name for name in names if name.endswith("gate")]
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"{block}.gate", f"{block}.shared_expert_gate"} <= set(ignored)
    stored = load_file(tmp_path / "out" / "model-00002-of-00003.safetensors")
    assert torch.equal(stored[f"{block}.gate.weight"], load_file(folder / "model.safetensors")[f"{block}.gate.weight"])


@pytest.mark.parametrize("method", ["int4", "awq", "gptq", "awq+gptq", "smoothquant"])
def test_transformers_ourselves_and_the_engine_agree_on_a_quantized_mixture(quantized, method):
    manifest, out = quantized(method, group_size=32 if method != "smoothquant" else None)
    assert len(manifest.modules) == 2 * (4 + 3 * 4)
    ids = torch.arange(1, 40).reshape(1, -1)
    ours = load_model(out)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    difference = (logits(ours, ids) - logits(theirs, ids)).norm() / logits(theirs, ids).norm()
    assert difference < (0.02 if method == "smoothquant" else 1e-6)
    prompt = list(range(5, 25))
    greedy = list(prompt)
    for _ in range(8):
        greedy.append(int(logits(ours, torch.tensor([greedy]))[0, -1].argmax()))
    engine = Engine.from_checkpoint(out, num_blocks=40)
    completion = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    assert completion.token_ids == greedy[20:]


def test_bf16_mixtures_load_too(tmp_path, tokenizer, spelled_text):
    folder = save_mixture(tmp_path / "moe", "qwen3_moe", torch.bfloat16)
    tokenizer.save_pretrained(folder)
    recipe = Recipe("gptq", group_size=32, samples=12, sequence_length=48)
    quantize_checkpoint(folder, recipe, tmp_path / "out", calibration=spelled_text)
    ids = torch.arange(1, 40).reshape(1, -1)
    ours, theirs = load_model(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (logits(ours, ids) - logits(theirs, ids)).norm() < 0.05 * logits(theirs, ids).norm()


def test_awq_scales_within_every_expert(quantized, mixtral):
    """The scale between an expert's up and down projections: proved on one expert, used in all."""
    _, out = quantized("awq", group_size=32, samples=40)
    ids = torch.arange(1, 40).reshape(1, -1)
    original = load_model(mixtral)
    scaled = load_model(out)
    for index in range(4):
        name = f"model.layers.0.block_sparse_moe.experts.{index}.w3"
        before = original.get_submodule("model.layers.0.mlp.experts").gate_up_proj[index, 64:].detach()
        after = scaled.get_submodule(name)(torch.eye(32)).T
        row_ratio = (after.norm(dim=1) / before.norm(dim=1)).log2()
        assert row_ratio.abs().max() > 0.2, f"{name} took no scale"
    assert torch.isfinite(logits(scaled, ids)).all()


def test_an_expert_that_few_tokens_reach_is_named_and_rounded_to_nearest(quantized):
    manifest, _ = quantized("gptq", samples=1, group_size=32)
    fallen = {record.name: record for record in manifest.modules if record.fallback}
    assert fallen
    assert all(record.tokens < 64 for record in fallen.values())
    assert {f"round to nearest: too few calibration tokens, {record.tokens}" for record in fallen.values()
            if record.tokens} <= {record.fallback for record in fallen.values()}  # fmt: skip
    note = next(note for note in manifest.notes if "too few calibration tokens" in note)
    assert "model.layers.0.block_sparse_moe.experts." in note
    attention = next(record for record in manifest.modules if record.name.endswith("q_proj"))
    assert (attention.tokens, attention.fallback) == (48, None)


def test_patterns_reach_single_experts_and_what_that_costs_is_said(quantized):
    manifest, out = quantized(
        "int4", group_size=32, overrides={"*experts.3.w2": {"bits": 8}, "*.1.*experts.0.*": {"skip": True}}
    )
    bits = {record.name: record.bits for record in manifest.modules}
    block = "model.layers.{}.block_sparse_moe.experts.{}"
    assert bits[block.format(0, 3) + ".w2"] == bits[block.format(1, 3) + ".w2"] == 8
    assert block.format(0, 0) + ".w1" in bits
    assert block.format(1, 0) + ".w1" not in bits
    assert "transformers 5.17 does not load that" in " ".join(manifest.notes)
    assert torch.isfinite(logits(load_model(out), torch.arange(1, 40).reshape(1, -1))).all()


def test_experts_with_zero_points_are_refused(quantized, tmp_path):
    with pytest.raises(
        QuantizeError, match=r"symmetric: model\.layers\.0\.block_sparse_moe\.experts\.0\.w1: transformers"
    ):
        quantized("int4", symmetric=False)
    assert not (tmp_path / "out").exists()


def test_experts_may_stay_symmetric_beside_asymmetric_attention(quantized):
    manifest, out = quantized("int4", symmetric=False, group_size=32, overrides={"*experts*": {"symmetric": True}})
    assert {record.symmetric for record in manifest.modules if "experts" in record.name} == {True}
    ids = torch.arange(1, 40).reshape(1, -1)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(load_model(out), ids), logits(theirs, ids), rtol=1e-5, atol=1e-5)


def test_awq_s_own_format_takes_experts_with_zero_points(quantized, mixtral):
    """Only compressed-tensors is loaded expert by expert without them."""
    manifest, out = quantized("awq", group_size=32, symmetric=False, format="awq")
    assert len(manifest.modules) == 2 * (4 + 3 * 4)
    ids = torch.arange(1, 40).reshape(1, -1)
    original = logits(load_model(mixtral), ids)
    assert (logits(load_model(out), ids) - original).norm() < 0.6 * original.norm()
