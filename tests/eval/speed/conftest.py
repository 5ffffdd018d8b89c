"""A checkpoint small enough to measure in seconds: a random Llama of two layers with a byte-level tokenizer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.speed import machine


def write_tiny_checkpoint(
    folder: Path, *, seed: int = 0, layers: int = 2, merges: tuple[tuple[str, str], ...] = ()
) -> Path:
    """Saves the model and its tokenizer (256 bytes, `merges`, and an end-of-text token) and gives the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in merges), "<end>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokens),
        max_position_embeddings=512,
        eos_token_id=len(tokens) - 1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def quick_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The bandwidth probe is kept small and its result away from the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTGATE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(machine.measure_read_bandwidth, "__defaults__", (4 * 1024**2, 2))
        yield
