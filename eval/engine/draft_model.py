"""A second, smaller model that drafts.

The one idea: to the draft model a drafting request is one more request whose computed tokens catch up with its own. Its
shadow here has the same tokens, row and random numbers, and blocks of the draft model's own cache. Where drafts did not
come true, the shadow's tokens are put right and what was computed of the wrong ones is written again.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from eval.engine.block_pool import BlockPool
from eval.engine.config import EngineConfig
from eval.engine.identity import checkpoint_digests, context_tokens, end_of_sequence_ids, vocabulary_size
from eval.engine.kv_cache import KVCache
from eval.engine.model_runner import ModelRunner
from eval.engine.native_linear import use_native_linears
from eval.engine.probe import probe
from eval.engine.prompts import load_tokenizer
from eval.engine.request import Request, Status
from eval.engine.sampler import sample_each
from eval.engine.scheduler import Chunk, StepPlan
from eval.engine.speculative import num_wanted
from eval.errors import EvalError
from quantize.load import load_model, numerics


class DraftModel:
    """Invariant: a shadow lives as long as its request keeps its row, and a shadow's computed tokens are a prefix of
    its request's tokens whenever `propose` begins a step."""

    def __init__(self, checkpoint: Path, model: PreTrainedModel, tokenizer: Any, config: EngineConfig):
        """Loads `checkpoint` in the dtype and on the device of `model`, for which it drafts. Raises QuantizeError for
        a bad checkpoint, and EvalError for a model that the engine cannot run or whose tokens are not `model`'s."""
        self.model = load_model(checkpoint, device=str(model.device), dtype=model.dtype).eval()
        _check_tokens(checkpoint, self.model, model, tokenizer)
        self.digest = checkpoint_digests(checkpoint)["weights_digest"]
        self._config = config
        self._seen = probe(self.model)
        self._geometry = self._seen.geometry
        self._context = context_tokens(self.model, None)
        self._stop_ids = end_of_sequence_ids(model)
        self._shadows: dict[Request, Request] = {}
        self.block_bytes = self._geometry.block_bytes(config.block_size, self.model.dtype)
        self.weights_bytes = int(numerics(self.model)["weights_bytes"])
        use_native_linears(self.model)

    def allocate(self, num_blocks: int, max_total_tokens: int) -> None:
        """Its cache: `num_blocks` blocks, for requests of up to `max_total_tokens`."""
        model, block_size = self.model, self._config.block_size
        self.pool = BlockPool(num_blocks)
        self.kv = KVCache.allocate(self._geometry, num_blocks, block_size, model.dtype, model.device)
        self._runner = ModelRunner.of(model, self._seen, self.kv, self._config, max_total_tokens)

    def propose(self, requests: Sequence[Request]) -> None:
        """Give each request what this model would say next, one token of all of them per round. In the first round the
        shadows catch up, within the budget of a step; one that does not get to its end, or finds no blocks, has no
        drafts this time."""
        self._drop_stopped()
        plan = StepPlan()
        wanted: dict[Request, int] = {}
        for request in requests:
            shadow = self._shadow_of(request)
            count = min(num_wanted(request, self._config.speculative_tokens), self._context - request.num_tokens)
            missing = request.num_tokens - shadow.num_computed_tokens
            take = min(missing, self._config.max_batched_tokens - plan.num_tokens)
            if count < 1 or take == 0 or not self._give_blocks(plan, shadow, request.num_tokens + count - 1):
                continue
            plan.prefills.append(Chunk(shadow, shadow.num_computed_tokens, take))
            wanted[shadow] = request.num_tokens + count
        live = self._run(plan)
        while live := [shadow for shadow in live if shadow.num_tokens < wanted[shadow]]:
            live = self._run(StepPlan(decodes=live))
        for request in requests:
            request.draft_token_ids = self._shadows[request].token_ids[request.num_tokens :]

    def release_scratch(self) -> None:
        """See `Engine.release_scratch`."""
        self._runner.release_scratch()

    def check_integrity(self) -> None:
        """Raise EvalError unless every block is accounted for."""
        self._drop_stopped()
        self.pool.check_integrity([shadow.block_ids for shadow in self._shadows.values()])

    def _run(self, plan: StepPlan) -> list[Request]:
        """Compute the plan; the shadows that got a token by it."""
        if plan.num_tokens == 0:
            return []
        result = self._runner.execute(plan)
        for shadow in plan.decodes:
            shadow.num_computed_tokens += 1
        for chunk in plan.prefills:
            chunk.request.num_computed_tokens += chunk.count
        sampled = sample_each(result.logits, result.sampled, self._stop_ids)
        drafted = []
        for shadow, token_id, error in zip(result.sampled, sampled.token_ids, sampled.errors, strict=True):
            if error is None:
                shadow.token_ids.append(token_id)
                drafted.append(shadow)
        self._runner.remember(drafted)
        return drafted

    def _shadow_of(self, request: Request) -> Request:
        """The request's shadow, with the request's tokens and no more of them computed than still hold."""
        shadow = self._shadows.get(request)
        if shadow is None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            shadow = Request(request.request_id, prompt, replace(request.params, logprobs=None), row=request.row)
            # Drawing with the request's own numbers, the draft says what the model will wherever the two agree.
            shadow.random, shadow.uniforms = request.random, request.uniforms
            self._shadows[request] = shadow
        shadow.token_ids[:] = request.token_ids
        # A step ends with one token that no draft foresaw; before it, all drafts came true.
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, request.num_tokens - 1)
        return shadow

    def _give_blocks(self, plan: StepPlan, shadow: Request, num_tokens: int) -> bool:
        """Whether the shadow has blocks for `num_tokens`, now."""
        missing = -(-num_tokens // self._config.block_size) - len(shadow.block_ids)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            shadow.block_ids += self.pool.allocate(missing)
            plan.tables_changed.append(shadow)
        return True

    def _drop_stopped(self) -> None:
        for request, shadow in list(self._shadows.items()):
            if request.status is not Status.RUNNING or request.row != shadow.row:
                self.pool.release(shadow.block_ids)
                del self._shadows[request]


def _check_tokens(checkpoint: Path, draft: PreTrainedModel, model: PreTrainedModel, tokenizer: Any) -> None:
    sizes = vocabulary_size(draft), vocabulary_size(model)
    if sizes[0] != sizes[1]:
        raise EvalError(
            f"{checkpoint}: a draft model must have the tokens of the model it drafts for, but it has {sizes[0]} of "
            f"them and the model {sizes[1]}: choose a draft of the same family"
        )
    if tokenizer is not None and load_tokenizer(checkpoint).get_vocab() != tokenizer.get_vocab():
        raise EvalError(
            f"{checkpoint}: a draft model must have the tokens of the model it drafts for, but its tokenizer differs: "
            "choose a draft of the same family"
        )
