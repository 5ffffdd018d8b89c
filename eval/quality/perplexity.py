"""Perplexity of a text under a stated protocol.

The text is tokenized once, without BOS, and cut into windows that do not overlap; a rest shorter than a window is left
out. Each window is scored alone; its first token, which nothing precedes, is not scored. Perplexity is exp of the mean
negative log-likelihood over all scored tokens. The protocol is part of the task's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from eval.errors import EvalError
from eval.quality.lm_eval_adapter import EngineLM
from eval.quality.samples import Sample
from tasks.documents import Corpus
from tasks.suites import PerplexityRun

METRIC = "nll"
EXCERPT_CHARACTERS = 200


def score_windows(model: EngineLM, corpus: Corpus, run: PerplexityRun, limit: int | None) -> list[Sample]:
    """One sample per window: mean NLL in nats per scored token. `limit` caps the number of windows once more.

    Raises `EvalError` where the text is shorter than one window, or a window longer than the model's context.
    """
    if run.window > model.max_length:
        raise EvalError(
            f"{run.name}: a window of {run.window} tokens is longer than this model's context of {model.max_length}; "
            "use a shorter window"
        )
    windows = _windows(model.tok_encode(corpus.text, add_special_tokens=False), run.window)
    if not windows:
        raise EvalError(f"{run.name}: the text is shorter than one window of {run.window} tokens; use a shorter window")
    windows = windows[: min(count for count in (run.windows, limit, len(windows)) if count is not None)]
    scores = model.score([(window[:1], window[1:]) for window in windows], f"perplexity {corpus.name}")
    return [
        Sample(
            task=run.name,
            metric=METRIC,
            doc_id=index,
            document_hash=_digest([corpus.digest, index]),
            prompt_hash=_digest(window[:1]),
            target_hash=_digest(window[1:]),
            prompt=_text(model, window[:1]),
            target=_text(model, window[1:])[:EXCERPT_CHARACTERS],
            answer="",
            score=-sum(logprobs) / len(logprobs),
            logprobs=(sum(logprobs),),
            source=f"{corpus.name}-{index}",
            tokens=len(logprobs),
        )
        for index, (window, (logprobs, _)) in enumerate(zip(windows, scores, strict=True))
    ]


def _windows(token_ids: Sequence[int], window: int) -> list[list[int]]:
    return [list(token_ids[start : start + window]) for start in range(0, len(token_ids) - window + 1, window)]


def _text(model: EngineLM, token_ids: list[int]) -> str:
    return str(model.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def _digest(content: Sequence[object]) -> str:
    return hashlib.sha256(repr(list(content)).encode()).hexdigest()
