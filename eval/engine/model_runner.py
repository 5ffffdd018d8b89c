"""Runs the model on a step's flat token batch.

The one idea: everything a step needs lives in persistent arrays with one row per running request (its last token, its
length, its block table), so that a decode step is built by indexing with rows, without a loop over requests and
without an allocation that grows with the context.
"""

import inspect
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from eval.engine import attention
from eval.engine.attention import AttentionBackend, LayerCall, StepContext
from eval.engine.kv_cache import KVCache, KVGeometry
from eval.engine.request import Request
from eval.engine.scheduler import StepPlan
from eval.errors import EvalError

PROBE_TOKENS = 8
PROBE_BOUND = 0.1


def probe_geometry(model: PreTrainedModel) -> KVGeometry:
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
        expected = _probe_logits(model, "eager")
        with attention.probing() as calls:
            logits = _probe_logits(model, attention.NAME)
    except (ValueError, KeyError) as error:
        raise EvalError(f"{name}: its attention cannot be replaced through AttentionInterface ({error})") from error
    geometry = _geometry_of(calls, name, config)
    # A mask or bias that the interface does not show changes every token after the first. Rounding changes a hundredth
    # of most, and now and then all of one that the model has hardly been trained on.
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    if errors[1:].median() > PROBE_BOUND:
        raise EvalError(f"{name}: its attention is more than causal softmax attention; the engine cannot run it")
    return geometry


def _probe_logits(model: PreTrainedModel, implementation: str) -> torch.Tensor:
    """float32 logits [tokens, vocabulary] of a few tokens, through an attention implementation that then stays. The
    tokens lie spread over the vocabulary: its first ones are often special, and bf16 noise then swamps their logits."""
    model.set_attn_implementation(implementation)
    vocab_size = model.config.get_text_config().vocab_size
    positions = torch.arange(PROBE_TOKENS, device=model.device)[None]
    with torch.inference_mode():
        ids = (positions + 1) * vocab_size // (PROBE_TOKENS + 1)
        output = model(input_ids=ids, position_ids=positions, use_cache=False)
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


@dataclass(frozen=True)
class StepLogits:
    """`logits` [rows, vocabulary]: first one row per entry of `sampled`, then each scored chunk's rows: (request, first
    position, count). A request with drafts is in `sampled` once for its next token and once per draft; `ahead` says how
    many of its drafts a row takes for granted."""

    logits: torch.Tensor
    sampled: list[Request]
    ahead: list[int]
    scored: list[tuple[Request, int, int]]


class ModelRunner:
    """Row r of the tables belongs to the running request whose `row` is r; `_lengths[r]` is how many of its tokens are
    in the cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCache,
        backend: AttentionBackend,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_total_tokens: int,
    ):
        self.model = model
        self.backend = backend
        self._kv = kv
        self._device = kv.device
        self._block_size = kv.block_size
        self._lengths = np.zeros(max_num_seqs, np.int64)
        self._last_tokens = np.zeros(max_num_seqs, np.int64)
        self._tables = np.zeros((max_num_seqs, -(-max_total_tokens // self._block_size)), np.int32)
        self._token_ids = np.zeros(max_batched_tokens, np.int64)
        self._positions = np.zeros(max_batched_tokens, np.int64)
        self._slots = np.zeros(max_batched_tokens, np.int64)
        self._starts = np.zeros(max_num_seqs + 1, np.int32)
        self._context_lens = np.zeros(max_num_seqs, np.int32)

    def execute(self, plan: StepPlan) -> StepLogits:
        """Compute the plan's tokens and the logits of the rows that are wanted, and of no others."""
        if plan.copies:
            sources, targets = (list(blocks) for blocks in zip(*plan.copies, strict=True))
            for tensor in self._kv.tensors:
                # All are read before any is written: a source may be a target of the same step.
                tensor[:, :, targets] = tensor[:, :, sources]
        for request in plan.tables_changed:
            self._tables[request.row, : len(request.block_ids)] = request.block_ids
        rows = self._fill_decodes(plan)
        logit_rows = list(range(len(plan.decodes)))
        sampled, scored = list(plan.decodes), []
        ahead = [0] * len(plan.decodes)
        token = len(plan.decodes)
        scored_rows: list[int] = []
        for index, chunk in enumerate((*plan.speculative, *plan.prefills), start=len(plan.decodes)):
            request, start, end = chunk.request, chunk.start, chunk.start + chunk.count
            after = token + chunk.count
            drafts = request.draft_token_ids
            self._token_ids[token : after - len(drafts)] = request.token_ids[start:end]
            self._token_ids[after - len(drafts) : after] = drafts
            positions = np.arange(start, end)
            self._positions[token:after] = positions
            blocks = self._tables[request.row, positions // self._block_size].astype(np.int64)
            self._slots[token:after] = blocks * self._block_size + positions % self._block_size
            self._starts[index + 1] = after
            self._context_lens[index] = end
            self._lengths[request.row] = end
            if end < request.num_tokens:
                self._last_tokens[request.row] = request.token_ids[end]
            rows.append(request.row)
            wanted = request.logit_rows(start, chunk.count)
            if request.targets is not None and wanted:
                scored_rows += range(after - wanted, after)
                scored.append((request, end - wanted, wanted))
            elif wanted:
                logit_rows += range(after - wanted, after)
                sampled += [request] * wanted
                ahead += range(wanted)
            token = after
        logits = self._forward(token, rows, logit_rows + scored_rows)
        return StepLogits(logits, sampled, ahead, scored)

    def remember(self, requests: list[Request]) -> None:
        """The next decode step starts from these running requests' newest tokens."""
        rows = [request.row for request in requests]
        self._last_tokens[rows] = [request.token_ids[-1] for request in requests]
        self._lengths[rows] = [request.num_computed_tokens for request in requests]

    def _fill_decodes(self, plan: StepPlan) -> list[int]:
        rows = [request.row for request in plan.decodes]
        count = len(rows)
        lengths = self._lengths[rows]
        self._token_ids[:count] = self._last_tokens[rows]
        self._positions[:count] = lengths
        blocks = self._tables[rows, lengths // self._block_size]
        self._slots[:count] = blocks.astype(np.int64) * self._block_size + lengths % self._block_size
        self._starts[: count + 1] = np.arange(count + 1)
        self._context_lens[:count] = lengths + 1
        self._lengths[rows] += 1
        return rows

    def _forward(self, num_tokens: int, rows: list[int], logit_rows: list[int]) -> torch.Tensor:
        """[logit_rows, vocabulary]"""

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self._device)

        widest = -(-int(self._context_lens[: len(rows)].max()) // self._block_size)
        step = StepContext(
            kv=self._kv,
            query_starts=tensor(self._starts[: len(rows) + 1]),
            context_lens=tensor(self._context_lens[: len(rows)]),
            block_tables=tensor(self._tables[rows, :widest]),
            slot_mapping=tensor(self._slots[:num_tokens]),
        )
        # One row at least: some models cannot project an empty selection.
        keep = torch.tensor(logit_rows or [num_tokens - 1], device=self._device)
        with attention.attending(self.backend, step):
            output = self.model(
                input_ids=tensor(self._token_ids[:num_tokens]).unsqueeze(0),
                position_ids=tensor(self._positions[:num_tokens]).unsqueeze(0),
                use_cache=False,
                logits_to_keep=keep,
            )
        logits: torch.Tensor = output.logits[0]
        return logits[: len(logit_rows)]
