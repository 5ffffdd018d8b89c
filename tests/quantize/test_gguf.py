"""A GGUF becomes a checkpoint whose weights, tokens and template are the GGUF's own."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantize.errors import QuantizeError
from quantize.formats.gguf import convert_gguf

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 96, 2
SCALES_AT = {
    gguf.GGMLQuantizationType.Q4_0: (0,),
    gguf.GGMLQuantizationType.Q4_1: (0, 2),
    gguf.GGMLQuantizationType.Q8_0: (0,),
    gguf.GGMLQuantizationType.Q4_K: (0, 2),
    gguf.GGMLQuantizationType.Q6_K: (208,),
}
"""Where the fp16 numbers of a block begin."""
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Three control tokens, GPT-2's 256 bytes, and two merges that must not swallow digits one after another."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bytes_as_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*special, *bytes_as_text, "12", "ab"]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    return tokens, types, ["1 2", "a b"]


def rows_for_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores q and k with each head's two rotary halves interleaved."""
    outputs, inputs = weight.shape
    return weight.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def raw_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """A random weight of a quantized type, as bytes: any bits are codes and small scales, but the fp16 scales must be
    numbers of a size that a model can bear."""
    outputs, inputs = shape
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rows = random.integers(0, 256, (outputs, inputs // elements, size), dtype=np.uint8)
    halves = SCALES_AT[kind]
    for start in halves:
        scale = (random.standard_normal((outputs, inputs // elements)) * 2e-4).astype(np.float16)
        rows[..., start : start + 2] = scale[..., None].view(np.uint8)
    return rows.reshape(outputs, -1)


def write_gguf(
    path: Path,
    pre: str = "smollm",
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType | None = None,
    hidden: int = HIDDEN,
) -> dict[str, torch.Tensor]:
    """A random tiny Llama, its linears float32 or of a quantized type; returns the weights by their Hugging Face
    names."""
    random = np.random.default_rng(0)
    feed_forward = max(FEED_FORWARD, hidden)
    tokens, types, merges = vocabulary()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    weights: dict[str, torch.Tensor] = {}

    def add(name: str, ours: str, *shape: int, heads: int = 0) -> None:
        if kind is not None and name.startswith("blk") and len(shape) == 2:
            stored = raw_blocks(kind, shape, random)
            weights[ours] = torch.from_numpy(gguf.dequantize(stored, kind))
            writer.add_tensor(name, rows_for_llama_cpp(stored, heads) if heads else stored, raw_dtype=kind)
            return
        values = random.standard_normal(shape).astype(np.float32) * 0.1
        weights[ours] = torch.from_numpy(values)
        writer.add_tensor(name, rows_for_llama_cpp(values, heads) if heads else values)

    kv_width = hidden // HEADS * KV_HEADS
    add("token_embd.weight", "model.embed_tokens.weight", len(tokens), hidden)
    add("output_norm.weight", "model.norm.weight", hidden)
    for layer in range(LAYERS):
        block, ours = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{block}.attn_norm.weight", f"{ours}.input_layernorm.weight", hidden)
        add(f"{block}.ffn_norm.weight", f"{ours}.post_attention_layernorm.weight", hidden)
        add(f"{block}.attn_q.weight", f"{ours}.self_attn.q_proj.weight", hidden, hidden, heads=HEADS)
        add(f"{block}.attn_k.weight", f"{ours}.self_attn.k_proj.weight", kv_width, hidden, heads=KV_HEADS)
        add(f"{block}.attn_v.weight", f"{ours}.self_attn.v_proj.weight", kv_width, hidden)
        add(f"{block}.attn_output.weight", f"{ours}.self_attn.o_proj.weight", hidden, hidden)
        add(f"{block}.ffn_gate.weight", f"{ours}.mlp.gate_proj.weight", feed_forward, hidden)
        add(f"{block}.ffn_up.weight", f"{ours}.mlp.up_proj.weight", feed_forward, hidden)
        add(f"{block}.ffn_down.weight", f"{ours}.mlp.down_proj.weight", hidden, feed_forward)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("gguf")
    weights = write_gguf(folder / "tiny.gguf")
    convert_gguf(folder / "tiny.gguf", folder / "out")
    return folder / "out", weights


def test_weights_are_the_gguf_s_rounded_to_bf16(converted):
    folder, weights = converted
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    stored = model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight.to(torch.bfloat16)), name
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("kind", SCALES_AT, ids=lambda kind: kind.name)
def test_each_type_is_read_as_the_gguf_package_dequantizes_it(tmp_path, kind):
    weights = write_gguf(tmp_path / "tiny.gguf", kind=kind, hidden=256)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight.to(torch.bfloat16)), name
        assert weight.unique().numel() > 10, name


def test_special_tokens_follow_the_gguf_s_ids(converted):
    folder, _ = converted
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 128
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2


def test_smollm_splits_digits_and_text_comes_back_whole(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab12").input_ids) == ["ab", "1", "2"]
    for text in ["a , b . 12", "don 't  stop\n\t ", "Grüße 你好 ▁ <0x41>"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_is_kept(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.chat_template == TEMPLATE
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|>"
    ids = tokenizer(text).input_ids
    assert (ids[0], ids[-1]) == (1, 2)


def test_old_tools_know_the_tokenizer_class(converted):
    settings = json.loads((converted[0] / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_gpt_2_keeps_numbers_together(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", pre="gpt-2")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab12").input_ids) == ["ab", "12"]


def test_an_unknown_pre_tokenizer_is_said(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", pre="martian")
    with pytest.warns(UserWarning, match="martian"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.97])
def test_a_truncated_gguf_is_one_line_and_leaves_nothing(tmp_path, keep):
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(QuantizeError, match="truncated") as caught:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


def test_an_unsupported_architecture_is_named(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", architecture="martian")
    with pytest.raises(QuantizeError, match="martian") as caught:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 not a gguf"], ids=["absent", "empty", "other"])
def test_what_is_no_gguf_is_said(tmp_path, content):
    if content is not None:
        (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(QuantizeError, match=r"x\.gguf"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")


@pytest.mark.real
def test_smollm2_is_what_its_gguf_says(real_checkpoint):
    folder = real_checkpoint
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("hello 2024").input_ids == [28120, 216, 34, 32, 34, 36]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for topic in list(topics.values())[:40]:
        assert tokenizer.decode(tokenizer(topic).input_ids) == topic
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2
