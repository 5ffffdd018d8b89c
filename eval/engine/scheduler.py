"""Which tokens run in the next step.

The one idea: there are no phases. Each request's computed tokens catch up with prompt + output + draft, under one
budget of tokens per step; chunked prefill, prefix-cache hits, speculation, preemption (computed back to zero, outputs
kept) and resumption all follow from that. Decoding requests go first, since each of them wants one token only; drafts
go last: they are bets, made with what nobody else wanted of the step. Torch-free.
"""

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from eval.engine.block_pool import BlockPool, extend_hashes
from eval.engine.request import Request, Status
from eval.errors import EvalError

POLICIES = ("fcfs", "priority", "shortest-prompt")

AGEING_SECONDS = 10.0
"""What one class of priority is worth in waiting: a request goes before one of the next better class that came this
much later, so that nothing starves. All waiting requests age alike, so their order never changes and a heap holds."""


@dataclass(frozen=True)
class SchedulerConfig:
    """`max_logit_rows` bounds the [rows, vocabulary] logits of a step; `max_prefill_chunk` bounds one request's prefill
    tokens in a step (None: the whole budget); `watermark` is the share of blocks that an admission leaves free for
    those already running, which would otherwise soon be preempted. `max_total_tokens` is the model's context."""

    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    max_total_tokens: int
    max_logit_rows: int
    policy: str = "fcfs"
    max_prefill_chunk: int | None = None
    watermark: float = 0.02
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise EvalError(f"scheduler policy {self.policy!r} is unknown: use one of {', '.join(POLICIES)}")
        for name in ("max_num_seqs", "max_batched_tokens", "block_size", "max_total_tokens"):
            if getattr(self, name) < 1:
                raise EvalError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            raise EvalError(f"max_prefill_chunk is {self.max_prefill_chunk}: it must be at least 1, or None")
        if self.max_batched_tokens < self.max_num_seqs or self.max_logit_rows < self.max_num_seqs:
            raise EvalError(
                f"max_batched_tokens ({self.max_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "every decoding request takes one token per step"
            )


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a request, to be computed in this step."""

    request: Request
    start: int
    count: int


@dataclass
class StepPlan:
    """One step: `decodes` take one token each and come first in the flat batch, then `speculative`, which take their
    next token and their drafts, then `prefills`. `tables_changed` are the requests whose block table is new or has
    changed. `copies` are (from, to): blocks to be copied before anything is computed."""

    decodes: list[Request] = field(default_factory=list)
    speculative: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    tables_changed: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: int = 0
    prefix_hit_tokens: int = 0
    prefix_queried_tokens: int = 0

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.count for chunk in self.prefills)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.count for chunk in self.speculative) + self.prefill_tokens

    def requests(self) -> Iterator[Request]:
        yield from self.decodes
        for chunk in (*self.speculative, *self.prefills):
            yield chunk.request


class Scheduler:
    """Invariants: a request is in `running` (policy order) if and only if it is RUNNING; it then owns the blocks for
    all its tokens at admission, so only a decoding request can find the pool empty, and the last in policy order
    pays for that. No token is computed into a block that two requests own: a decoding request copies it first."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, root: bytes):
        self.config = config
        self.pool = pool
        self.running: list[Request] = []
        self._forked: list[Request] = []
        self._root = root
        self._waiting: list[tuple[tuple[float, ...], Request]] = []
        self._rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.num_waiting = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises EvalError, with the numbers, for one that could never run."""
        total = request.max_total_tokens
        if request.num_tokens < 1:
            raise EvalError(f"request {request.request_id}: the prompt has no tokens")
        # The last sampled token takes a position of the context, though never a slot of the cache.
        positions = total + (request.targets is None)
        if positions > self.config.max_total_tokens:
            raise EvalError(
                f"request {request.request_id} can never fit: {request.num_prompt_tokens} prompt tokens and "
                f"max_tokens={request.params.max_tokens} exceed the context of {self.config.max_total_tokens} tokens"
            )
        if self._blocks_for(total) > self.pool.num_blocks:
            raise EvalError(
                f"request {request.request_id} can never fit: its {total} tokens take {self._blocks_for(total)} KV "
                f"blocks of {self.config.block_size} and the cache has {self.pool.num_blocks}: raise kv_cache_bytes"
            )
        self._enqueue(request)
        self.num_waiting += len(request.siblings)

    def schedule(self) -> StepPlan:
        """Choose the next step's tokens, give them blocks, and name the blocks that they fill."""
        plan = StepPlan()
        self._schedule_decodes(plan)
        tokens_left = self.config.max_batched_tokens - len(plan.decodes)
        rows_left = self.config.max_logit_rows - len(plan.decodes)
        for request in self.running:
            if not request.is_decoding:
                count = self._chunk_size(request, request.num_computed_tokens, tokens_left, rows_left)
                if count > 0:
                    tokens_left, rows_left = self._schedule_chunk(plan, request, count, tokens_left, rows_left)
        if plan.preempted == 0:
            tokens_left, rows_left = self._admit(plan, tokens_left, rows_left)
        self._schedule_drafts(plan, min(tokens_left, rows_left))
        plan.tables_changed += [request for request in self._forked if request.status is Status.RUNNING]
        self._forked = []
        return plan

    def advance(self, plan: StepPlan) -> None:
        """The plan's tokens are in the cache now; its drafts may be, and count from `accept` on."""
        for request in plan.decodes:
            request.num_computed_tokens += 1
        for chunk in plan.speculative:
            chunk.request.num_computed_tokens += 1
        for chunk in plan.prefills:
            chunk.request.num_computed_tokens += chunk.count

    def accept(self, request: Request, count: int) -> None:
        """The first `count` drafts of the last plan turned out to be the request's tokens: what was computed of them
        holds, and the blocks that they fill may be found. The slots of the others will be written again."""
        start = request.num_computed_tokens
        request.num_computed_tokens += count
        self._name_full_blocks(request, start, request.num_computed_tokens)

    def fork(self, leader: Request) -> list[Request]:
        """The prompt of `leader` is computed, and its siblings have their first token too: they go on from the same
        blocks. One that finds no row waits, as if it had been preempted. Gives those that run."""
        forked = []
        for sibling in leader.siblings:
            if sibling.finished:
                continue
            self.num_waiting -= 1
            if not self._rows:
                sibling.status = Status.PREEMPTED
                self._enqueue(sibling)
                continue
            computed = leader.num_computed_tokens
            sibling.block_ids = leader.block_ids[: self._blocks_for(computed)]
            sibling.block_hashes = leader.block_hashes[: computed // self.config.block_size]
            self.pool.share(sibling.block_ids)
            sibling.num_computed_tokens = sibling.prompt_cache_hit = computed
            self._start_running(sibling)
            forked.append(sibling)
        leader.siblings = []
        self._forked += forked
        return forked

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request in any state and give its blocks back."""
        if request.status is Status.RUNNING:
            self._stop_running(request)
        elif not request.finished:
            self.num_waiting -= 1
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.error = error

    def check_integrity(self) -> None:
        """Raise EvalError unless the pool is whole and every row is either free or one running request's."""
        self.pool.check_integrity([request.block_ids for request in self.running])
        rows = self._rows + [request.row for request in self.running]
        if sorted(rows) != list(range(self.config.max_num_seqs)):
            raise EvalError("the scheduler's rows are not whole: a row is lost or used twice")

    def _schedule_decodes(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            if not request.is_decoding:
                continue
            while self._lacks_block(request) and self.pool.num_free == 0:
                self._preempt(self.running[-1])
                plan.preempted += 1
                if request.status is not Status.RUNNING:
                    return
            if self._lacks_block(request):
                self._give_block(plan, request)
            plan.decodes.append(request)
            self._name_full_blocks(request, request.num_tokens - 1, request.num_tokens)

    def _lacks_block(self, request: Request) -> bool:
        """Whether a decoding request has no block of its own for its next token."""
        place = (request.num_tokens - 1) // self.config.block_size
        return place == len(request.block_ids) or self.pool.is_shared(request.block_ids[place])

    def _give_block(self, plan: StepPlan, request: Request) -> None:
        """A block for the next token: one more, or a copy of the one that others own too."""
        place = (request.num_tokens - 1) // self.config.block_size
        block = self.pool.allocate(1)
        if place < len(request.block_ids):
            plan.copies.append((request.block_ids[place], block[0]))
            self.pool.release(request.block_ids[place : place + 1])
        request.block_ids[place : place + 1] = block
        plan.tables_changed.append(request)

    def _schedule_drafts(self, plan: StepPlan, left: int) -> None:
        """Let decoding requests compute their drafts along, within `left` tokens and rows of logits and the blocks that
        are free: a draft preempts nobody. What finds no room is dropped."""
        plain = []
        for request in plan.decodes:
            room = len(request.block_ids) * self.config.block_size - request.num_tokens
            wanted = min(len(request.draft_token_ids), left)
            blocks = min(self._blocks_for(max(0, wanted - room)), self.pool.num_free)
            count = min(wanted, room + blocks * self.config.block_size)
            del request.draft_token_ids[count:]
            if count == 0:
                plain.append(request)
                continue
            if blocks:
                request.block_ids += self.pool.allocate(blocks)
                plan.tables_changed.append(request)
            plan.speculative.append(Chunk(request, request.num_tokens - 1, 1 + count))
            left -= count
        plan.decodes = plain

    def _admit(self, plan: StepPlan, tokens_left: int, rows_left: int) -> tuple[int, int]:
        watermark = max(1, round(self.config.watermark * self.pool.num_blocks))
        while tokens_left > 0 and len(self.running) < self.config.max_num_seqs and self._drop_finished():
            request = self._waiting[0][1]
            hits: list[int] = []
            if self.config.prefix_caching:
                extend_hashes(request.block_hashes, request.token_ids, self.config.block_size, self._root)
                hits = self.pool.match(request.block_hashes[: request.first_needed_position // self.config.block_size])
            start = len(hits) * self.config.block_size
            needed = self._blocks_for(request.num_tokens) - len(hits)
            reserve = watermark if self.running else 0
            count = self._chunk_size(request, start, tokens_left, rows_left)
            if self.pool.num_free_after(hits) - needed < reserve or count == 0:
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            self.pool.share(hits)
            request.block_ids = hits + self.pool.allocate(needed)
            request.num_computed_tokens = start
            # Recomputation after preemption is not a hit of the prompt: it would flatter the reuse rate.
            if request.prompt_cache_hit is None:
                request.prompt_cache_hit = start
                plan.prefix_hit_tokens += start
                plan.prefix_queried_tokens += request.num_tokens
            self._start_running(request)
            plan.tables_changed.append(request)
            tokens_left, rows_left = self._schedule_chunk(plan, request, count, tokens_left, rows_left)
        return tokens_left, rows_left

    def _chunk_size(self, request: Request, start: int, tokens_left: int, rows_left: int) -> int:
        count = min(request.num_tokens - start, tokens_left)
        if self.config.max_prefill_chunk is not None:
            count = min(count, self.config.max_prefill_chunk)
        return min(count, max(0, request.first_needed_position - start) + rows_left)

    def _schedule_chunk(
        self, plan: StepPlan, request: Request, count: int, tokens_left: int, rows_left: int
    ) -> tuple[int, int]:
        start = request.num_computed_tokens
        plan.prefills.append(Chunk(request, start, count))
        self._name_full_blocks(request, start, start + count)
        return tokens_left - count, rows_left - request.logit_rows(start, count)

    def _name_full_blocks(self, request: Request, start: int, end: int) -> None:
        """Name the blocks that [start, end) fills. Before they are computed: in every layer a step writes all its keys
        and values before any of its tokens attends, so a request admitted in the same step may already share them."""
        size = self.config.block_size
        if not self.config.prefix_caching or end // size == start // size:
            return
        extend_hashes(request.block_hashes, request.token_ids, size, self._root)
        for index in range(start // size, end // size):
            self.pool.name(request.block_ids[index], request.block_hashes[index])

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.preemptions += 1
        self._enqueue(request)

    def _start_running(self, request: Request) -> None:
        request.status = Status.RUNNING
        request.row = self._rows.pop()
        insort(self.running, request, key=self._order)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        self._rows.append(request.row)
        request.row = -1

    def _enqueue(self, request: Request) -> None:
        key = self._order(request)
        if self.config.policy == "shortest-prompt":
            key = (request.status is not Status.PREEMPTED, *key)
        heapq.heappush(self._waiting, (key, request))
        self.num_waiting += 1

    def _drop_finished(self) -> bool:
        """Drop aborted requests from the queue's head; whether a live one is left."""
        while self._waiting and self._waiting[0][1].finished:
            heapq.heappop(self._waiting)
        return bool(self._waiting)

    def _order(self, request: Request) -> tuple[float, ...]:
        """Policy order; earlier arrivals first within it, which puts a preempted request before all that wait."""
        if self.config.policy == "priority":
            return (request.arrival + request.priority * AGEING_SECONDS, request.sequence)
        if self.config.policy == "shortest-prompt":
            return (request.num_prompt_tokens, request.sequence)
        return (request.sequence,)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)
