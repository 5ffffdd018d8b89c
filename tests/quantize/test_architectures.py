"""Every method on every kind of decoder: found by structure, quantized, loaded by transformers and by us alike."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from quantize import Manifest, Recipe, load_model, quantize_checkpoint
from quantize.checkpoint import Checkpoint
from quantize.errors import QuantizeError
from quantize.method import METHODS
from quantize.sensitivity import measure_sensitivity

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "gemma2": SLIDING | {"query_pre_attn_scalar": 16},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost more than they save on matrices of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def originals(spelling_llama, tmp_path_factory) -> dict[str, Path]:
    """A random float32 checkpoint of each architecture, with a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(spelling_llama)
    folder = tmp_path_factory.mktemp("originals")
    for family, details in ARCHITECTURES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(SIZES | details))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    return {family: folder / family for family in ARCHITECTURES}


def logits(model) -> torch.Tensor:
    ids = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_method_quantizes_it_and_both_load_the_result(originals, spelled_text, tmp_path, family, method):
    source, out = originals[family], tmp_path / "out"
    manifest = quantize_checkpoint(source, Recipe(method, samples=6, sequence_length=32), out, calibration=spelled_text)
    assert Manifest.read(out) == manifest
    assert manifest.coverage["packed"] == manifest.coverage["expected"] == expected_linears(source)
    ours, theirs = logits(load_model(out)), logits(AutoModelForCausalLM.from_pretrained(out))
    rounded_activations = METHODS[method].activations is not None
    # Where activations are rounded too, the last bit of a sum decides on which side of a step a value falls.
    assert (ours - theirs).norm() <= (0.05 if rounded_activations else 1e-5) * theirs.norm()
    original = logits(load_model(source))
    assert (ours - original).norm() < {8: 0.2, 4: 0.75, 3: 1.1}[manifest.modules[0].bits] * original.norm()


def expected_linears(source: Path) -> int:
    """All matrices of the layers on disk, but for gates."""
    checkpoint = Checkpoint.open(source)
    return sum(
        ".layers." in name and len(checkpoint.shape(name)) == 2 and not name.endswith("gate.weight")
        for name in checkpoint.tensor_names
    )


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("mamba", {"state_size": 8}, "mixer.conv1d is a convolution over tokens"),
        ("jamba", {"mamba_d_state": 8, "mamba_expand": 1, "num_experts": 1}, "mamba.conv1d is a convolution"),
        ("bart", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}, "bart is an encoder with a decoder"),
        ("t5", {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}, "t5 is an encoder"),
        ("gpt2", {}, "attn.c_attn is a Conv1D"),
    ],
)
def test_what_is_no_such_decoder_is_refused_with_the_reason(tmp_path, family, sizes, reason):
    config = AutoConfig.for_model(family, **(SIZES | sizes))
    AutoModel.from_config(config).save_pretrained(tmp_path / family)
    with pytest.raises(QuantizeError, match=reason) as caught:
        quantize_checkpoint(tmp_path / family, Recipe("int8"), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_scales_are_not_moved_where_layers_share_keys_and_values(tmp_path):
    """A scale taken out of one layer's values would reach every layer that reads them."""
    layers = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "global_head_dim": 16}
    inputs = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96}
    config = AutoConfig.for_model("gemma4_text", **(SIZES | layers | inputs))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(QuantizeError, match="its layers share keys and values, so awq cannot judge a layer"):
        quantize_checkpoint(tmp_path / "model", Recipe("awq"), tmp_path / "out")
    with pytest.raises(QuantizeError, match="so sensitivity cannot judge a layer"):
        measure_sensitivity(tmp_path / "model", Recipe("int4"))
