"""The engine: requests in, tokens and logprobs out.

The one idea: `step` runs one scheduler plan through the model and hands every request what became of its tokens;
`generate` and `score` are loops around it, so that what is scored and what is timed went the same way.
"""

import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.engine.block_pool import BlockPool, root_hash
from eval.engine.config import EngineConfig, compute_named
from eval.engine.draft_model import DraftModel
from eval.engine.fingerprint import engine_fingerprint
from eval.engine.identity import (
    checkpoint_digests,
    context_tokens,
    end_of_sequence_ids,
    model_digest,
    vocabulary_size,
)
from eval.engine.kv_cache import KV_DTYPES, MODEL_DTYPES, KVCache, choose_num_blocks
from eval.engine.model_runner import ModelRunner, StepLogits
from eval.engine.native_linear import use_native_linears
from eval.engine.outcomes import Completion, Outcome, Score, StepOutput, completion_of, take_samples, take_scores
from eval.engine.packing_probe import refuse_unless_packable
from eval.engine.probe import probe
from eval.engine.prompts import Prompt, encode, encode_pair, load_tokenizer
from eval.engine.request import Request, SamplingParams
from eval.engine.sampler import sample_each
from eval.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from eval.engine.speculative import PROMPT_LOOKUP, PromptLookup, Speculator
from eval.engine.telemetry import StepRecord, Telemetry
from eval.errors import EvalError
from quantize.load import load_model, numerics
from quantize.progress import Progress

ENGINE_VERSION = "0.3.0"


class Engine:
    """Owns a model, whose attention it replaces, and a paged KV cache. Not for use by two threads at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        digests: dict[str, str | None] | None = None,
    ):
        """`digests` may give weights_digest, tokenizer_digest and chat_template_digest; what it lacks is computed
        from the model or left empty. Raises EvalError for a model that the engine cannot run."""
        self.config = config = config or EngineConfig()
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.telemetry = Telemetry()
        self._digests = {"tokenizer_digest": None, "chat_template_digest": None, **(digests or {})}
        weights_digest = self._digests.setdefault("weights_digest", None) or model_digest(model)
        self._digests["weights_digest"] = weights_digest
        seen = probe(model)
        geometry = seen.geometry
        refuse_unless_packable(model, geometry)
        self._vocab_size = vocabulary_size(model)
        self._context = context_tokens(model, config.max_model_len)
        self._kv_dtype = model.dtype if config.kv_dtype == "auto" else KV_DTYPES[config.kv_dtype]
        self._block_bytes = geometry.block_bytes(config.block_size, self._kv_dtype)
        self._speculator: Speculator | None = None
        self._draft_model: DraftModel | None = None
        if config.speculative == PROMPT_LOOKUP:
            self._speculator = PromptLookup(config.speculative_tokens)
        elif config.speculative is not None:
            if not Path(config.speculative).exists():
                raise EvalError(
                    f"speculative {config.speculative!r}: it is neither {PROMPT_LOOKUP} nor a checkpoint that is there"
                )
            self._speculator = self._draft_model = DraftModel(Path(config.speculative), model, tokenizer, config)
        num_blocks = config.num_blocks or choose_num_blocks(
            self._block_bytes + (self._draft_model.block_bytes if self._draft_model else 0),
            config.block_size,
            config.max_num_seqs,
            self._context,
            model.device,
            config.kv_cache_bytes,
        )
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_batched_tokens=config.max_batched_tokens,
                block_size=config.block_size,
                max_total_tokens=self._context,
                max_logit_rows=max(
                    config.max_num_seqs, config.logits_bytes // (self._vocab_size * model.dtype.itemsize)
                ),
                policy=config.scheduler_policy,
                max_prefill_chunk=config.max_prefill_chunk,
                prefix_caching=config.prefix_caching,
            ),
            self.pool,
            root_hash(weights_digest, str(self._kv_dtype)),
        )
        self._kv = KVCache.allocate(geometry, num_blocks, config.block_size, self._kv_dtype, model.device)
        if self._draft_model is not None:
            self._draft_model.allocate(num_blocks, self._context)
        self._native_linears = use_native_linears(model)
        self._runner = ModelRunner.of(model, seen, self._kv, config, self._context)
        self._stop_ids = end_of_sequence_ids(model)
        self._requests: dict[str, list[Request]] = {}
        self._undelivered: list[StepOutput] = []
        self._sequence = 0
        self._step = 0

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        compute: str = "auto",
        **options: Any,
    ) -> "Engine":
        """The engine on a checkpoint folder; `compute` is "auto" (the checkpoint's own), "a16" or "a8", `options` are
        EngineConfig's fields. Raises QuantizeError for a bad checkpoint, and for a `compute` that it cannot have, and
        EvalError for a bad option, each in one line."""
        config = EngineConfig.from_options(options)
        if dtype != "auto" and dtype not in MODEL_DTYPES:
            raise EvalError(f"dtype {dtype!r} is unknown: use auto, {', '.join(MODEL_DTYPES)}")
        chosen = None if dtype == "auto" else MODEL_DTYPES[dtype]
        model = load_model(Path(path), device=device, dtype=chosen, compute=compute_named(compute))
        return cls(model, load_tokenizer(Path(path)), config, checkpoint_digests(Path(path)))

    # Requests one by one

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival: float | None = None,
        **labels: str,
    ) -> str:
        """Queue a request and give its id. A lower `priority` runs earlier; `arrival` is on time.perf_counter's clock,
        in seconds; `labels` (trace_id, route_id) go into the telemetry. Raises EvalError, with the numbers, for a
        request that can never run."""
        samples = self._new_request(self._encode(prompt), params or SamplingParams(), request_id, priority, arrival)
        for sample in samples:
            sample.labels.update(labels)
        self._submit(samples)
        return samples[0].group_id

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def samples_of(self, request_id: str) -> list[Request]:
        """The states of those of a request's n samples that have not ended."""
        return list(self._requests.get(request_id, ()))

    def abort(self, request_id: str) -> None:
        """End a request now, if it is still there, with all its samples; its blocks are free at once."""
        for sample in self.samples_of(request_id):
            if not sample.finished:
                self._finish(sample, "abort")

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one step. One output per request that got a token or ended."""
        outputs, self._undelivered = self._undelivered, []
        evictions = self.pool.evictions
        started = time.perf_counter()
        outputs += self._draft()
        plan = self.scheduler.schedule()
        if plan.num_tokens == 0:
            return outputs
        for chunk in plan.prefills:
            if chunk.request.first_scheduled is None:
                chunk.request.first_scheduled = started
        used_blocks = self.pool.num_used
        active = len(self.scheduler.running)
        decode_tokens = len(plan.decodes)
        try:
            result = self._runner.execute(plan)
            if self._speculator is None and self.scheduler.num_waiting == 0 and len(plan.decodes) == active:
                result = self._runner.run_ahead(plan, result)
            self.scheduler.advance(plan)
            with self._runner.sampling():
                for outcome in self._outcomes(result):
                    if outcome.drafted:
                        decode_tokens += len(outcome.new_token_ids)
                    outputs += self._settle(outcome)
        except BaseException as error:
            # The plan's blocks are named but hold nothing sure: nobody may find them.
            self.pool.forget_all()
            outputs += self._fail(list(plan.requests()), error)
            if not isinstance(error, Exception):
                self._undelivered = outputs
                raise
        self._record_step(plan, started, active, used_blocks, self.pool.evictions - evictions, decode_tokens)
        return outputs

    @property
    def context_tokens(self) -> int:
        """Tokens that a prompt and its completion may have together: the model's context, or what the cache holds."""
        return min(self._context, self.pool.num_blocks * self.config.block_size)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def check_integrity(self) -> None:
        """Raise EvalError unless every KV block and row is accounted for."""
        self.scheduler.check_integrity()
        if self._draft_model is not None:
            self._draft_model.check_integrity()

    # Many at once

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Completions in the order of `prompts`. Raises EvalError, before anything runs, when one can never run."""
        if isinstance(prompts, str):
            raise EvalError("generate takes a list of prompts: put the one prompt into a list")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise EvalError(f"generate got {len(prompts)} prompts and {len(each)} sampling parameters")
        requests = [self._new_request(self._encode(prompt), one) for prompt, one in zip(prompts, each, strict=True)]
        self._run(requests, "generate", progress)
        return [completion_of(samples, self.tokenizer) for samples in requests]

    def score(self, pairs: Sequence[tuple[Prompt, Prompt]], progress: Progress | None = None) -> list[Score]:
        """Log-likelihood of each continuation after its context. A context must have one token at least: nothing
        conditions the first token of a text. Raises EvalError for an empty context and for a failed request."""
        requests = [self._scoring_request(index, *pair) for index, pair in enumerate(pairs)]
        self._run([[request] for request in requests if request is not None], "score", progress)
        scores = []
        for index, request in enumerate(requests):
            if request is not None and request.finish_reason == "error":
                raise EvalError(f"scoring pair {index} failed: {request.error}")
            scores.append(Score([], True) if request is None else Score(request.scored, request.scored_greedy))
        return scores

    def score_stream(self, pairs: Sequence[tuple[Prompt, Prompt]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Full-vocabulary logprobs, in pieces as they are computed: (pair, offset in its continuation, logprobs
        [tokens, vocabulary] in float32). A preempted pair never repeats a token."""
        ready: deque[tuple[int, int, torch.Tensor]] = deque()

        def sink_for(index: int) -> Callable[[int, torch.Tensor], None]:
            return lambda offset, logits: ready.append((index, offset, logits.float().log_softmax(dim=-1)))

        requests = [self._scoring_request(index, *pair) for index, pair in enumerate(pairs)]
        live = [request for request in requests if request is not None]
        for index, request in enumerate(requests):
            if request is not None:
                request.logprob_sink = sink_for(index)
        done = 0
        with self._submitted([[request] for request in live]) as mine:
            while done < len(live) and self.has_unfinished():
                done += self._step_for(mine)
                while ready:
                    yield ready.popleft()
        for request in live:
            if request.finish_reason == "error":
                raise EvalError(f"scoring failed: {request.error}")

    # What the engine is

    def identity(self) -> dict[str, Any]:
        """What decides the engine's numbers: two engines of equal identity give equal qualities."""
        numbers = numerics(self.model)
        kernels = numbers["kernels"] | dict.fromkeys(self._native_linears, "native-bf16-linear")
        counts: dict[str, int] = {}
        for kernel in kernels.values():
            counts[kernel] = counts.get(kernel, 0) + 1
        return {
            **self._digests,
            "compute": numbers["compute"],
            "dtype": numbers["dtype"],
            "kv_dtype": str(self._kv_dtype).removeprefix("torch."),
            "kernels": counts,
            "attention_backend": self._runner.backend.name,
            "steps": self._runner.steps,
            "engine_version": ENGINE_VERSION,
            "engine_fingerprint": engine_fingerprint(),
            "block_size": self.config.block_size,
            "max_num_seqs": self.config.max_num_seqs,
            "max_batched_tokens": self.config.max_batched_tokens,
            "prefix_caching": self.config.prefix_caching,
            "scheduler_policy": self.config.scheduler_policy,
            "speculative": self._draft_model.digest if self._draft_model else self.config.speculative,
            "speculative_tokens": self.config.speculative_tokens if self.config.speculative else None,
        }

    def memory(self) -> dict[str, int]:
        """Bytes of the served weights and of the KV cache as allocated, and what a token takes of it; a draft model's
        are among them."""
        draft = self._draft_model
        block_bytes = self._block_bytes + (draft.block_bytes if draft else 0)
        return {
            "weights_bytes": int(numerics(self.model)["weights_bytes"]) + (draft.weights_bytes if draft else 0),
            "kv_cache_bytes": sum(tensor.nbytes for tensor in self.kv_tensors),
            "kv_block_bytes": block_bytes,
            "kv_bytes_per_token": block_bytes // self.config.block_size,
            "kv_blocks": self.pool.num_blocks,
        }

    @property
    def kv_tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is kept of tokens."""
        return self._kv.tensors + (self._draft_model.kv.tensors if self._draft_model else ())

    def release_scratch(self) -> None:
        """Give back the activations' memory that steps keep for the next ones: what a step takes shows in the process's
        memory only then."""
        self._runner.release_scratch()
        if self._draft_model is not None:
            self._draft_model.release_scratch()

    # The parts of a step

    def _draft(self) -> list[StepOutput]:
        """Have drafts proposed; an exception there ends the requests that they were for."""
        if self._speculator is None:
            return []
        requests = [request for request in self.scheduler.running if request.is_decoding]
        try:
            self._speculator.propose(requests)
        except Exception as error:
            return self._fail(requests, error)
        return []

    def _outcomes(self, result: StepLogits) -> Iterator[Outcome]:
        if result.sampled:
            sampled = sample_each(result.logits[: len(result.sampled)], result.sampled, self._stop_ids, result.ahead)
            now = time.perf_counter()
            yield from self._first_of_siblings(result, now)
            outcomes = list(take_samples(sampled, result.sampled, self._stop_ids, self.tokenizer, now))
            for outcome in outcomes:
                if len(outcome.new_token_ids) > 1:
                    self.scheduler.accept(outcome.request, len(outcome.new_token_ids) - 1)
                if outcome.drafted:
                    self.telemetry.speculation.add(outcome.drafted, outcome.accepted)
            forked = [sibling for request in result.sampled for sibling in self.scheduler.fork(request)]
            self._runner.remember([outcome.request for outcome in outcomes] + forked)
            yield from outcomes
        yield from take_scores(result)

    def _first_of_siblings(self, result: StepLogits, now: float) -> Iterator[Outcome]:
        """The first token of each sample that waited for its prompt, from the row of the one that computed it."""
        for row, request in enumerate(result.sampled):
            for sibling in request.siblings:
                sibling.first_scheduled = request.first_scheduled
                sampled = sample_each(result.logits[row : row + 1], [sibling], self._stop_ids)
                yield from take_samples(sampled, [sibling], self._stop_ids, self.tokenizer, now)

    def _settle(self, outcome: Outcome) -> list[StepOutput]:
        others: list[Request] = []
        if outcome.reason is not None:
            _, *others = self._finish(outcome.request, outcome.reason, outcome.error)
        return [_output_of(outcome.request, outcome.new_token_ids), *(_output_of(other, []) for other in others)]

    def _record_step(
        self, plan: StepPlan, started: float, active: int, used_blocks: int, evictions: int, decode_tokens: int
    ) -> None:
        seconds = time.perf_counter() - started
        contexts = [request.num_computed_tokens for request in plan.requests()]
        draft = self._draft_model
        draft_bytes = draft.pool.num_used * draft.block_bytes if draft else 0
        self.telemetry.steps.append(
            StepRecord(
                step=self._step,
                time=time.time(),
                batch_size=len(contexts),
                active_sequences=active,
                waiting_queue=self.scheduler.num_waiting,
                scheduler_policy=self.config.scheduler_policy,
                prefill_tokens=plan.prefill_tokens,
                decode_tokens=decode_tokens,
                step_ms=1e3 * seconds,
                kv_cache_bytes=used_blocks * self._block_bytes + draft_bytes,
                block_usage=used_blocks / self.pool.num_blocks,
                eviction_count=evictions,
                reuse_rate=plan.prefix_hit_tokens / plan.prefix_queried_tokens if plan.prefix_queried_tokens else None,
                max_context=max(contexts),
                attention_backend=self._runner.backend.name,
                tokens_per_second=(plan.prefill_tokens + decode_tokens) / seconds,
            )
        )
        self._step += 1

    def _fail(self, requests: list[Request], error: BaseException) -> list[StepOutput]:
        message = f"{type(error).__name__}: {error}"
        live = [request for request in requests if not request.finished]
        return [_output_of(ended, []) for request in live for ended in self._finish(request, "error", message)]

    def _finish(self, request: Request, reason: str, error: str | None = None) -> list[Request]:
        """End a request, and with it the samples that still wait for its prompt; gives all that ended."""
        ended = [request, *(sibling for sibling in request.siblings if not sibling.finished)]
        for one in ended:
            self.scheduler.finish(one, reason, error)
            samples = self._requests[one.group_id]
            samples.remove(one)
            if not samples:
                del self._requests[one.group_id]
            self.telemetry.record_request(one, time.perf_counter(), ENGINE_VERSION)
        return ended

    # Requests and loops

    def _encode(self, prompt: Prompt) -> list[int]:
        return encode(prompt, self.tokenizer, self._vocab_size)

    def _new_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        arrival: float | None = None,
    ) -> list[Request]:
        """The request's samples, in order."""
        if any(not 0 <= token_id < self._vocab_size for token_id in params.stop_token_ids):
            raise EvalError(f"stop_token_ids {params.stop_token_ids} are outside the vocabulary of {self._vocab_size}")
        if params.stop and self.tokenizer is None:
            raise EvalError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        generation_id = uuid.uuid4().hex
        group_id = request_id or generation_id
        arrival = time.perf_counter() if arrival is None else arrival
        return [
            Request(
                request_id=group_id if params.n == 1 else f"{group_id}-{index}",
                token_ids=list(token_ids),
                params=params if params.n == 1 else params.of_sample(index),
                priority=priority,
                arrival=arrival,
                labels={"generation_id": generation_id},
                group_id=group_id,
                index=index,
            )
            for index in range(params.n)
        ]

    def _scoring_request(self, index: int, context: Prompt, continuation: Prompt) -> Request | None:
        """None for an empty continuation: there is nothing to compute."""
        try:
            context_ids, targets = encode_pair(context, continuation, self.tokenizer, self._vocab_size)
        except EvalError as error:
            raise EvalError(f"scoring pair {index}: {error}") from error
        if not targets:
            return None
        [request] = self._new_request((context_ids + targets)[:-1], SamplingParams())
        request.targets = targets
        request.first_scored = len(context_ids) - 1
        return request

    def _submit(self, samples: list[Request]) -> None:
        first = samples[0]
        if first.group_id in self._requests:
            raise EvalError(f"request id {first.group_id!r} is already in use")
        for sample in samples:
            sample.sequence = self._sequence
            self._sequence += 1
        first.siblings = samples[1:]
        self.scheduler.add(first)
        self._requests[first.group_id] = list(samples)

    @contextlib.contextmanager
    def _submitted(self, requests: list[list[Request]]) -> Iterator[frozenset[str]]:
        """The ids of the requests, each given as its samples, while they are in the engine; none of them stays there,
        whatever happens."""
        try:
            for samples in requests:
                self._submit(samples)
            yield frozenset(samples[0].group_id for samples in requests)
        finally:
            for samples in requests:
                self.abort(samples[0].group_id)

    def _step_for(self, mine: frozenset[str]) -> int:
        """One step; how many of `mine` ended in it. Other people's outputs wait for the next `step`."""
        outputs = self.step()
        self._undelivered = [output for output in outputs if output.request_id not in mine]
        return sum(output.finished for output in outputs if output.request_id in mine)

    def _run(self, requests: list[list[Request]], what: str, progress: Progress | None) -> None:
        done, total = 0, sum(map(len, requests))
        with self._submitted(requests) as mine:
            while done < total and self.has_unfinished():
                ended = self._step_for(mine)
                done += ended
                if progress is not None and ended:
                    progress(what, done, total)


def _output_of(request: Request, new_token_ids: list[int]) -> StepOutput:
    return StepOutput(request.group_id, new_token_ids, request.finished, request.finish_reason, request.index)
