"""Trying a model before it serves: does every layer reach the paged attention, and does it compute what it did before?

The one idea: what a model needs is not read off its class but seen, in two short forwards. Whatever the attention
interface does not show (ALiBi, sinks, a second attention) changes the logits, and is refused by name.
"""

import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from eval.engine import attention
from eval.engine.attention import LayerCall
from eval.engine.kv_cache import KVGeometry
from eval.errors import EvalError

PROBE_TOKENS = 8
PROBE_BOUND = 0.1


@dataclass(frozen=True)
class Probe:
    """What a model showed when it was tried: the KV cache's geometry, what each attention layer asked for, and the
    float32 `logits` [PROBE_TOKENS, vocabulary] of `token_ids` at positions 0, 1, ..."""

    geometry: KVGeometry
    calls: list[LayerCall]
    token_ids: torch.Tensor
    logits: torch.Tensor


def probe(model: PreTrainedModel) -> Probe:
    """Put the paged attention under the model and see, by two short forwards, that every layer reaches it and that the
    logits stay what they were. Raises EvalError naming the model when they do not, or when its attention is of a kind
    that the engine does not have."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
        raise EvalError(f"{name}: its forward takes no logits_to_keep, so the engine cannot run it")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        unknown = ", ".join(sorted(kinds - {"full_attention", "sliding_attention"}))
        raise EvalError(f"{name}: it has layers of kind {unknown}; the engine runs full and sliding attention only")
    try:
        token_ids = probe_tokens(model)
        expected = _probe_logits(model, token_ids, "eager")
        with attention.probing() as calls:
            logits = _probe_logits(model, token_ids, attention.NAME)
    except (ValueError, KeyError) as error:
        raise EvalError(f"{name}: its attention cannot be replaced through AttentionInterface ({error})") from error
    geometry = _geometry_of(calls, name, config)
    if not expected[1:].any(dim=1).all():
        raise EvalError(
            f"{name}: its logits are all zero: its weights are, or {model.dtype} cannot hold what they compute"
        )
    # A mask or bias that the interface does not show changes every token after the first. Rounding changes a hundredth
    # of most, and now and then all of one that the model has hardly been trained on.
    difference = ((logits - expected).norm(dim=1) / expected.norm(dim=1))[1:].median()
    if difference.isnan():
        raise EvalError(
            f"{name}: its logits are not numbers: its weights are not, or {model.dtype} cannot hold what they compute"
        )
    if difference > PROBE_BOUND:
        raise EvalError(f"{name}: its attention is more than causal softmax attention; the engine cannot run it")
    return Probe(geometry, calls, token_ids, logits)


def probe_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Tokens that lie spread over the vocabulary: its first ones are often special, and bf16 noise then swamps their
    logits."""
    vocab_size = model.config.get_text_config().vocab_size
    return (torch.arange(PROBE_TOKENS, device=model.device) + 1) * vocab_size // (PROBE_TOKENS + 1)


def _probe_logits(model: PreTrainedModel, token_ids: torch.Tensor, implementation: str) -> torch.Tensor:
    """float32 logits [tokens, vocabulary], through an attention implementation that then stays."""
    model.set_attn_implementation(implementation)
    positions = torch.arange(len(token_ids), device=model.device)[None]
    with torch.inference_mode():
        output = model(input_ids=token_ids[None], position_ids=positions, use_cache=False)
    return output.logits[0].float()


def _geometry_of(calls: list[LayerCall], name: str, config: object) -> KVGeometry:
    layers = sorted(call.layer for call in calls)
    expected = list(range(getattr(config, "num_hidden_layers", 0)))
    if layers != expected:
        raise EvalError(
            f"{name}: {len(calls)} of its {len(expected)} layers reach transformers' AttentionInterface; "
            "the engine cannot run it"
        )
    unknown = {call.unknown for call in calls} - {None}
    if unknown:
        raise EvalError(f"{name}: its attention uses {', '.join(map(str, unknown))}, which the engine does not have")
    shapes = {(call.num_kv_heads, call.head_dim, call.value_head_dim) for call in calls}
    if len(shapes) != 1 or any(call.head_dim != call.value_head_dim for call in calls):
        raise EvalError(f"{name}: its layers' keys and values differ in shape ({shapes}); the engine needs them equal")
    kinds = getattr(config, "layer_types", None) or []
    if any(kinds[call.layer] == "sliding_attention" and call.window is None for call in calls if kinds):
        raise EvalError(f"{name}: a sliding-attention layer does not say its window; the engine cannot run it")
    return KVGeometry(len(calls), calls[0].num_kv_heads, calls[0].head_dim)
