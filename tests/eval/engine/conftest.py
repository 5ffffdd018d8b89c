"""Tiny random models of several architectures, and what transformers' own generate makes of them."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
CONTEXT = 128

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 9},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "gemma": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    "ministral": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 9},
    "seed_oss": {"num_key_value_heads": 2, "head_dim": 32},
    "phi3": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2, "dropout": 0.0},
}


def build_model(architecture: str, **overrides: object) -> PreTrainedModel:
    """A random float32 model, the same at every call, with transformers' eager attention."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(_SIZES | ARCHITECTURES.get(architecture, {}) | overrides))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    return build_model


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    def prompts(count: int, longest: int = 60, seed: int = 1) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]

    return prompts


@pytest.fixture(scope="session")
def greedy_reference() -> Callable[..., list[list[int]]]:
    """transformers' own greedy tokens, one prompt at a time."""

    def generate(model: PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            with torch.inference_mode():
                tokens = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
            outputs.append(tokens[0, len(prompt) :].tolist())
        return outputs

    return generate
