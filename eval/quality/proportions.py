"""Paired proportions: how far two success rates on the same samples differ, and how sure one may be.

Only the samples where the two sides disagree carry information: `gained` (candidate right, baseline wrong) and `lost`
(the other way). Everything here is arithmetic on those two counts and the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binomtest, norm
from scipy.stats import t as student_t


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact p-value that gains and losses are equally likely (McNemar, Psychometrika 12, 1947).

    Given the disagreements, the gains are Binomial(gained + lost, 1/2) under the null. It assumes that samples are
    independent. No disagreement at all is no evidence: 1.0.
    """
    if gained + lost == 0:
        return 1.0
    return float(binomtest(gained, gained + lost, 0.5).pvalue)


def tango_statistic(gained: float, lost: float, samples: float, delta: float) -> float:
    """Score statistic for H0: difference = `delta` (Tango, Statistics in Medicine 17, 1998, eq. 24-26), N(0, 1).

    The nuisance probability of a loss is replaced by its maximum-likelihood estimate under H0.
    """
    quadratic = 2 * samples
    linear = -gained - lost + (2 * samples - gained + lost) * delta
    constant = -lost * delta * (1 - delta)
    loss_rate = (math.sqrt(max(linear**2 - 4 * quadratic * constant, 0.0)) - linear) / (2 * quadratic)
    variance = samples * (2 * loss_rate + delta * (1 - delta))
    shift = gained - lost - samples * delta
    if variance <= 0:
        return 0.0 if shift == 0 else math.copysign(math.inf, shift)
    return shift / math.sqrt(variance)


def tango_interval(gained: float, lost: float, samples: float, confidence: float) -> tuple[float, float]:
    """Two-sided score interval of the paired difference (gained - lost) / samples (Tango 1998).

    Why this one: it keeps its coverage where a Wald or bootstrap interval collapses, at few or no disagreements (the
    usual case for a good quantizer: with 0 of 400 changed the bootstrap says [0, 0], Tango [-0.95 %, 0.95 %]), and it
    is the inversion of the score test whose null at 0 is McNemar's. Counts may be fractions, divided by a design
    effect; no samples at all (an infinite one) leave the widest interval.
    """
    if samples == 0:
        return -1.0, 1.0
    z = float(norm.ppf(0.5 + confidence / 2))
    estimate = (gained - lost) / samples
    edge = 1 - 1e-12

    def excess(delta: float, target: float) -> float:
        return max(min(tango_statistic(gained, lost, samples, delta), 1e6), -1e6) - target

    low = -1.0 if excess(-edge, z) <= 0 else float(brentq(excess, -edge, min(estimate, edge), args=(z,)))
    high = 1.0 if excess(edge, -z) >= 0 else float(brentq(excess, max(estimate, -edge), edge, args=(-z,)))
    return low, high


def design_effect(differences: Sequence[float], sources: Sequence[str]) -> float:
    """How much the variance of a mean grows because samples share a source; at least 1.

    Ratio of the cluster-robust variance (Miller, arXiv 2411.00640) to the independent one. Dividing counts by it
    before a score interval is Rao and Scott's adjustment (Biometrics 48, 1992). 1.0 when every source is its own, or
    when nothing differs.
    """
    values = np.asarray(differences, dtype=np.float64)
    centred = values - values.mean()
    independent = float((centred**2).sum())
    if independent == 0.0 or len(set(sources)) == len(values):
        return 1.0
    _, cluster = np.unique(np.asarray(sources), return_inverse=True)
    sums = np.bincount(cluster, weights=centred)
    return max(1.0, float((sums**2).sum()) / independent)


def few_sources_effect(sources: Sequence[str], confidence: float) -> float:
    """By how much more counts must shrink because the design effect was itself estimated, from few sources: the
    interval that follows is as wide as one by Student's t with sources - 1 degrees of freedom and the small-sample
    variance n / (n - 1). 1.0 when every source has one sample, infinite when all samples share one: they decide
    nothing.
    """
    count = len(set(sources))
    if count == len(sources):
        return 1.0
    if count == 1:
        return math.inf
    tail = 0.5 + confidence / 2
    return float(student_t.ppf(tail, count - 1) / norm.ppf(tail)) ** 2 * count / (count - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Step-down adjusted p-values over one family (Holm, Scandinavian Journal of Statistics 6, 1979), in order given.

    Rejecting where the adjusted value is below alpha keeps the chance of any false rejection below alpha.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * float(p_values[index])))
        adjusted[index] = running
    return adjusted


def minimum_detectable_effect(samples: float, spread: float, confidence: float = 0.95, power: float = 0.8) -> float:
    """Smallest true mean difference that a two-sided test at `confidence` finds with `power` (Miller 2024).

    `spread`: standard deviation of one sample's paired difference; for accuracies about sqrt(share that disagree), so
    at 8 % disagreement one point needs about 6,300 samples.
    """
    return _both_tails(confidence, power) * spread / math.sqrt(samples)


def samples_needed(effect: float, spread: float, confidence: float = 0.95, power: float = 0.8) -> int:
    """Samples so that a difference of `effect` is found with `power`; with `effect` a non-inferiority margin, so that
    an equal candidate passes with that probability. Raises `ValueError` on a margin that is not positive."""
    if effect <= 0:
        raise ValueError(f"a margin must be positive, not {effect}")
    return math.ceil((_both_tails(confidence, power) * spread / effect) ** 2)


def _both_tails(confidence: float, power: float) -> float:
    return float(norm.ppf(0.5 + confidence / 2) + norm.ppf(power))
