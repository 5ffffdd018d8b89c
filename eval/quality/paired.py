"""A candidate against its baseline, sample by sample.

Both sides answered the same samples, so each is its own control: what is judged is the mean of the paired differences,
never the difference of two separate means (Miller, arXiv 2411.00640). Accuracies get Tango's score interval, divided by
the design effect where samples share a source; perplexities a paired bootstrap of their ratio over windows. Equal
accuracy can hide changed answers (arXiv 2407.09141), so flips are counted both ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student_t

from eval.errors import EvalError
from eval.quality import proportions
from eval.quality.samples import PERPLEXITY_METRICS, Sample

BOOTSTRAP_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20240711

# Half-width in nats of an interval from a single source: it must clear no margin, and stay finite in JSON.
_NO_INFORMATION = 20.0

# The one perplexity that is reported as the mean itself, and not as its exponential.
BITS = "bits_per_byte"

Outcome = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True)
class TaskComparison:
    """One metric of one task, candidate against baseline, on the same samples.

    `kind` "accuracy" (any score): `baseline`, `candidate` are means, `delta` = candidate - baseline; whether more is
    better is the task's to say (`higher_is_better`). `kind` "perplexity" (lower is better): they are perplexities, or
    bits per byte, and `delta` is the relative change, ratio - 1 (+0.02 = 2 % worse). In both, 0 means equal and [`low`,
    `high`] is the two-sided interval of `delta`.
    `gained` and `lost` count samples that the candidate does better or worse on. `mcnemar_p` is the exact test on those
    two (accuracies of 0 and 1 only), `mcnemar_p_holm` its value adjusted over the family of tasks compared together.
    `mde`: the smallest true |delta| that this many samples find with 80 % power. `spread`: standard deviation of one
    sample's difference (log ratio for perplexities), design effect included. `interval`: the method, in words.
    """

    task: str
    metric: str
    kind: Literal["accuracy", "perplexity"]
    samples: int
    baseline: float
    candidate: float
    delta: float
    low: float
    high: float
    confidence: float
    gained: int
    lost: int
    mcnemar_p: float | None
    mcnemar_p_holm: float | None
    mde: float
    spread: float
    design_effect: float
    interval: str
    higher_is_better: bool = True

    @property
    def ratio(self) -> float:
        """Candidate / baseline (of a perplexity comparison)."""
        return 1.0 + self.delta

    def samples_needed(self, margin: float, power: float = 0.8) -> int:
        """Samples at which a truly equal candidate clears `margin` (same unit as `delta`) with probability `power`."""
        logarithmic = self.kind == "perplexity" and self.metric != BITS and margin > 0
        effect = math.log1p(margin) if logarithmic else margin
        return proportions.samples_needed(effect, self.spread, self.confidence, power)


@dataclass(frozen=True)
class Flip:
    """A sample whose answer became wrong (`lost`) or right (`gained`)."""

    task: str
    metric: str
    doc_id: int
    direction: Literal["gained", "lost"]
    prompt: str
    target: str
    baseline_answer: str
    candidate_answer: str


def non_inferiority(comparison: TaskComparison, margin: float) -> Outcome:
    """Is the candidate at most `margin` worse? `margin` > 0 in the unit of `delta`.

    pass: the whole interval is better than the margin. fail: the whole interval is beyond it. Otherwise the samples are
    too few to say. Requiring every task to pass needs no correction for their number (intersection-union test, Berger
    1982); the 95 % two-sided interval makes each a one-sided test at 2.5 %.
    """
    if margin <= 0:
        raise EvalError(f"{comparison.task}: a non-inferiority margin must be positive, not {margin}")
    better_low, better_high = (
        (comparison.low, comparison.high) if comparison.higher_is_better else (-comparison.high, -comparison.low)
    )
    if better_low > -margin:
        return "pass"
    if better_high < -margin:
        return "fail"
    return "inconclusive"


def compare_tasks(
    baseline_samples: Sequence[Sample], candidate_samples: Sequence[Sample], confidence: float = 0.95
) -> list[TaskComparison]:
    """Every task and metric of the baseline against the same of the candidate, in the baseline's order.

    Raises `EvalError` naming the first sample whose document, prompt or target differs, and tasks on one side only.
    """
    if not 0 < confidence < 1:
        raise EvalError(f"confidence must lie between 0 and 1, not {confidence}")
    comparisons = []
    for (task, metric), pairs in _paired(baseline_samples, candidate_samples).items():
        compare = _compare_perplexity if metric in PERPLEXITY_METRICS else _compare_accuracy
        comparisons.append(compare(task, metric, pairs, confidence))
    return _holm_over_family(comparisons)


def flips(baseline_samples: Sequence[Sample], candidate_samples: Sequence[Sample]) -> list[Flip]:
    """The samples of accuracy tasks whose score changed, in the baseline's order. Raises as `compare_tasks`."""
    return [
        Flip(
            task=before.task,
            metric=before.metric,
            doc_id=before.doc_id,
            direction="gained" if (after.score > before.score) == before.higher_is_better else "lost",
            prompt=before.prompt,
            target=before.target,
            baseline_answer=before.answer,
            candidate_answer=after.answer,
        )
        for (_, metric), pairs in _paired(baseline_samples, candidate_samples).items()
        if metric not in PERPLEXITY_METRICS
        for before, after in pairs
        if before.score != after.score
    ]


_Pairs = list[tuple[Sample, Sample]]


def same_protocol(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, str]:
    """Each part of the two protocols: "pass" where equal, else "fail: ..." with both values."""
    return {
        name: "pass"
        if baseline.get(name) == candidate.get(name)
        else f"fail: {name} is {baseline.get(name)!r} for the baseline and {candidate.get(name)!r} for the candidate"
        for name in sorted({*baseline, *candidate})
    }


def _paired(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> dict[tuple[str, str], _Pairs]:
    after_by_key = {(sample.task, sample.metric, sample.doc_id): sample for sample in candidate}
    if len(after_by_key) != len(candidate):
        raise EvalError("candidate samples: the same task, metric and doc_id twice; run the evaluation again")
    paired: dict[tuple[str, str], _Pairs] = {}
    for before in baseline:
        after = after_by_key.pop((before.task, before.metric, before.doc_id), None)
        if after is None:
            raise EvalError(
                f"{before.task} {before.metric} sample {before.doc_id}: only the baseline has it; "
                "evaluate both with the same tasks and limit"
            )
        for name in ("document_hash", "prompt_hash", "target_hash", "tokens"):
            if getattr(before, name) != getattr(after, name) and (name != "tokens" or _counts_tokens(before)):
                raise EvalError(
                    f"{before.task} sample {before.doc_id}: {name} differs between baseline and candidate; "
                    "evaluate both on the same data with the same prompts and tokenizer"
                )
        paired.setdefault((before.task, before.metric), []).append((before, after))
    if after_by_key:
        task, metric, doc_id = next(iter(after_by_key))
        raise EvalError(
            f"{task} {metric} sample {doc_id}: only the candidate has it; evaluate both with the same tasks and limit"
        )
    if not paired:
        raise EvalError("no samples to compare; run the evaluation with at least one task")
    return paired


def _counts_tokens(sample: Sample) -> bool:
    """A perplexity is per token, so the two sides must have scored equally many; an answer's length may differ."""
    return sample.metric in PERPLEXITY_METRICS


def _compare_accuracy(task: str, metric: str, pairs: _Pairs, confidence: float) -> TaskComparison:
    before = np.array([sample.score for sample, _ in pairs])
    after = np.array([sample.score for _, sample in pairs])
    difference = after - before
    sources = [sample.source for sample, _ in pairs]
    effect = proportions.design_effect(list(difference), sources)
    effect *= proportions.few_sources_effect(sources, confidence)
    count, raised, lowered = len(pairs), int((difference > 0).sum()), int((difference < 0).sum())
    binary = bool(np.isin(before, (0.0, 1.0)).all() and np.isin(after, (0.0, 1.0)).all())
    low, high = proportions.tango_interval(raised / effect, lowered / effect, count / effect, confidence)
    # Laplace's rule: no disagreement among n samples still leaves about 1/n possible.
    variance = (raised + lowered + 1) / (count + 2)
    interval = "Tango 1998 score" if effect == 1.0 else "Tango 1998 score, Rao-Scott design effect"
    if not binary:
        # Where few scores changed, what was drawn knows too little of what may change: at least as wide as the signs
        # of the changes would have it, times their size.
        size = _size_of_changes(before, after)
        signs = (raised - lowered) / count
        drawn = _bootstrap_mean(difference, np.ones(count), sources, confidence)
        mean = float(difference.mean())
        low = max(min(drawn[0], mean + size * (low - signs)), -_NO_INFORMATION)
        high = min(max(drawn[1], mean + size * (high - signs)), _NO_INFORMATION)
        variance *= size**2
        interval = "paired bootstrap over sources, at least Tango's for the signs of the changes"
    known = math.isfinite(effect) and (binary or len(set(sources)) > 1)
    spread = math.sqrt(variance * effect) if known else _NO_INFORMATION
    higher_is_better = pairs[0][0].higher_is_better
    gained, lost = (raised, lowered) if higher_is_better else (lowered, raised)
    return TaskComparison(
        task=task,
        metric=metric,
        kind="accuracy",
        samples=count,
        baseline=float(before.mean()),
        candidate=float(after.mean()),
        delta=float(difference.mean()),
        low=low,
        high=high,
        confidence=confidence,
        gained=gained,
        lost=lost,
        mcnemar_p=proportions.mcnemar_exact(gained, lost) if binary else None,
        mcnemar_p_holm=None,
        mde=proportions.minimum_detectable_effect(count, spread, confidence),
        spread=spread,
        design_effect=min(effect, float(count)),
        interval=interval,
        higher_is_better=higher_is_better,
    )


def _size_of_changes(before: np.ndarray, after: np.ndarray) -> float:
    """Root mean square of the differences that are not zero; where all are, the largest that these scores allow."""
    difference = after - before
    changed = difference[difference != 0]
    if len(changed):
        return float(np.sqrt((changed**2).mean()))
    scores = np.concatenate([before, after])
    return max(1.0, float(scores.max() - scores.min()))


def _compare_perplexity(task: str, metric: str, pairs: _Pairs, confidence: float) -> TaskComparison:
    before = np.array([sample.score for sample, _ in pairs])
    after = np.array([sample.score for _, sample in pairs])
    units = np.array([sample.tokens for sample, _ in pairs], dtype=np.float64)
    difference = after - before
    sources = [sample.source for sample, _ in pairs]
    shown = math.exp if metric != BITS else lambda nats: nats / math.log(2)
    relative = math.expm1 if metric != BITS else float
    if metric == BITS:
        # A ratio of means: the relative differences, weighted by what they are relative to.
        units, difference = units * before, difference / before
    low, high = _bootstrap_mean(difference, units, sources, confidence)
    change = float(np.average(difference, weights=units))
    effect = proportions.design_effect(list(units * (difference - change)), sources)
    effect *= proportions.few_sources_effect(sources, confidence)
    variance = float(np.average((difference - change) ** 2, weights=units))
    known = len(pairs) > 1 and math.isfinite(effect)
    spread = math.sqrt(variance * effect) if known else _NO_INFORMATION
    tokens = [sample.tokens for sample, _ in pairs]
    return TaskComparison(
        task=task,
        metric=metric,
        kind="perplexity",
        samples=len(pairs),
        baseline=shown(float(np.average(before, weights=tokens))),
        candidate=shown(float(np.average(after, weights=tokens))),
        delta=relative(change),
        low=relative(low),
        high=relative(high),
        confidence=confidence,
        gained=int((difference < 0).sum()),
        lost=int((difference > 0).sum()),
        mcnemar_p=None,
        mcnemar_p_holm=None,
        mde=relative(proportions.minimum_detectable_effect(len(pairs), spread, confidence)),
        spread=spread,
        design_effect=min(effect, float(len(pairs))),
        interval="paired bootstrap over windows",
        higher_is_better=False,
    )


def _bootstrap_mean(
    difference: np.ndarray, units: np.ndarray, sources: Sequence[str], confidence: float
) -> tuple[float, float]:
    """Interval of the unit-weighted mean of `difference` [samples]: sources are drawn with replacement (Efron 1979),
    each bringing all its samples. The percentile ends are stretched about the mean by t/z and sqrt(n / (n - 1)), since
    the plain percentile interval is too narrow at few sources (Hesterberg, arXiv 1411.5279). Seeded, so that the
    same input gives the same interval; a single source gives the widest one.
    """
    _, source = np.unique(np.asarray(sources), return_inverse=True)
    totals = np.bincount(source, weights=units * difference)
    sizes = np.bincount(source, weights=units)
    mean = float(totals.sum() / sizes.sum())
    count = len(totals)
    if count < 2:
        return -_NO_INFORMATION, _NO_INFORMATION
    draws = np.random.default_rng(BOOTSTRAP_SEED).multinomial(count, np.full(count, 1 / count), BOOTSTRAP_RESAMPLES)
    means = (draws @ totals) / (draws @ sizes)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    stretch = float(student_t.ppf(1 - tail, count - 1) / norm.ppf(1 - tail)) * math.sqrt(count / (count - 1))
    return mean + (float(low) - mean) * stretch, mean + (float(high) - mean) * stretch


def _holm_over_family(comparisons: list[TaskComparison]) -> list[TaskComparison]:
    tested = [comparison for comparison in comparisons if comparison.mcnemar_p is not None]
    adjusted = proportions.holm([comparison.mcnemar_p or 0.0 for comparison in tested])
    by_key = {(each.task, each.metric): value for each, value in zip(tested, adjusted, strict=True)}
    return [replace(each, mcnemar_p_holm=by_key.get((each.task, each.metric))) for each in comparisons]
