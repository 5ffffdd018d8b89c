"""What a served model is: its digests, dtypes, context and end-of-sequence ids.

The one idea: what decides the engine's numbers is read off the model and the checkpoint, never off a file's name.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.errors import EvalError
from quantize.checkpoint import Checkpoint


def checkpoint_digests(path: Path) -> dict[str, str | None]:
    """weights_digest, tokenizer_digest and chat_template_digest of a checkpoint folder."""
    checkpoint = Checkpoint.open(path)
    return {
        "weights_digest": checkpoint.weights_digest(),
        "tokenizer_digest": checkpoint.tokenizer_digest(),
        "chat_template_digest": checkpoint.chat_template_digest(),
    }


def model_digest(model: PreTrainedModel) -> str:
    """sha256 over a model's tensors by name, for a model that came from no checkpoint."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def context_tokens(model: PreTrainedModel, wanted: int | None) -> int:
    """How long a request may be: what the model's positions allow, or less if so wanted; 2048 where neither says.

    LongRoPE turns by other frequencies once the longest sequence of a batch has outgrown the original context. In a
    flat batch one request would change the others so, and the keys already cached: the original context is its limit.
    """
    config = model.config.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        limit = min(limit or original, original) if original else limit
    if limit is not None and wanted is not None and wanted > limit:
        raise EvalError(f"max_model_len is {wanted}: this model has {limit} positions")
    return wanted or limit or 2048


def end_of_sequence_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that transformers' generate would stop at."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids: Any = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the embedding: the token ids that the model can take."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]
