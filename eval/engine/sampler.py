"""From logits to tokens and logprobs.

The one idea: every row is treated alone. A sampled row is decided by one number in [0, 1) that its request's own
generator draws for that place in its output, looked up in the row's cumulative distribution, so a seeded request gives
the same tokens in any company, after any preemption, and whatever was drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from eval.engine.request import Request, TokenLogprobs

# A chunk of log-softmax rows in float32 stays within this, whatever the vocabulary.
LOGPROB_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Sampled:
    """Per row: the token, its logprobs if they were asked for, and an error that fails this row's request only."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


def sample(
    logits: torch.Tensor, requests: Sequence[Request], stop_ids: frozenset[int], ahead: Sequence[int] = ()
) -> Sampled:
    """One token per row of `logits` [rows, vocabulary], which stay as they are. `requests`: whose row each is; `ahead`:
    how many of its request's drafts each row takes for output (none, when it is empty). `stop_ids`: the model's own
    end-of-sequence ids, which a request below its `min_tokens` cannot choose. Logprobs are those of the logits."""
    given, ahead = logits, ahead or [0] * len(requests)
    adjusted = [
        row for row, request in enumerate(requests) if request.params.penalises or _is_too_short(request, ahead[row])
    ]
    if adjusted:
        logits = logits.clone()
    for row in adjusted:
        _penalise(logits[row], requests[row], ahead[row])
        if _is_too_short(requests[row], ahead[row]):
            _ban_stops(logits[row], requests[row], stop_ids)
    best, greedy = logits.max(dim=-1)
    token_ids: list[int] = greedy.tolist()
    errors: list[str | None] = [
        None if finite else "the model's logits are not finite (NaN or infinity in its weights or activations)"
        for finite in torch.isfinite(best).tolist()
    ]
    for ordered in (False, True):
        rows = [row for row, request in enumerate(requests) if not errors[row] and _is_random(request, ordered)]
        if rows:
            drawn = _draw(logits[rows].float(), [requests[row] for row in rows], [ahead[row] for row in rows], ordered)
            for row, token_id in zip(rows, drawn.tolist(), strict=True):
                token_ids[row] = token_id
    logprobs: list[TokenLogprobs | None] = [None] * len(requests)
    for row, request in enumerate(requests):
        if request.params.logprobs is not None and errors[row] is None:
            logprobs[row] = _token_logprobs(given[row], token_ids[row], request.params.logprobs)
    return Sampled(token_ids, logprobs, errors)


def sample_each(
    logits: torch.Tensor, requests: Sequence[Request], stop_ids: frozenset[int], ahead: Sequence[int] = ()
) -> Sampled:
    """`sample`, where an exception ends only the request whose row raises it."""
    try:
        return sample(logits, requests, stop_ids, ahead)
    except Exception:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        errors: list[str | None] = []
        for row, request in enumerate(requests):
            try:
                one = sample(logits[row : row + 1], [request], stop_ids, ahead[row : row + 1])
            except Exception as failure:
                one = Sampled([0], [None], [f"{type(failure).__name__}: {failure}"])
            token_ids += one.token_ids
            logprobs += one.logprobs
            errors += one.errors
        return Sampled(token_ids, logprobs, errors)


def _is_too_short(request: Request, ahead: int) -> bool:
    return request.num_output_tokens + ahead < request.params.min_tokens


def _ban_stops(logits: torch.Tensor, request: Request, stop_ids: frozenset[int]) -> None:
    """Takes what would end the request out of its row of logits [vocabulary], in place."""
    banned = [*request.params.stop_token_ids, *(() if request.params.ignore_eos else stop_ids)]
    if banned:
        logits[banned] = -torch.inf


def _penalise(logits: torch.Tensor, request: Request, ahead: int = 0) -> None:
    """Applies the request's penalties to its row of logits [vocabulary], in place; its first `ahead` drafts count as
    output."""
    params, drafts = request.params, request.draft_token_ids[:ahead]
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(request.token_ids + drafts, device=logits.device).unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    output_ids = request.output_token_ids + drafts
    if output_ids and (params.presence_penalty or params.frequency_penalty):
        output = torch.tensor(output_ids, device=logits.device)
        seen, counts = output.unique(return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts


def _is_random(request: Request, ordered: bool) -> bool:
    """Whether the request samples, and with (or without) a filter that needs the tokens in order. Sorting costs most of
    a step; and the order decides which token a number means, so it must be the request's own affair."""
    params = request.params
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1) == ordered


def _draw(logits: torch.Tensor, requests: list[Request], ahead: list[int], ordered: bool) -> torch.Tensor:
    """Token ids [rows] by inverse transform sampling from the filtered distribution of `logits` [rows, vocabulary];
    `ordered`: with top-k and top-p."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    params = [request.params for request in requests]
    # Below zero before the division, so that a tiny temperature gives -inf and never NaN.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / column([p.temperature for p in params])
    indices = None
    if ordered:
        scaled, indices = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = scaled.softmax(dim=-1)
    keep = probabilities >= column([p.min_p for p in params]) * probabilities.amax(dim=-1, keepdim=True)
    if ordered:
        vocabulary = logits.shape[1]
        rank = torch.arange(vocabulary, device=logits.device)
        keep &= rank < column([p.top_k or vocabulary for p in params])
        # top-p applies to what top-k leaves, renormalised; the token that crosses the threshold stays.
        kept = probabilities.masked_fill(~keep, 0.0)
        before = kept.cumsum(dim=-1) - kept
        keep &= before < column([p.top_p for p in params]) * kept.sum(dim=-1, keepdim=True)
        keep[:, 0] = True
    cumulative = probabilities.masked_fill(~keep, 0.0).cumsum(dim=-1)
    uniform = column(
        [request.uniform(request.num_output_tokens + drafts) for request, drafts in zip(requests, ahead, strict=True)]
    )
    chosen = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    # uniform < 1, but the product may round up to the total: then the last kept token is meant.
    last_kept = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    chosen = torch.minimum(chosen, last_kept)
    return (chosen if indices is None else indices.gather(1, chosen)).squeeze(1)


def _token_logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    logprobs = logits.float().log_softmax(dim=-1)
    values, indices = logprobs.topk(min(count, logprobs.shape[0]))
    top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)


def score_rows(logits: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], list[bool]]:
    """Logprob of each row's target under `logits` [rows, vocabulary], in float32, and whether it is the argmax. Row
    chunks keep the float32 copy small."""
    rows = max(1, LOGPROB_CHUNK_BYTES // (4 * logits.shape[1]))
    logprobs: list[float] = []
    is_best: list[bool] = []
    for start in range(0, logits.shape[0], rows):
        chunk = logits[start : start + rows]
        wanted = targets[start : start + rows]
        logprobs += (-cross_entropy(chunk.float(), wanted, reduction="none")).tolist()
        # Finding where the largest logit stands costs ten times what finding it does, and few targets have it.
        best = chunk.gather(1, wanted[:, None]).squeeze(1) == chunk.amax(dim=-1)
        best[best.clone()] = chunk[best].max(dim=-1).indices == wanted[best]
        is_best += best.tolist()
    return logprobs, is_best
