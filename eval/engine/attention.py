"""Paged attention: one call per layer that writes the step's keys and values and attends over the block tables.

The one idea: a transformers model reaches this file through `AttentionInterface`; what a step looks like (who owns
which tokens, blocks and slots) is said once, in `StepContext`, and every backend reads it. `TorchAttention` is the
plain one that the others are tested against.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from eval.engine.kv_cache import KVCache
from eval.errors import EvalError

NAME = "quantgate_paged"


@dataclass
class StepContext:
    """One step's flat batch of T tokens from R requests, in order. `query_starts` [R + 1], `context_lens` [R] (tokens
    of the request after this step) and `block_tables` [R, blocks] are int32, `slot_mapping` [T] int64: where each
    token's key and value go. A request with a negative slot and no context is padding, which only the backends "torch"
    and "triton" take: nothing is written for it, and its output is zeros."""

    kv: KVCache
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor


class AttentionBackend(Protocol):
    name: str

    def attend(
        self,
        step: StepContext,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write key and value [T, kv_heads, head_dim] to the step's slots, then let query [T, heads, head_dim] attend
        causally to its own request. `window`: a token sees itself and the window - 1 tokens before it. Returns
        [T, heads, head_dim], contiguous, in the query's dtype."""
        ...


class TorchAttention:
    """Request by request, in float32, with torch operators: any dtype, any device, slow and plain."""

    name = "torch"

    def attend(
        self,
        step: StepContext,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        kept = step.slot_mapping >= 0
        step.kv.write(layer, step.slot_mapping[kept], key[kept], value[kept])
        block_size, groups = step.kv.block_size, query.shape[1] // key.shape[1]
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        starts, lens = step.query_starts.tolist(), step.context_lens.tolist()
        for row, context_len in enumerate(lens):
            if context_len == 0:
                continue
            blocks = step.block_tables[row, : -(-context_len // block_size)].long()
            offsets = torch.arange(block_size, device=blocks.device)
            slots = (blocks[:, None] * block_size + offsets).flatten()[:context_len]
            q = query[starts[row] : starts[row + 1]].float().transpose(0, 1)
            k, v = (rows.transpose(0, 1).repeat_interleave(groups, dim=0) for rows in step.kv.read(layer, slots))
            scores = q @ k.transpose(1, 2) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            key_positions = torch.arange(context_len, device=blocks.device)
            query_positions = key_positions[context_len - q.shape[1] :, None]
            visible = key_positions <= query_positions
            if window is not None:
                visible &= key_positions > query_positions - window
            weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
            output[starts[row] : starts[row + 1]] = (weights @ v).transpose(0, 1).to(output.dtype)
        return output


@dataclass
class LayerCall:
    """What one attention layer asked for when the model was probed; `unknown`: what the engine does not have."""

    layer: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None
    scaling: float
    softcap: float | None
    unknown: str | None


class _Active:
    """What the registered function does with a call: one engine steps at a time in a process."""

    backend: AttentionBackend | None = None
    step: StepContext | None = None
    calls: list[LayerCall] | None = None


_UNKNOWN_KINDS = ("s_aux", "sinks", "alibi", "position_bias")


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim];
    returns [1, T, heads, head_dim]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if _Active.calls is not None:
        unknown = next((name for name in _UNKNOWN_KINDS if kwargs.get(name) is not None), None)
        _Active.calls.append(
            LayerCall(layer, key.shape[1], key.shape[3], value.shape[3], sliding_window, scaling, softcap, unknown)
        )
        output = _causal_attention(query[0], key[0], value[0], scaling, sliding_window, softcap)
        return output.to(query.dtype)[None], None
    if _Active.step is None or _Active.backend is None:
        raise EvalError("this model belongs to an Engine: run it through generate, score or step")
    output = _Active.backend.attend(
        _Active.step,
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        sliding_window,
        softcap,
    )
    return output.unsqueeze(0), None


def _causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """All that the engine knows of attention, for one short sequence: [heads, T, head_dim] to [T, heads, head_dim]."""
    groups = query.shape[0] // key.shape[0]
    scores = query.float() @ key.float().repeat_interleave(groups, dim=0).transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    if window is not None:
        hidden |= hidden.new_ones(hidden.shape).tril(-window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return (weights @ value.float().repeat_interleave(groups, dim=0)).transpose(0, 1).contiguous()


@contextlib.contextmanager
def attending(backend: AttentionBackend, step: StepContext) -> Iterator[None]:
    """The model's attention calls inside belong to this step."""
    _Active.backend, _Active.step = backend, step
    try:
        yield
    finally:
        _Active.backend = _Active.step = None


@contextlib.contextmanager
def probing() -> Iterator[list[LayerCall]]:
    """The model's attention calls inside are ordinary causal attention over one sequence, and are listed."""
    calls: list[LayerCall] = []
    _Active.calls = calls
    try:
        yield calls
    finally:
        _Active.calls = None


AttentionInterface.register(NAME, _paged_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
