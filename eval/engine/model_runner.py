"""Runs the model on a step's flat token batch.

The one idea: everything a step needs lives in persistent arrays with one row per running request (its last token, its
length, its block table), so that a decode step is built by indexing with rows, without a loop over requests.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from eval.engine import attention
from eval.engine.attention import AttentionBackend, StepContext
from eval.engine.backends import choose_backend
from eval.engine.config import EngineConfig
from eval.engine.decode_graphs import CannotRecord, DecodeGraphs, Record, on_its_way, record_cuda_graph
from eval.engine.decoder_plan import NotDescribed
from eval.engine.decoder_step import MAX_TOKENS, DecoderStep, native_step
from eval.engine.kv_cache import KVCache
from eval.engine.probe import Probe
from eval.engine.request import Request
from eval.engine.scheduler import StepPlan


@dataclass(frozen=True)
class StepLogits:
    """`logits` [rows, vocabulary]: first one row per entry of `sampled`, then each scored chunk's rows: (request, first
    position, count). A request with drafts is in `sampled` once for its next token and once per draft; `ahead` says how
    many of its drafts a row takes for granted."""

    logits: torch.Tensor
    sampled: list[Request]
    ahead: list[int]
    scored: list[tuple[Request, int, int]]


@dataclass
class _Ahead:
    """The step after the last one, already given to the device: one more token for each of `requests`, which are
    `lengths` long in the cache before it. `token_ids` [requests] were chosen on the device; `chosen` is what they were,
    once that is known here."""

    requests: list[Request]
    lengths: list[int]
    token_ids: torch.Tensor
    logits: torch.Tensor
    chosen: list[int] | None = None


def _steps(native: DecoderStep | NotDescribed | None, max_batched_tokens: int) -> str:
    """What computes the steps, for the evidence."""
    if not isinstance(native, DecoderStep):
        return f"module tree: {native}"
    return "native" if max_batched_tokens <= MAX_TOKENS else f"native up to {MAX_TOKENS} tokens, module tree above"


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
        native: DecoderStep | NotDescribed | None = None,
        record: Record | None = None,
    ):
        """`native` runs the steps of up to its MAX_TOKENS tokens, the model's own modules the others, or says why there
        is none. `record` makes recordings of decode steps; None: CUDA graphs on a GPU, and none elsewhere."""
        self.model = model
        self.backend = backend
        self.native = native if isinstance(native, DecoderStep) else None
        self.steps = _steps(native, max_batched_tokens)
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
        if record is None and self._device.type == "cuda" and backend.name == "triton":
            record = record_cuda_graph
        self._graphs: DecodeGraphs | None = None
        if record is not None:
            self._graphs = DecodeGraphs(self._run_model, kv, max_num_seqs, self._tables.shape[1], record)
        self._ahead: _Ahead | None = None
        self._sampling_stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @classmethod
    def of(
        cls, model: PreTrainedModel, seen: Probe, kv: KVCache, config: EngineConfig, max_total_tokens: int
    ) -> "ModelRunner":
        """With the attention backend that the config asks for, and the native step where the model has one."""
        backend = choose_backend(config.attention_backend, seen.geometry.head_dim, model.dtype, kv.dtype, model.device)
        native = native_step(model, seen, kv, backend, max_total_tokens)
        return cls(model, kv, backend, config.max_num_seqs, config.max_batched_tokens, max_total_tokens, native)

    def execute(self, plan: StepPlan) -> StepLogits:
        """Compute the plan's tokens and the logits of the rows that are wanted, and of no others."""
        early, self._ahead = self._ahead, None
        if plan.copies:
            sources, targets = (list(blocks) for blocks in zip(*plan.copies, strict=True))
            for tensor in self._kv.tensors:
                # All are read before any is written: a source may be a target of the same step.
                tensor[:, :, targets] = tensor[:, :, sources]
        for request in plan.tables_changed:
            self._tables[request.row, : len(request.block_ids)] = request.block_ids
        if early is not None and (kept := self._rows_ahead(early, plan)) is not None:
            self._fill_decodes(plan)
            logits = early.logits if kept == list(range(len(early.requests))) else early.logits[kept]
            return StepLogits(logits, list(plan.decodes), [0] * len(plan.decodes), [])
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

    def run_ahead(self, plan: StepPlan, result: StepLogits) -> StepLogits:
        """Give the device its next step before this one is read, if that is sure to be the same requests with one
        greedy token more in the block they are in; whoever ends meanwhile is left out of its result later. Gives this
        step's result, which the next one does not write over."""
        requests = plan.decodes
        simple = self._graphs is not None and requests and not plan.prefills and not plan.speculative
        if not simple or not all(map(self._goes_on, requests)):
            return result
        assert self._graphs is not None
        logits = result.logits.clone()
        token_ids = logits.argmax(dim=-1)
        rows = [request.row for request in requests]
        lengths = self._lengths[rows]
        if self._sampling_stream is not None:
            self._sampling_stream.wait_stream(torch.cuda.current_stream(self._device))
        blocks = self._tables[rows, lengths // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + lengths % self._block_size
        context_lens = (lengths + 1).astype(np.int32)
        following = self._graphs.run(token_ids, lengths, slots, context_lens, self._tables_of(rows))
        self._ahead = _Ahead(list(requests), lengths.tolist(), token_ids, following)
        return replace(result, logits=logits)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """What is read from the device inside waits for this step only, not for the one that runs ahead."""
        if self._ahead is None:
            yield
            return
        with torch.cuda.stream(self._sampling_stream):
            yield
            self._ahead.chosen = self._ahead.token_ids.tolist()

    def release_scratch(self) -> None:
        """Give back the activations' memory that native steps keep; a module tree keeps none."""
        if self.native is not None:
            self.native.release_scratch()

    def _goes_on(self, request: Request) -> bool:
        """Whether the request's next step is known but for the token: greedy, at least two tokens from its limit, and
        in a block of its own that has room. A new block could be another's, or be missing."""
        params = request.params
        greedy = params.temperature == 0 and not params.penalises and not params.min_tokens and params.logprobs is None
        return (
            greedy and request.num_output_tokens + 2 <= params.max_tokens and request.num_tokens % self._block_size > 0
        )

    def _rows_ahead(self, ahead: _Ahead, plan: StepPlan) -> list[int] | None:
        """Where the plan's requests are in the step that ran ahead; None unless that step computed just this plan."""
        if plan.prefills or plan.speculative or plan.copies or ahead.chosen is None:
            return None
        place = {id(request): index for index, request in enumerate(ahead.requests)}
        kept = [place.get(id(request), -1) for request in plan.decodes]
        for index, request in zip(kept, plan.decodes, strict=True):
            if index < 0 or self._lengths[request.row] != ahead.lengths[index]:
                return None
            if self._last_tokens[request.row] != ahead.chosen[index]:
                return None
        return kept

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

    def _tables_of(self, rows: list[int]) -> np.ndarray:
        """[rows, blocks of the longest]; a step that runs ahead stays in the block that the last one was in."""
        widest = -(-int(self._lengths[rows].max()) // self._block_size)
        return self._tables[rows, :widest]

    def _forward(self, num_tokens: int, rows: list[int], logit_rows: list[int]) -> torch.Tensor:
        """[logit_rows, vocabulary]"""
        if self._graphs is not None and len(rows) == num_tokens and logit_rows == list(range(num_tokens)):
            try:
                return self._graphs.run(
                    self._token_ids[:num_tokens],
                    self._positions[:num_tokens],
                    self._slots[:num_tokens],
                    self._context_lens[:num_tokens],
                    self._tables_of(rows),
                )
            except CannotRecord as reason:
                self._graphs = None
                warnings.warn(f"decode steps are not recorded as CUDA graphs, so slower: {reason}", stacklevel=2)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return on_its_way(torch.from_numpy(array), self._device).to(self._device, non_blocking=True)

        step = StepContext(
            kv=self._kv,
            query_starts=tensor(self._starts[: len(rows) + 1]),
            context_lens=tensor(self._context_lens[: len(rows)]),
            block_tables=tensor(self._tables_of(rows)),
            slot_mapping=tensor(self._slots[:num_tokens]),
        )
        # One row at least: some models cannot project an empty selection.
        keep = torch.tensor(logit_rows or [num_tokens - 1], device=self._device)
        ids, positions = tensor(self._token_ids[:num_tokens]), tensor(self._positions[:num_tokens])
        if self.native is not None and num_tokens <= MAX_TOKENS:
            return self.native.run(ids, positions, step, keep)[: len(logit_rows)]
        return self._run_model(ids, positions, step, keep)[: len(logit_rows)]

    def _run_model(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepContext, keep: torch.Tensor | int = 0
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] of the rows to `keep`; 0 keeps all."""
        with attention.attending(self.backend, step):
            output = self.model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=keep,
            )
        logits: torch.Tensor = output.logits[0]
        return logits
