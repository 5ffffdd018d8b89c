"""What a step's logits do to its requests.

The one idea: sampled rows append a token, scored rows append logprobs, and either may end the request; the engine only
carries the ending out. An exception here belongs to one request and ends that one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.engine.model_runner import StepLogits
from eval.engine.request import Request, TokenLogprobs
from eval.engine.sampler import Sampled, score_rows
from eval.engine.stopping import completion_text, finish_reason_after_token

NOT_FINITE = "the model's logits are not finite (NaN or infinity in its weights or activations)"


@dataclass(frozen=True)
class Completion:
    """`text` has no special tokens and ends before the stop string; `token_ids` are all that were sampled.
    `finish_reason` is "stop", "length", "abort" or "error", the last with its `error`. Of n parallel samples this is
    the first, and `outputs` are all."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs] | None
    error: str | None = None
    others: tuple["Completion", ...] = ()

    @property
    def outputs(self) -> tuple["Completion", ...]:
        return (self, *self.others)


@dataclass(frozen=True)
class StepOutput:
    """`index` is the sample's, of the n that the request asked for."""

    request_id: str
    new_token_ids: list[int]
    finished: bool
    finish_reason: str | None
    index: int = 0


@dataclass(frozen=True)
class Score:
    """Logprobs of the continuation's tokens, and whether each was the most likely one."""

    logprobs: list[float]
    is_greedy: bool


@dataclass(frozen=True)
class Outcome:
    """What became of one request in a step; `reason` is None while it goes on. Of its `drafted` tokens the first
    `accepted` came true."""

    request: Request
    new_token_ids: list[int]
    reason: str | None
    error: str | None = None
    drafted: int = 0
    accepted: int = 0


def take_samples(
    sampled: Sampled, requests: list[Request], stop_ids: frozenset[int], tokenizer: Any, now: float
) -> Iterator[Outcome]:
    """Append each row's token to its request, up to the first draft that did not come true: the rows after it took it
    for granted. `now`: seconds, on the requests' clock."""
    row = 0
    while row < len(requests):
        request = requests[row]
        drafts, request.draft_token_ids = request.draft_token_ids, []
        new: list[int] = []
        accepted = 0
        reason = error = None
        for place in range(row, row + 1 + len(drafts)):
            reason, error = _take_token(sampled, place, request, stop_ids, tokenizer, now, new)
            came_true = len(new) > accepted and accepted < len(drafts) and new[-1] == drafts[accepted]
            accepted += came_true
            if reason is not None or not came_true:
                break
        request.drafted_tokens += len(drafts)
        request.accepted_tokens += accepted
        yield Outcome(request, new, reason, error, len(drafts), accepted)
        row += 1 + len(drafts)


def _take_token(
    sampled: Sampled,
    row: int,
    request: Request,
    stop_ids: frozenset[int],
    tokenizer: Any,
    now: float,
    new: list[int],
) -> tuple[str | None, str | None]:
    """Append the row's token to its request and to `new`; (finish reason, error), both None while it goes on."""
    if sampled.errors[row] is not None:
        return "error", sampled.errors[row]
    new.append(sampled.token_ids[row])
    request.token_ids.append(sampled.token_ids[row])
    request.last_token = now
    if request.first_token is None:
        request.first_token = now
    logprobs = sampled.logprobs[row]
    if logprobs is not None:
        request.logprobs.append(logprobs)
    try:
        return finish_reason_after_token(request, stop_ids, tokenizer), None
    except Exception as failure:
        return "error", f"{type(failure).__name__}: {failure}"


def take_scores(result: StepLogits) -> Iterator[Outcome]:
    """Append the logprobs of each scored chunk to its request; those that are complete end."""
    row = len(result.sampled)
    for request, position, count in result.scored:
        assert request.targets is not None
        logits = result.logits[row : row + count]
        row += count
        offset = position - request.first_scored
        targets = torch.tensor(request.targets[offset : offset + count], device=logits.device)
        logprobs, is_best = score_rows(logits, targets)
        request.scored += logprobs
        request.scored_greedy &= all(is_best)
        if not all(map(math.isfinite, logprobs)):
            yield Outcome(request, [], "error", NOT_FINITE)
            continue
        if request.logprob_sink is not None:
            request.logprob_sink(offset, logits)
        if len(request.scored) == len(request.targets):
            yield Outcome(request, [], "length")


def completion_of(samples: Sequence[Request], tokenizer: Any) -> Completion:
    """One prompt's completion, from its parallel samples in order."""
    request, *others = samples
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
        token_ids=request.output_token_ids,
        text=completion_text(request, tokenizer),
        finish_reason=request.finish_reason or "",
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        error=request.error,
        others=tuple(completion_of([other], tokenizer) for other in others),
    )
