"""A conversion keeps every weight to the bit, or says which it cannot keep and writes nothing."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantize import Manifest, Recipe, load_model, quantize_checkpoint
from quantize.atomic import atomic_file
from quantize.convert import convert_checkpoint
from quantize.errors import QuantizeError
from quantize.formats.gguf import convert_gguf

IDS = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(0))
TEXTS = ["ab12 and 3", "Grüße, 你好!\n\tx", "don't  stop 2024", "<|im_end|>abab"]


def byte_level_tokenizer(pre_tokenizer) -> PreTrainedTokenizerFast:
    # Like SmolLM's, it lacks the letter of a byte that UTF-8 never has, and says that it falls back to bytes.
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"\xff"})
    letters = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "12", "ab"]
    vocabulary = {token: index for index, token in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocabulary, [("1", "2"), ("a", "b")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request, tmp_path_factory) -> Path:
    """bf16, two layers, two query heads per key-value head, a byte-level tokenizer and four tokens beyond it."""
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=265,
        max_position_embeddings=128,
        initializer_range=0.15,
        rope_theta=100000.0,
        tie_word_embeddings=request.param,
    )
    folder = tmp_path_factory.mktemp("convert") / "source"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    byte_level_tokenizer(split).save_pretrained(folder)
    return folder


def quantized(source: Path, out: Path, **fields) -> Path:
    quantize_checkpoint(source, Recipe.from_mapping({"method": "int4", "group_size": 32, **fields}), out)
    return out


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, dtype=torch.float32)(IDS).logits


def weights_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_there_and_back_again_is_byte_for_byte_the_same(source, tmp_path, group_size):
    start = quantized(source, tmp_path / "start", group_size=group_size)
    convert_checkpoint(start, "gptq", tmp_path / "gptq")
    convert_checkpoint(tmp_path / "gptq", "awq", tmp_path / "awq")
    convert_checkpoint(tmp_path / "awq", "compressed-tensors", tmp_path / "back")
    expected = logits(start)
    for step in ("gptq", "awq", "back"):
        assert torch.equal(logits(tmp_path / step), expected), step
    assert weights_bytes(tmp_path / "back") == weights_bytes(start)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (start, tmp_path / "back"))
    assert after == before
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_zero_points_survive_awq(source, tmp_path):
    start = quantized(source, tmp_path / "start", symmetric=False)
    convert_checkpoint(start, "awq", tmp_path / "awq")
    convert_checkpoint(tmp_path / "awq", "compressed-tensors", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "awq"), logits(start))
    assert weights_bytes(tmp_path / "back") == weights_bytes(start)


def test_a_written_gptq_is_what_the_recipe_would_have_written(source, tmp_path):
    start = quantized(source, tmp_path / "start")
    direct = quantized(source, tmp_path / "direct", format="gptq")
    convert_checkpoint(start, "gptq", tmp_path / "converted")
    assert weights_bytes(tmp_path / "converted") == weights_bytes(direct)
    assert (tmp_path / "converted" / "config.json").read_text() == (direct / "config.json").read_text()


def test_the_manifest_goes_along_and_says_where_it_comes_from(source, tmp_path):
    start = quantized(source, tmp_path / "start")
    convert_checkpoint(start, "awq", tmp_path / "awq")
    convert_checkpoint(tmp_path / "awq", "gguf-q8_0", tmp_path / "m.gguf")
    before, after, last = (Manifest.read(tmp_path / name) for name in ("start", "awq", "m.gguf"))
    assert after.recipe["format"] == "awq"
    assert last.recipe["format"] == "gguf-q8_0"
    assert after.notes[-1] == f"converted without loss from compressed-tensors, fingerprint {before.fingerprint[:12]}"
    assert last.notes[-1] == f"converted without loss from awq, fingerprint {after.fingerprint[:12]}"
    assert [record.relative_error for record in last.modules] == [record.relative_error for record in before.modules]
    sizes = {name: tensor.nbytes for name, tensor in all_tensors(tmp_path / "awq").items()}
    module = after.modules[0].name
    assert after.modules[0].bytes == sum(size for name, size in sizes.items() if name.startswith(f"{module}."))
    reader = gguf.GGUFReader(str(tmp_path / "m.gguf"))
    assert last.bytes_after == sum(tensor.n_bytes for tensor in reader.tensors)
    # A block of Q8_0 is 34 bytes for 32 weights.
    assert last.bits_per_weight == 8.5
    # Another format is other work: quantizing into the same folder does not take it for its own.
    with pytest.raises(QuantizeError, match="exists already"):
        quantized(source, tmp_path / "awq")


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("gguf-q8_0", {"method": "int8", "group_size": 32}),
        ("gguf-q8_0", {"method": "int8", "group_size": -1}),
        ("gguf-q8_0", {"symmetric": False}),
        ("gguf-q4_0", {}),
        ("gguf-q4_0", {"group_size": 64, "format": "gptq"}),
        ("gguf-q4_0", {"format": "awq"}),
    ],
)
def test_a_gguf_holds_the_same_weights_and_tokenizer(source, tmp_path, form, fields):
    """Read back by transformers' reader, which dequantizes to float32, and by ours, which goes on to bf16."""
    start = quantized(source, tmp_path / "start", **fields)
    convert_checkpoint(start, form, tmp_path / "out.gguf")
    read = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.allclose(read(IDS).logits, logits(start), atol=1e-5)
    convert_gguf(tmp_path / "out.gguf", tmp_path / "hf")
    ours, theirs = AutoTokenizer.from_pretrained(start), AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
    assert theirs.chat_template == ours.chat_template
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    assert (logits(tmp_path / "hf") - logits(start)).abs().max() < 0.3


def test_gguf_blocks_are_those_of_the_gguf_package(source, tmp_path):
    """Its own dequantizer gives the very floats, and the types are the ones asked for."""
    start = quantized(source, tmp_path / "start")
    convert_checkpoint(start, "gguf-q4_0", tmp_path / "out.gguf")
    reader = gguf.GGUFReader(str(tmp_path / "out.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    down = tensors["blk.1.ffn_down.weight"]
    assert down.tensor_type == gguf.GGMLQuantizationType.Q4_0
    assert tensors["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.BF16
    assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    expected = load_model(start, dtype=torch.float32).get_submodule("model.layers.1.mlp.down_proj")
    floats = gguf.dequantize(down.data, down.tensor_type)
    with torch.inference_mode():
        assert np.array_equal(floats, expected(torch.eye(128)).T.numpy())


def refused(source: Path, form: str, out: Path) -> str:
    before = sorted(out.parent.iterdir())
    with pytest.raises(QuantizeError) as caught:
        convert_checkpoint(source, form, out)
    assert sorted(out.parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "form", "words"),
    [
        ({"symmetric": False}, "gptq", "symmetric only"),
        ({"method": "int8", "group_size": -1, "activations": "int8"}, "gptq", "activations"),
        ({"method": "int8"}, "awq", "holds 4 bits, not 8"),
        ({"method": "int3"}, "gguf-q4_0", None),
        ({"group_size": 16}, "gguf-q4_0", "blocks of 32 inputs"),
        ({"method": "int8"}, "gguf-q4_0", "Q4_0 holds -8 to 7"),
        ({"overrides": {"*down_proj": {"bits": 8}}}, "gptq", "one scheme"),
        ({"overrides": {"*down_proj": {"bits": 8}}}, "gguf-q4_0", "down_proj: the weight of output"),
    ],
)
def test_what_cannot_be_kept_is_named(source, tmp_path, fields, form, words):
    start = quantized(source, tmp_path / "start", **fields)
    out = tmp_path / ("out.gguf" if form.startswith("gguf") else "out")
    if words is None:
        convert_checkpoint(start, form, out)
    else:
        assert words in refused(start, form, out)


def test_a_scale_that_fp16_cannot_hold_is_named_with_its_value(source, tmp_path):
    start = quantized(source, tmp_path / "start")
    for file in start.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.layers.0.mlp.up_proj.weight_scale" in tensors:
            tensors["model.layers.0.mlp.up_proj.weight_scale"][7, 1] = 1e-7
            save_file(tensors, file, {"format": "pt"})
    for form, name in (("gptq", "out"), ("awq", "out"), ("gguf-q8_0", "out.gguf")):
        words = refused(start, form, tmp_path / name)
        assert "model.layers.0.mlp.up_proj: the scale of output 7, group 1 is 1.0" in words


def test_an_original_is_not_converted_but_quantized(source, tmp_path):
    words = refused(source, "gguf-q8_0", tmp_path / "out.gguf")
    assert "quantize it first, with --method int8 --group-size 32" in words


def test_act_order_is_refused_by_name(source, tmp_path):
    start = quantized(source, tmp_path / "start", format="gptq")
    for file in start.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("layers.1.mlp.up_proj.g_idx"):
                tensors[name] = tensors[name].flip(0)
        save_file(tensors, file, {"format": "pt"})
    assert "layers.1.mlp.up_proj has groups in act-order" in refused(start, "awq", tmp_path / "out")


def test_gguf_wants_a_llama_a_known_tokenizer_and_a_file_name(source, tmp_path):
    start = quantized(source, tmp_path / "start")
    assert "ends in .gguf" in refused(start, "gguf-q4_0", tmp_path / "folder")
    odd = shutil.copytree(start, tmp_path / "odd")
    byte_level_tokenizer(
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    ).save_pretrained(odd)
    assert "no byte-level BPE that llama.cpp has a name for" in refused(odd, "gguf-q4_0", tmp_path / "odd.gguf")
    config = json.loads((start / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (start / "config.json").write_text(json.dumps(config))
    assert "rope_scaling 'linear'" in refused(start, "gguf-q4_0", tmp_path / "out.gguf")


def test_an_existing_result_is_left_alone(source, tmp_path):
    start = quantized(source, tmp_path / "start")
    (tmp_path / "out.gguf").write_text("mine")
    assert "exists already" in refused(start, "gguf-q4_0", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_text() == "mine"


def test_a_quantized_head_goes_into_gguf_and_not_into_gptq(source, tmp_path):
    start = quantized(source, tmp_path / "start", ignore=[])
    assert "lm_head" in refused(start, "gptq", tmp_path / "out")
    convert_checkpoint(start, "gguf-q4_0", tmp_path / "out.gguf")
    read = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.allclose(read(IDS).logits, logits(start), atol=1e-5)


def test_what_the_old_format_left_beside_the_weights_does_not_come_along(source, tmp_path):
    """Older writers store zero points of 0 with symmetric weights too."""
    start = quantized(source, tmp_path / "start")
    for file in start.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            tensors[name.replace("weight_scale", "weight_zero_point")] = torch.zeros(8, 2, dtype=torch.int32)
        save_file(tensors, file, {"format": "pt"})
    convert_checkpoint(start, "awq", tmp_path / "awq")
    leaves = {name.rpartition(".")[2] for name in all_tensors(tmp_path / "awq")}
    assert leaves == {"weight", "qweight", "qzeros", "scales"}


def test_a_token_beyond_the_embeddings_is_refused(source, tmp_path):
    """A gap in the ids: there are fewer tokens than embeddings, and yet one is outside."""
    start = quantized(source, tmp_path / "start")
    content = json.loads((start / "tokenizer.json").read_text())
    content["model"]["vocab"]["ab"] = 400
    (start / "tokenizer.json").write_text(json.dumps(content))
    assert "gives token 400, but config.json has 265" in refused(start, "gguf-q4_0", tmp_path / "out.gguf")


def spoil(folder: Path, ending: str, change) -> None:
    """Replaces the first tensor of that name's ending by what `change` makes of it; None takes it away."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        name = next((name for name in sorted(tensors) if name.endswith(ending)), None)
        if name is not None:
            changed = change(tensors.pop(name))
            save_file(tensors | ({} if changed is None else {name: changed.contiguous()}), file, {"format": "pt"})
            return
    raise AssertionError(ending)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0] = torch.nan
    return tensor


DAMAGES = {
    "gptq": [
        ("qzeros", lambda tensor: tensor[:, :-1], "qzeros"),
        ("qzeros", lambda tensor: tensor.float(), "qzeros"),
        ("g_idx", lambda tensor: tensor[:-1], "g_idx"),
        ("g_idx", lambda tensor: torch.full_like(tensor, -7), "g_idx"),
        ("g_idx", lambda tensor: tensor.reshape(2, -1), "g_idx"),
        ("scales", lambda tensor: tensor.flatten(), "scales"),
        ("scales", with_nan, "NaN or inf among its scales"),
        ("scales", lambda tensor: tensor.to(torch.int32), "whole numbers"),
        ("qweight", lambda tensor: tensor.flatten(), "qweight"),
        ("qweight", lambda tensor: tensor[: tensor.shape[0] // 2], "qweight"),
        ("norm.weight", lambda tensor: tensor[:5], "config.json makes it [64]"),
    ],
    "awq": [
        ("qzeros", lambda tensor: tensor[:, :-1], "qzeros"),
        ("qzeros", lambda tensor: tensor.flatten(), "qzeros"),
        ("scales", lambda tensor: tensor[:-1], "scales"),
        ("scales", with_nan, "NaN or inf among its scales"),
        ("qweight", lambda tensor: tensor.to(torch.int64), "qweight"),
    ],
    "compressed-tensors": [
        ("weight_packed", lambda tensor: tensor[:, :-1], "weight_packed"),
        ("weight_packed", lambda tensor: tensor.float(), "weight_packed"),
        ("weight_shape", lambda tensor: tensor * 10**9, "weight_packed"),
        ("weight_shape", lambda tensor: -tensor, "weight_packed"),
        ("weight_shape", lambda tensor: tensor[:1], "weight_shape"),
        ("weight_scale", lambda tensor: tensor[:, :1].flatten(), "weight_scale"),
        ("weight_scale", with_nan, "NaN or inf among its scales"),
    ],
}


@pytest.mark.parametrize(
    ("form", "leaf", "change", "words"),
    [(form, *damage) for form, damages in DAMAGES.items() for damage in damages],
)
def test_a_damaged_tensor_is_named_and_neither_converted_nor_loaded(source, tmp_path, form, leaf, change, words):
    start = quantized(source, tmp_path / "start", format=form)
    spoil(start, f".{leaf}", change)
    said = refused(start, "gptq" if form == "awq" else "awq", tmp_path / "out")
    assert str(start) in said
    assert "model." in said
    assert words in said or "not stored as config.json says" in said
    with pytest.raises(QuantizeError, match=r"model\."):
        load_model(start)


def test_a_lost_tensor_is_named(source, tmp_path):
    start = quantized(source, tmp_path / "start", format="gptq")
    (start / "model.safetensors.index.json").unlink()
    spoil(start, ".post_attention_layernorm.weight", lambda tensor: None)
    assert "missing from the checkpoint: model.layers" in refused(start, "awq", tmp_path / "out")


def test_integers_wider_than_they_say_are_refused_and_not_cut(source, tmp_path):
    """int8 holds codes that 4 bits do not; a format that packs them would spoil their neighbours."""
    start = quantized(source, tmp_path / "start", method="int8", activations="int8", group_size=-1)
    config = json.loads((start / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (start / "config.json").write_text(json.dumps(config))
    assert "not made of 4-bit integers" in refused(start, "gptq", tmp_path / "out")


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("gptq", {"bits": None}),
        ("gptq", {"bits": 0}),
        ("gptq", {"bits": 77}),
        ("gptq", {"bits": "4"}),
        ("gptq", {"group_size": 0}),
        ("gptq", {"group_size": [1]}),
        ("gptq", {"dynamic": [1, 2]}),
        ("gptq", {"dynamic": {"(": {"bits": 8}}}),
        ("gptq", {"dynamic": {".*": 5}}),
        ("gptq", {"meta": [1]}),
        ("gptq", {"checkpoint_format": [1]}),
        ("gptq", {"checkpoint_format": {"a": 1}}),
        ("awq", {"group_size": "x"}),
        ("awq", {"group_size": -3}),
        ("compressed-tensors", {"config_groups": [1]}),
        ("compressed-tensors", {"config_groups": "abc"}),
        ("compressed-tensors", {"config_groups": {"a": 5}}),
        ("compressed-tensors", {"ignore": 5}),
        ("compressed-tensors", {"ignore": [{}]}),
        ("compressed-tensors", {"ignore": ["re:("]}),
        ("compressed-tensors", {"transform_config": [1]}),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(source, tmp_path, form, settings):
    start = quantized(source, tmp_path / "start", format=form)
    config = json.loads((start / "config.json").read_text())
    config["quantization_config"] |= settings
    (start / "config.json").write_text(json.dumps(config))
    assert str(start) in refused(start, "gptq" if form == "awq" else "awq", tmp_path / "out")


def test_a_gguf_that_a_killed_run_left_half_is_written_over(source, tmp_path):
    start = quantized(source, tmp_path / "start")
    (tmp_path / "out.gguf.partial").write_bytes(b"half" * 10**6)
    convert_checkpoint(start, "gguf-q4_0", tmp_path / "out.gguf")
    convert_checkpoint(start, "gguf-q4_0", tmp_path / "again.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()
    assert list(tmp_path.glob("*.partial")) == []


def test_two_runs_do_not_write_one_gguf(source, tmp_path):
    start = quantized(source, tmp_path / "start")
    with atomic_file(tmp_path / "out.gguf") as partial:
        assert "another process is writing it now" in refused(start, "gguf-q4_0", tmp_path / "out.gguf")
        partial.write_text("mine")
    assert (tmp_path / "out.gguf").read_text() == "mine"


def test_a_token_beyond_the_vocabulary_is_named(source, tmp_path):
    start = quantized(source, tmp_path / "start")
    content = json.loads((start / "tokenizer.json").read_text())
    added = {**content["added_tokens"][0], "id": 4000, "content": "<far>"}
    content["added_tokens"].append(added)
    content["model"]["vocab"]["<far>"] = 4000
    (start / "tokenizer.json").write_text(json.dumps(content))
    assert "gives token 4000" in refused(start, "gguf-q4_0", tmp_path / "out.gguf")
