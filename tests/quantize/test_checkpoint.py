"""Opening a checkpoint: what identifies it, and how each broken one is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize.checkpoint import Checkpoint, refuse_nonfinite
from quantize.decoder import open_decoder
from quantize.errors import QuantizeError
from quantize.load import load_model


@pytest.fixture
def copied(spelling_llama, tmp_path):
    return shutil.copytree(spelling_llama, tmp_path / "copy")


def test_the_digest_is_of_the_weights_and_not_of_their_files(spelling_llama, copied):
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({name: tensors[name] for name in members}, copied / file, {"format": "pt"})
    weight_map = {name: file for file, members in halves.items() for name in members}
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole, split = Checkpoint.open(spelling_llama), Checkpoint.open(copied)
    assert split.tensor_names == whole.tensor_names
    assert split.weights_digest() == whole.weights_digest()


def test_one_changed_weight_changes_the_digest(spelling_llama, copied):
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"][3] *= 2
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    assert Checkpoint.open(copied).weights_digest() != Checkpoint.open(spelling_llama).weights_digest()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_whatever_decides_the_answers_is_in_the_content_digest(spelling_llama, copied, file):
    before = Checkpoint.open(copied).content_digest()
    assert before == Checkpoint.open(spelling_llama).content_digest()
    settings = json.loads((copied / file).read_text()) if (copied / file).is_file() else {}
    (copied / file).write_text(json.dumps(settings | {"eos_token_id": 7}))
    assert Checkpoint.open(copied).content_digest() != before


def test_an_index_that_leads_out_of_the_folder_is_refused(copied, tmp_path):
    (copied / "model.safetensors").rename(tmp_path / "model.safetensors")
    names = load_file(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../model.safetensors")}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(QuantizeError, match="no file of this folder"):
        Checkpoint.open(copied)


def test_the_chat_template_has_a_digest_of_its_own(spelling_llama, copied):
    before = Checkpoint.open(spelling_llama)
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    after = Checkpoint.open(copied)
    assert after.chat_template_digest() != before.chat_template_digest()
    assert after.tokenizer_digest() == before.tokenizer_digest()


def test_no_such_path(tmp_path):
    with pytest.raises(QuantizeError, match="no such path"):
        Checkpoint.open(tmp_path / "nothing")


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(QuantizeError, match=r"not a checkpoint, it has no config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(QuantizeError, match="no safetensors file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(QuantizeError, match="never read"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(QuantizeError, match="not valid JSON"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kept", [3, 100, 0.5, 0.999])
def test_truncated_weights_are_found_when_opening(copied, kept):
    file = copied / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(QuantizeError, match=r"model\.safetensors: truncated or broken") as caught:
        Checkpoint.open(copied)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(copied):
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "lost.safetensors"}}))
    with pytest.raises(QuantizeError, match=r"lost\.safetensors: missing"):
        Checkpoint.open(copied)


def test_a_tensor_that_the_index_promises_in_vain_is_named(copied):
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    with pytest.raises(QuantizeError, match="lacks x"):
        Checkpoint.open(copied)


def test_a_quantized_checkpoint_is_refused_where_the_original_is_needed(copied):
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (copied / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(copied).config["quantization_config"]
    with pytest.raises(QuantizeError, match="quantized already \\(gptq\\)"):
        Checkpoint.open(copied, quantized_ok=False)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "inf")])
def test_the_tensor_with_nan_or_inf_is_named(copied, value, word):
    tensors = load_file(copied / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 5] = value
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(copied)
    with pytest.raises(QuantizeError, match=rf"model\.layers\.1\.mlp\.up_proj\.weight holds {word}"):
        checkpoint.weights_digest(refuse_nonfinite(checkpoint))


def test_tensors_come_one_by_one(spelling_llama):
    checkpoint = Checkpoint.open(spelling_llama)
    assert checkpoint.tensor("model.norm.weight").dtype is torch.bfloat16
    assert checkpoint.shape("model.embed_tokens.weight") == (96, 64)
    with pytest.raises(QuantizeError, match="has no tensor x"):
        checkpoint.tensor("x")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"quantization_config": "int8"}'),
        ("config.json", b'{"quantization_config": [1]}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "\\u0000"}}'),
    ],
)
def test_a_damaged_settings_file_is_named_when_opening(copied, file, content):
    (copied / file).write_bytes(content)
    with pytest.raises(QuantizeError, match=file) as caught:
        Checkpoint.open(copied, quantized_ok=False)
    assert "\n" not in str(caught.value)


def test_a_chat_template_that_is_no_text_is_named(copied):
    (copied / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(QuantizeError, match=r"chat_template\.jinja: not UTF-8"):
        Checkpoint.open(copied).chat_template_digest()


@pytest.mark.parametrize(
    "settings",
    [{"num_attention_heads": 0}, {"hidden_size": 63}, {"num_hidden_layers": "3"}, {"model_type": 5}],
)
def test_a_config_that_makes_no_model_is_one_line(copied, settings):
    config = json.loads((copied / "config.json").read_text()) | settings
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantizeError, match="copy") as caught:
        open_decoder(Checkpoint.open(copied))
    assert "\n" not in str(caught.value)


def test_whole_numbers_are_not_taken_for_weights(copied):
    tensors = load_file(copied / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizeError, match=f"{name} holds whole numbers"):
        open_decoder(Checkpoint.open(copied))
    with pytest.raises(QuantizeError, match=f"{name} holds whole numbers"):
        load_model(copied)


def test_only_what_is_in_use_stays_mapped(tmp_path):
    """Mapped pages count as the process's memory: a model of many files must not pile up while it is read."""
    (tmp_path / "config.json").write_text("{}")
    for number in range(4):
        save_file({f"layer.{number}": torch.full((1000,), float(number))}, tmp_path / f"part-{number}.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    first = checkpoint.tensor("layer.0")
    checkpoint.weights_digest()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line}
    assert mapped == {str(tmp_path / "part-0.safetensors"), str(tmp_path / "part-3.safetensors")}
    assert first.sum() == 0
