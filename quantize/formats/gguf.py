"""Turns a GGUF file into a bf16 Hugging Face checkpoint with its tokenizer and chat template.

transformers reads the weights (`gguf_file=`), and then two things need repair. A model read that way refuses to be
saved, so its tensors move into a fresh model of the same config. And the converted tokenizer differs from llama.cpp's:
special tokens are assigned wrongly and the pre-tokenizer that `tokenizer.ggml.pre` names is not looked at. What the
GGUF says is the authority for both.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers import logging as transformers_logging

from quantize.atomic import atomic_directory
from quantize.errors import QuantizeError

# llama.cpp (src/llama-vocab.cpp, llm_tokenizer_bpe) splits these into single digits before GPT-2's expression.
SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
LLAMA_3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = frozenset({"gpt-2", "gpt2", "default", "olmo", "phi-2", "mpt"})
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def convert_gguf(gguf: Path, out: Path) -> None:
    """Writes `out`, a checkpoint folder (bf16 weights, config, tokenizer, chat template, generation config).

    `out` appears whole or not at all. Raises QuantizeError, in one line, for a file that is missing, truncated, no
    GGUF, or of an architecture that transformers does not read.
    """
    gguf = Path(gguf)
    metadata = read_metadata(gguf)
    with atomic_directory(Path(out)) as folder, _quiet():
        model = _fresh_model(gguf, metadata)
        model.save_pretrained(folder)
        _tokenizer(gguf, metadata).save_pretrained(folder)
        _name_tokenizer_class(folder / "tokenizer_config.json")


def read_metadata(gguf: Path) -> dict[str, Any]:
    """The GGUF's key-value pairs; also checks that every tensor lies within the file."""
    from gguf import GGUFReader

    if not gguf.is_file():
        raise QuantizeError(f"{gguf}: no such file; give a .gguf file")
    with open(gguf, "rb") as file:
        if file.read(4) != b"GGUF":
            raise QuantizeError(f"{gguf}: not a GGUF file (its first bytes are not 'GGUF')")
    try:
        reader = GGUFReader(str(gguf))
        end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        # The reader indexes into the file as it goes; cut short, it fails with whatever error that place gives.
        raise QuantizeError(f"{gguf}: truncated or damaged GGUF file ({_one_line(error)}); download it again") from None
    if end > gguf.stat().st_size:
        raise QuantizeError(f"{gguf}: truncated, {gguf.stat().st_size} of {end} bytes are there; download it again")
    if "general.architecture" not in metadata:
        raise QuantizeError(f"{gguf}: names no architecture (general.architecture); is it a language model?")
    return metadata


def _fresh_model(gguf: Path, metadata: Mapping[str, Any]) -> PreTrainedModel:
    try:
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    except Exception as error:
        raise QuantizeError(
            f"{gguf}: transformers cannot read architecture {metadata['general.architecture']!r} ({_one_line(error)})"
        ) from None
    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "_pre_quantization_dtype"):
        settings.pop(name, None)
    ids = {f"{role}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in ROLES.items()}
    settings.update({name: token for name, token in ids.items() if token is not None and name != "unk_token_id"})
    config = type(read.config).from_dict(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in read.state_dict().items()}
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    ends = [ids["eos_token_id"], metadata.get("tokenizer.ggml.eot_token_id")]
    ends = list(dict.fromkeys(token for token in ends if token is not None))
    model.generation_config = GenerationConfig(
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=ids["pad_token_id"],
    )
    return model


def _tokenizer(gguf: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    try:
        converted = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:
        raise QuantizeError(f"{gguf}: transformers cannot read its tokenizer ({_one_line(error)})") from None
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {}
    for role, key in ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            special[f"{role}_token"] = tokens[token_id]
    backend = Tokenizer.from_str(converted.backend_tokenizer.to_str())
    _split_as_llama_cpp(backend, metadata)
    _add_ends_as_llama_cpp(backend, metadata, special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=_context_length(metadata),
        **special,
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _name_tokenizer_class(settings_file: Path) -> None:
    """transformers 5 writes `TokenizersBackend`, which 4.x does not know; both know this name."""
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _split_as_llama_cpp(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Puts in the pre-tokenizer that the GGUF names, where transformers put GPT-2's for lack of looking."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    generic = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if metadata.get("tokenizer.ggml.model") != "gpt2" or not generic:
        return
    if name in SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name in LLAMA_3:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA_3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.model.ignore_merges = True
    elif name not in GPT_2:
        warnings.warn(
            f"pre-tokenizer {name!r} is not known here, text is split as GPT-2 does; check some token ids",
            stacklevel=2,
        )


def _add_ends_as_llama_cpp(backend: Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Begin and end tokens around a text, by the GGUF's flags or llama.cpp's defaults for its kind of vocabulary."""
    pre, kind = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.model")
    begin = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in LLAMA_3)
    end = metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [special["bos_token"]] if begin and "bos_token" in special else []
    after = [special["eos_token"]] if end and "eos_token" in special else []
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=ids,
    )


def _context_length(metadata: Mapping[str, Any]) -> int:
    return int(metadata.get(f"{metadata['general.architecture']}.context_length", 2048))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws a bar of its own per step; our warnings still come through."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            transformers_logging.set_verbosity(verbosity)
    for warning in caught:
        if warning.filename == __file__:
            warnings.warn(str(warning.message), stacklevel=3)


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
