"""What a step's logits do to its requests.

The one idea: sampled rows append a token, scored rows append logprobs, and either may end the request; the engine only
carries the ending out. An exception here belongs to one request and ends that one.
"""

import math
from collections.abc import Iterator
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
    `finish_reason` is "stop", "length", "abort" or "error", the last with its `error`."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs] | None
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    request_id: str
    new_token_ids: list[int]
    finished: bool
    finish_reason: str | None


@dataclass(frozen=True)
class Score:
    """Logprobs of the continuation's tokens, and whether each was the most likely one."""

    logprobs: list[float]
    is_greedy: bool


@dataclass(frozen=True)
class Outcome:
    """What became of one request in a step; `reason` is None while it goes on."""

    request: Request
    new_token_ids: list[int]
    reason: str | None
    error: str | None = None


def take_samples(
    sampled: Sampled, requests: list[Request], stop_ids: frozenset[int], tokenizer: Any, now: float
) -> Iterator[Outcome]:
    """Append each row's token to its request. `now`: seconds, on the requests' clock."""
    for request, token_id, logprobs, error in zip(
        requests, sampled.token_ids, sampled.logprobs, sampled.errors, strict=True
    ):
        if error is not None:
            yield Outcome(request, [], "error", error)
            continue
        request.token_ids.append(token_id)
        request.last_token = now
        if request.first_token is None:
            request.first_token = now
        if logprobs is not None:
            request.logprobs.append(logprobs)
        try:
            reason = finish_reason_after_token(request, stop_ids, tokenizer)
        except Exception as failure:
            yield Outcome(request, [token_id], "error", f"{type(failure).__name__}: {failure}")
            continue
        yield Outcome(request, [token_id], reason)


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


def completion_of(request: Request, tokenizer: Any) -> Completion:
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
        token_ids=request.output_token_ids,
        text=completion_text(request, tokenizer),
        finish_reason=request.finish_reason or "",
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        error=request.error,
    )
