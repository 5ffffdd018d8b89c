"""From lm-eval's logged samples to our records, and from records to the numbers that are reported.

lm-eval logs what the model answered; which choice that makes, and how many tokens were scored, is worked out here, so
that a flip can be shown as text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.quality.samples import PERPLEXITY_METRICS, Sample


@dataclass(frozen=True)
class TaskResult:
    """One metric of one task. `metric_name`: its flat name, as in MLflow. `stderr`: of the mean over samples, clustered
    by source; of a perplexity by the delta method; None where there is one source."""

    name: str
    metric: str
    metric_name: str
    value: float
    stderr: float | None
    samples: int
    higher_is_better: bool
    chance: float | None


def samples_of(
    task: str,
    logged: Sequence[Mapping[str, Any]],
    delimiter: str,
    scored_tokens: Mapping[tuple[str, str], int],
    lower_is_better: Collection[str] = (),
) -> list[Sample]:
    """Our records of one task's logged samples, one per metric and filter; metrics without a number per sample (such as
    corpus BLEU) have none. `lower_is_better`: the metrics of which the task says so."""
    records = []
    for sample in logged:
        for metric in sample["metrics"]:
            number = _score_of(metric, sample[metric])
            if number is None:
                continue
            score, units = number
            answer, target, logprobs = _answer_of(metric, sample, delimiter)
            pairs = [tuple(arguments[:2]) for arguments in sample["arguments"]]
            tokens = sum(scored_tokens.get(pair, 0) for pair in pairs if all(isinstance(part, str) for part in pair))
            records.append(
                Sample(
                    task=task,
                    metric=_metric_name(metric, sample["filter"]),
                    doc_id=int(sample["doc_id"]),
                    document_hash=sample["doc_hash"],
                    prompt_hash=sample["prompt_hash"],
                    target_hash=sample["target_hash"],
                    prompt=str(sample["arguments"][0][0]),
                    target=target,
                    answer=answer,
                    score=score,
                    logprobs=logprobs,
                    source=str(sample["doc"].get("source") or sample["doc_hash"]),
                    tokens=units if units is not None else tokens,
                    higher_is_better=not (metric in lower_is_better or metric in PERPLEXITY_METRICS),
                )
            )
    return records


def result_of(samples: Sequence[Sample], chance: float | None) -> TaskResult:
    """The number reported for one metric of one task: a mean, or exp of a weighted mean NLL."""
    first = samples[0]
    is_perplexity = first.metric in PERPLEXITY_METRICS
    scores = np.array([sample.score for sample in samples])
    units = np.array([sample.tokens if is_perplexity else 1 for sample in samples], dtype=np.float64)
    mean = float(np.average(scores, weights=units))
    error = _clustered_error(scores, units, [sample.source for sample in samples])
    metric = "perplexity" if first.metric == "nll" else first.metric
    if is_perplexity:
        value = _perplexity(first.metric, mean)
        error = None if error is None else error * (value if first.metric != "bits_per_byte" else 1 / math.log(2))
    else:
        value = mean
    return TaskResult(
        name=first.task,
        metric=metric,
        metric_name=f"quality.{first.task}.{metric}",
        value=value,
        stderr=error,
        samples=len(samples),
        higher_is_better=first.higher_is_better and not is_perplexity,
        chance=chance,
    )


def _perplexity(metric: str, mean_nll: float) -> float:
    return mean_nll / math.log(2) if metric == "bits_per_byte" else math.exp(min(mean_nll, 700.0))


def _clustered_error(scores: np.ndarray, units: np.ndarray, sources: Sequence[str]) -> float | None:
    """Standard error of the weighted mean, residuals summed within each source (Miller, arXiv 2411.00640)."""
    _, cluster = np.unique(np.asarray(sources), return_inverse=True)
    residuals = np.bincount(cluster, weights=units * (scores - np.average(scores, weights=units)))
    count = len(residuals)
    if count < 2:
        return None
    return float(math.sqrt((residuals**2).sum() * count / (count - 1)) / units.sum())


def _metric_name(metric: str, filter_name: str) -> str:
    """lm-eval names a filtered metric "exact_match,strict-match"; a comma is no part of a metric name in MLflow."""
    return metric if filter_name == "none" else f"{metric}_{filter_name}".replace("-", "_")


def _score_of(metric: str, value: Any) -> tuple[float, int | None] | None:
    """(score, units where the metric brings its own) of one logged metric; None where it is no number."""
    if metric in PERPLEXITY_METRICS:
        if isinstance(value, tuple | list):
            total, units = value
            return -float(total) / max(int(units), 1), int(units)
        return -float(value), 1
    if isinstance(value, bool | int | float | np.number):
        return float(value), None
    return None


def _answer_of(metric: str, sample: Mapping[str, Any], delimiter: str) -> tuple[str, str, tuple[float, ...]]:
    """(what the model answered, what was right, log-likelihood per choice) of one logged sample."""
    responses = sample["filtered_resps"]
    target = sample["target"]
    if responses and isinstance(responses[0], tuple | list) and len(responses[0]) == 2:
        logprobs = tuple(float(response[0]) for response in responses)
        continuations = [str(arguments[1]).removeprefix(delimiter) for arguments in sample["arguments"]]
        if len(responses) == 1:
            return (continuations[0] if responses[0][1] else "(something else)"), continuations[0], logprobs
        lengths = {"acc_norm": len, "acc_bytes": lambda text: len(text.encode())}.get(metric, lambda text: 1)
        best = max(range(len(logprobs)), key=lambda index: logprobs[index] / max(lengths(continuations[index]), 1))
        right = continuations[target] if isinstance(target, int) and 0 <= target < len(continuations) else str(target)
        return continuations[best], right, logprobs
    if responses and isinstance(responses[0], str):
        return responses[0], str(target), ()
    return "", str(target), tuple(float(each) for each in responses if isinstance(each, int | float))
