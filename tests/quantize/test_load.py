"""A checkpoint loads as the model it is, in memory it needs once, or fails with one line that says why."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from quantize import Recipe, quantize_checkpoint
from quantize.errors import QuantizeError
from quantize.formats.compressed_tensors import pack_weight
from quantize.linear import QuantizedLinear
from quantize.load import check_compute, load_model, numerics
from quantize.scheme import Scheme, quantize_rtn

IDS = torch.tensor([[5, 9, 17, 33, 2, 64]])


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_a_plain_checkpoint_is_transformers_own_model(tiny_llama, dtype):
    ours = load_model(tiny_llama, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=dtype or "auto")
    assert ours.dtype == (dtype or torch.bfloat16)
    assert torch.equal(logits(ours), logits(theirs))
    assert not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    for (name, ours_buffer), (_, their_buffer) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(ours_buffer, their_buffer), name
        assert ours_buffer.dtype == their_buffer.dtype, name


def test_the_attention_can_be_set_later(tiny_llama):
    model = load_model(tiny_llama, dtype=torch.float32)
    before = logits(model)
    model.set_attn_implementation("eager")
    assert torch.allclose(logits(model), before, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96, n_positions=32)),
        MixtralForCausalLM(
            MixtralConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                vocab_size=96,
                num_local_experts=2,
            )
        ),
    ],
    ids=["gpt2", "mixtral"],
)
def test_other_architectures_load(model, tmp_path):
    model.eval().save_pretrained(tmp_path / "model")
    assert torch.allclose(logits(load_model(tmp_path / "model")), logits(model), atol=1e-5)


def test_quantized_linears_are_swapped_and_measured(rounded, tiny_llama):
    plain = load_model(tiny_llama)
    model = load_model(rounded({"mlp": Scheme(4, 32, False), "self_attn": Scheme(8)}))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(linears) == 14
    report = numerics(model)
    assert report["compute"] == "a16"
    assert report["dtype"] == "bfloat16"
    assert report["kernels"]["model.layers.0.mlp.up_proj"] in ("native-int4", "torch-int4")
    assert report["kernels"]["model.layers.0.self_attn.q_proj"] in ("native-int8", "torch-int8")
    assert report["kernels"]["lm_head"] == "torch-linear"
    # Two layers: int8 saves a byte per attention weight, int4 one and a half of the two per feed-forward weight. What
    # scales and zero points take depends on the kernel, 3 to 8 bytes per group of 32.
    attention, feed_forward = 2 * (64 * 64 * 2 + 2 * 32 * 64), 2 * (3 * 64 * 128)
    saved = numerics(plain)["weights_bytes"] - report["weights_bytes"]
    scales = attention + feed_forward * 3 // 2 - saved
    groups, channels = feed_forward // 32, 2 * (64 + 32 + 32 + 64)
    assert 3 * groups + 2 * channels <= scales <= 8 * groups + 4 * channels


def test_dynamic_activations_are_reported(rounded):
    report = numerics(load_model(rounded(Scheme(8, activations="int8"))))
    assert report["compute"] == "a8"
    assert "int8-dynamic" in report["kernels"]["model.layers.1.mlp.down_proj"]


def test_a8_is_asked_for_and_reported(rounded):
    folder = rounded({"mlp": Scheme(4, 32, False), "self_attn": Scheme(8)})
    plain, again, a8 = (load_model(folder, compute=compute) for compute in (None, "a16", "a8"))
    assert torch.equal(logits(plain), logits(again))
    assert not torch.equal(logits(plain), logits(a8))
    report = numerics(a8)
    assert report["compute"] == "a8"
    assert {kernel for name, kernel in report["kernels"].items() if name != "lm_head"} <= {
        "native-int4-a8",
        "native-int8-a8",
        "dequantize-a8",
    }


def test_some_linears_of_a_checkpoint_may_be_a8_by_themselves(rounded):
    folder = rounded({"mlp": Scheme(4, 32), "self_attn": Scheme(8, activations="int8")})
    assert numerics(load_model(folder))["compute"] == "a16+a8"
    assert numerics(load_model(folder, compute="a8"))["compute"] == "a8"


def test_a_compute_that_the_weights_cannot_have_is_refused_before_they_are_read(rounded, tiny_llama):
    w8a8 = rounded(Scheme(8, activations="int8"))
    assert torch.equal(logits(load_model(w8a8)), logits(load_model(w8a8, compute="a8")))
    for refusing in (check_compute, lambda folder, compute: load_model(folder, compute=compute)):
        with pytest.raises(
            QuantizeError, match=f"{w8a8}: it was quantized for int8 activations.*leave out compute a16"
        ):
            refusing(w8a8, "a16")
        with pytest.raises(QuantizeError, match=f"{tiny_llama}: compute a8 .* it has none; quantize it first"):
            refusing(tiny_llama, "a8")
        with pytest.raises(QuantizeError, match="compute 'a4' is unknown: use a16, a8"):
            refusing(tiny_llama, "a4")
    check_compute(tiny_llama, "a16")
    check_compute(tiny_llama, "auto")
    check_compute(w8a8, "a8")


def test_a_quantized_head_is_untied(rounded, tiny_llama):
    folder = rounded(Scheme(8))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors |= pack_weight("lm_head", quantize_rtn(embedding, Scheme(8)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert torch.equal(model.model.embed_tokens.weight, embedding)


def copy_of(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("quantized", [False, True])
def test_a_missing_tensor_is_named(tiny_llama, rounded, tmp_path, quantized):
    folder = copy_of(rounded(Scheme(4, 32)) if quantized else tiny_llama, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj." + ("weight_scale" if quantized else "weight")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizeError) as caught:
        load_model(folder)
    assert name in one_line(caught)


@pytest.mark.parametrize("keep", [0.2, 0.9])
def test_a_truncated_shard_is_named(rounded, keep):
    shard = rounded(Scheme(4, 32)) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[: int(shard.stat().st_size * keep)])
    with pytest.raises(QuantizeError) as caught:
        load_model(shard.parent)
    assert "model.safetensors" in one_line(caught)


def test_a_tensor_of_another_shape_is_named(tiny_llama, tmp_path):
    folder = copy_of(tiny_llama, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 96
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantizeError) as caught:
        load_model(folder)
    assert "proj.weight" in one_line(caught)


def test_a_scheme_that_is_not_what_is_stored_is_named(rounded):
    folder = rounded(Scheme(4, 32))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantizeError) as caught:
        load_model(folder)
    assert "q_proj" in one_line(caught)


@pytest.mark.parametrize("method", ["gptq", "martian", None])
def test_a_quantization_that_nothing_here_loads_is_one_line(tiny_llama, tmp_path, method):
    folder = copy_of(tiny_llama, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantizeError) as caught:
        load_model(folder)
    assert str(folder) in one_line(caught)


@pytest.mark.parametrize("spoil", ["absent", "empty", "no-architecture", "not-json"])
def test_what_is_no_checkpoint_is_one_line(tiny_llama, tmp_path, spoil):
    folder = copy_of(tiny_llama, tmp_path)
    if spoil == "absent":
        folder = tmp_path / "nowhere"
    elif spoil == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        (folder / "config.json").write_text("{}" if spoil == "no-architecture" else "{")
    with pytest.raises(QuantizeError) as caught:
        load_model(folder)
    assert str(folder) in one_line(caught)


def test_loading_needs_the_weights_once_not_twice(tmp_path):
    """A model of 400 MB, in a process of its own: the peak over what the libraries take stays below 1.4 times that."""
    script = """
import resource, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from quantize.load import load_model
load_model(sys.argv[1])  # a tiny one: imports and pools
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - before) * 1024)
"""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "tie_word_embeddings": True}
    sizes = {"small": (64, 128), "large": (2048, 13500)}
    for name, (hidden, feed_forward) in sizes.items():
        config = LlamaConfig(hidden_size=hidden, intermediate_size=feed_forward, **shape)
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.to_empty(device="cpu").save_pretrained(tmp_path / name)
    weights = (tmp_path / "large" / "model.safetensors").stat().st_size
    del model
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout.split()[-1]) < 1.4 * weights


def test_a_head_stored_under_its_older_name_is_found(tmp_path):
    """GPT-NeoX's lm_head is `embed_out` on disk, before and after quantizing."""
    config = GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    assert "embed_out.weight" in load_file(tmp_path / "neox" / "model.safetensors")
    quantize_checkpoint(tmp_path / "neox", Recipe("int4", group_size=32), tmp_path / "out")
    ours = load_model(tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert sum(isinstance(module, QuantizedLinear) for module in ours.modules()) == 8
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-5)
    assert torch.allclose(
        logits(load_model(tmp_path / "neox")),
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "neox")),
        atol=1e-5,
    )
