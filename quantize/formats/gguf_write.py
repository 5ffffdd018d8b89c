"""Writes a quantized Llama as a GGUF file for llama.cpp: Q8_0 or Q4_0, with its tokenizer.

Both types are blocks of 32 inputs with one fp16 scale d and signed integers: a weight is d * q, q in [-128, 127] or
[-8, 7]. So a weight of ours goes there without loss when its groups are made of whole blocks, code - zero_point is in
that range and fp16 holds the scales; anything else is refused by name. Nothing is rounded here.

A block of Q8_0 is d and 32 bytes; one of Q4_0 is d and 16 bytes, of which byte j holds q[j] + 8 in its low and
q[j + 16] + 8 in its high nibble. llama.cpp rotates neighbouring rows of q and k, transformers row i and row i + half a
head: the rows of each head are written interleaved. What is not quantized keeps its dtype, norms and biases are F32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial as bind
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from quantize.checkpoint import Checkpoint, one_line
from quantize.errors import QuantizeError
from quantize.formats.half import half_scale
from quantize.manifest import GGUF_KEY, Manifest
from quantize.progress import Progress
from quantize.scheme import QuantizedWeight

BLOCK = 32
RANGES = {"gguf-q8_0": (-128, 127), "gguf-q4_0": (-8, 7)}
GGUF_FORMATS = tuple(RANGES)
ARCHITECTURE = "llama"
NO_NORMALIZER = {"type": "Sequence", "normalizers": []}


def write_gguf(
    checkpoint: Checkpoint,
    modules: Collection[str],
    weight_of: Callable[[str], QuantizedWeight],
    form: str,
    out: Path,
    manifest_of: Callable[[Mapping[str, int], int], Manifest | None],
    tell: Progress,
) -> None:
    """Writes OUT, which the caller puts into its place once it is whole. `modules` are the quantized linears, of which
    `weight_of` gives the weights. What `manifest_of` makes of their bytes, by module, and of those of all tensors goes
    along.

    Raises QuantizeError, one line, for an architecture other than Llama's, a tokenizer without a name in llama.cpp, and
    a value that the type does not hold.
    """
    import gguf

    config = supported_config(checkpoint)
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    quantized_type = gguf.GGMLQuantizationType[form.removeprefix("gguf-").upper()]
    add_settings(writer, config, form)
    add_tokenizer(writer, checkpoint, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    plan: list[tuple[str, Callable[[], np.ndarray[Any, Any]]]] = []
    sizes: dict[str, int] = {}

    def add(name: str, read: Callable[[], np.ndarray[Any, Any]], kind: Any) -> None:
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise QuantizeError(f"{checkpoint.path}: {name} has no place in a Llama's GGUF")
        # Every value is looked at before the first byte is written, and read again then: all at once may not fit.
        first = read()
        writer.add_tensor_info(place, first.shape, first.dtype, first.nbytes, raw_dtype=kind)
        plan.append((name, read))
        sizes[name] = first.nbytes

    def packed(module: str) -> np.ndarray[Any, Any]:
        return blocks(module, weight_of(module), form, config)

    tied = config.tie_word_embeddings and "lm_head" not in modules
    done: set[str] = set()
    for name in checkpoint.tensor_names:
        module, _, leaf = name.rpartition(".")
        if module in modules and leaf != "bias":
            if module not in done:
                done.add(module)
                add(f"{module}.weight", bind(packed, module), quantized_type)
        elif not (tied and name == "lm_head.weight") and "rotary_emb" not in name:
            read, kind = plain_tensor(checkpoint, name, config)
            add(name, read, kind)
    manifest = manifest_of({module: sizes[f"{module}.weight"] for module in done}, sum(sizes.values()))
    if manifest is not None:
        writer.add_string(GGUF_KEY, json.dumps(asdict(manifest), allow_nan=False))
    writer.write_header_to_file(out)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for step, (name, read) in enumerate(plan):
        tell(f"writing {name}", step, len(plan))
        writer.write_tensor_data(read())
    writer.flush()
    writer.close()
    tell("done", len(plan), len(plan))


def supported_config(checkpoint: Checkpoint) -> Any:
    config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
    if config.model_type != ARCHITECTURE:
        raise QuantizeError(f"{checkpoint.path}: GGUF is written for Llama models, not for {config.model_type}")
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        raise QuantizeError(
            f"{checkpoint.path}: rope_scaling {rope['rope_type']!r} is not written into GGUF, only plain positions"
        )
    return config


def add_settings(writer: Any, config: Any, form: str) -> None:
    import gguf

    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form.removeprefix('gguf-').upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def add_tokenizer(writer: Any, checkpoint: Checkpoint, vocabulary: int) -> None:
    """Tokens, merges, special ids and the chat template, as llama.cpp's byte-level BPE takes them."""
    import gguf

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
        backend: Tokenizer = tokenizer.backend_tokenizer
        content = json.loads(backend.to_str())
    except Exception as failure:
        raise QuantizeError(f"{checkpoint.path}: its tokenizer does not load ({one_line(failure)[:200]})") from None
    pre = pre_tokenizer_name(content)
    if pre is None:
        raise QuantizeError(
            f"{checkpoint.path}: its tokenizer is no byte-level BPE that llama.cpp has a name for; "
            "GGUF is written for those of GPT-2, SmolLM and Llama 3"
        )
    highest = max(backend.get_vocab().values())
    if highest >= vocabulary:
        raise QuantizeError(f"{checkpoint.path}: its tokenizer gives token {highest}, but config.json has {vocabulary}")
    tokens = [f"[PAD{index}]" for index in range(vocabulary)]
    types = [gguf.TokenType.UNUSED] * vocabulary
    for token, index in backend.get_vocab().items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for entry in content["added_tokens"]:
        types[entry["id"]] = gguf.TokenType.CONTROL if entry["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    )
    add_special_tokens(writer, tokenizer)
    template = checkpoint.chat_template()
    if template is not None:
        writer.add_chat_template(template)


def add_special_tokens(writer: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    roles = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for role, add in roles.items():
        token = getattr(tokenizer, f"{role}_token_id")
        if token is not None:
            add(token)
    bare, framed = (tokenizer("a", add_special_tokens=framed).input_ids for framed in (False, True))
    writer.add_add_bos_token(framed[: -len(bare)] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(framed[len(bare) :] == [tokenizer.eos_token_id])


def pre_tokenizer_name(content: dict[str, Any]) -> str | None:
    """llama.cpp's name for the way in which tokenizer.json splits a text before the merges; None when it is not one of
    those that the reader of GGUF here knows."""
    from quantize.formats.gguf import LLAMA_3_SPLIT

    if content["model"]["type"] != "BPE" or content.get("normalizer") not in (None, NO_NORMALIZER):
        return None
    # Byte-level letters leave nothing to fall back from; tokens for raw bytes are SentencePiece's way.
    if content["model"].get("byte_fallback") and "<0x00>" in content["model"]["vocab"]:
        return None
    steps = content.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        return None
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and steps[0]["pattern"] == {"Regex": LLAMA_3_SPLIT}:
        return "llama-bpe"
    return None


def blocks(module: str, weight: QuantizedWeight, form: str, config: Any) -> np.ndarray[Any, Any]:
    """The bytes uint8 [N, bytes per row] of a quantized linear. Raises QuantizeError for what the type cannot hold."""
    outputs, inputs = weight.codes.shape
    width = weight.scheme.group_width(inputs)
    if inputs % BLOCK or width % BLOCK:
        raise QuantizeError(
            f"{module}: {form.removeprefix('gguf-').upper()} has blocks of {BLOCK} inputs, "
            f"which groups of {width} out of {inputs} are not made of"
        )
    codes = weight.codes.to(torch.int16)
    if weight.zero_point is not None:
        codes = codes - weight.zero_point.to(torch.int16).repeat_interleave(width, dim=1)
    low, high = RANGES[form]
    outside = (codes < low) | (codes > high)
    if bool(outside.any()):
        row, column = (int(index) for index in outside.nonzero()[0])
        raise QuantizeError(
            f"{module}: the weight of output {row}, input {column} is {int(codes[row, column])} steps from zero; "
            f"{form.removeprefix('gguf-').upper()} holds {low} to {high} ({int(outside.sum())} weights do not fit)"
        )
    scale = half_scale(weight.scale, module).repeat_interleave(width // BLOCK, dim=1)
    heads = heads_of(module, config)
    if heads:
        codes, scale = interleave_halves(codes, heads), interleave_halves(scale, heads)
    grouped = codes.to(torch.int8).reshape(outputs, inputs // BLOCK, BLOCK).numpy()
    if form == "gguf-q8_0":
        body = grouped.view(np.uint8)
    else:
        nibbles = (grouped + 8).view(np.uint8)
        body = nibbles[..., : BLOCK // 2] | (nibbles[..., BLOCK // 2 :] << np.uint8(4))
    head = scale.contiguous().numpy().view(np.uint8).reshape(outputs, inputs // BLOCK, 2)
    return np.concatenate([head, body], axis=-1).reshape(outputs, -1)


def plain_tensor(checkpoint: Checkpoint, name: str, config: Any) -> tuple[Callable[[], np.ndarray[Any, Any]], Any]:
    """How a tensor that is not quantized is read, and its type in the file."""
    import gguf

    kinds = {"BF16": gguf.GGMLQuantizationType.BF16, "F16": gguf.GGMLQuantizationType.F16}
    matrix = len(checkpoint.shape(name)) > 1
    kind = kinds.get(checkpoint.dtype(name), gguf.GGMLQuantizationType.F32) if matrix else gguf.GGMLQuantizationType.F32
    heads = heads_of(name.rpartition(".")[0], config)

    def read() -> np.ndarray[Any, Any]:
        tensor = checkpoint.tensor(name)
        if heads:
            tensor = interleave_halves(tensor, heads)
        if kind == gguf.GGMLQuantizationType.BF16:
            return tensor.contiguous().view(torch.uint8).numpy()
        return (tensor if kind == gguf.GGMLQuantizationType.F16 else tensor.float()).contiguous().numpy()

    return read, kind


def heads_of(module: str, config: Any) -> int:
    """How many heads the rows of a linear are, when they are rotated; else 0."""
    if module.endswith(".q_proj"):
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if module.endswith(".k_proj") else 0


def interleave_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [N, ...] with the two halves of each head's rows interleaved."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, 2, size // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
