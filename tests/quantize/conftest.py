"""Tiny random checkpoints: a Llama of two layers, as it is and rounded to nearest in any mix of schemes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantize.formats.compressed_tensors import pack_weight, quantization_config
from quantize.scheme import Scheme, quantize_rtn

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """bf16, hidden 64, feed-forward 128, tied embeddings, 96 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def rounded(tiny_llama, tmp_path) -> Callable[..., Path]:
    """`rounded(scheme)` or `rounded({part of the module's name: scheme})`: the tiny Llama with its linears rounded to
    nearest, written as compressed-tensors."""

    def write(schemes: Scheme | dict[str, Scheme], name: str = "rounded") -> Path:
        chosen = {"": schemes} if isinstance(schemes, Scheme) else schemes
        out = tmp_path / name
        out.mkdir()
        tensors, packed, left = {}, {}, ["lm_head"]
        for key, tensor in load_file(tiny_llama / "model.safetensors").items():
            module = key.removesuffix(".weight")
            scheme = next((scheme for part, scheme in chosen.items() if part in module), None)
            if module.endswith(LINEARS) and scheme is not None:
                tensors.update(pack_weight(module, quantize_rtn(tensor, scheme)))
                packed[module] = scheme
            else:
                tensors[key] = tensor
                left += [module] if module.endswith(LINEARS) else []
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((tiny_llama / "config.json").read_text())
        config["quantization_config"] = quantization_config(packed, left)
        (out / "config.json").write_text(json.dumps(config))
        return out

    return write


@pytest.fixture(scope="session")
def spelling_llama(tmp_path_factory) -> Path:
    """bf16, three layers, two query heads per key-value head, untrained, with a tokenizer that spells: one token
    per printable character, and a chat template."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    folder = tmp_path_factory.mktemp("spelling") / "llama"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    letters = {"<unk>": 0} | {chr(code): code - 31 for code in range(32, 127)}
    spelling = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    spelling.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling, unk_token="<unk>", eos_token="<unk>")
    tokenizer.chat_template = (
        "{% for message in messages %}{% if not message.role %}{{ raise_exception('no role') }}{% endif %}"
        "[{{ message.role }}] {{ message.content }} {% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def spelled_text(tmp_path_factory) -> Path:
    """A calibration file: about 2,000 characters of plain prose."""
    file = tmp_path_factory.mktemp("text") / "calibration.jsonl"
    lines = [
        f"Line {number} of a text about nothing: {number * 7919 % 1000} sheep, {number % 13} dogs."
        for number in range(40)
    ]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file
