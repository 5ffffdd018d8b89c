"""Intervals for candidate / baseline, from blocks that ran in pairs.

The resampling unit is the *pair of blocks* (same repeat, same traffic, one after the other), because what disturbs a
machine disturbs a whole block. Within a drawn pair the requests are drawn again, the same ones on both sides, or the
steps, each side for itself. Few pairs make percentile intervals too narrow, so their levels are expanded to those of a
Student t with pairs - 1 degrees of freedom (Hesterberg 2015, "What Teachers Should Know about the Bootstrap").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, t

from eval.speed.metrics import Rate

DRAWS = 1000
RESAMPLING = (
    f"pair of blocks, then requests (the same on both sides) or steps within it; {DRAWS} draws, seeded, percentile "
    "interval with expanded levels; rates over a whole window: Student t on the log ratios of the pairs"
)


@dataclass(frozen=True)
class Interval:
    """Both ends of a ratio's interval."""

    low: float
    high: float


def expanded_levels(confidence: float, units: int) -> tuple[float, float]:
    """The two quantile levels whose interval over `units` units covers as a Student t interval would; plain for one."""
    tail = (1 - confidence) / 2
    if units >= 2:
        tail = float(norm.cdf(-np.sqrt(units / (units - 1)) * t.ppf(1 - tail, units - 1)))
    return tail, 1 - tail


def request_ratio_intervals(
    baseline: Sequence[Sequence[Sequence[float]]],
    candidate: Sequence[Sequence[Sequence[float]]],
    statistics: dict[str, Callable[[np.ndarray], float]],
    *,
    seed: int,
    confidence: float = 0.95,
    draws: int = DRAWS,
) -> dict[str, Interval]:
    """The interval of statistic(candidate) / statistic(baseline), by statistic.

    Args:
        baseline, candidate: [pair][request] -> the request's values of one metric (one, or its gaps, or none where it
            failed); the same pairs and requests on both sides.
        statistics: name to function over pooled values.

    A statistic whose baseline was 0 in some draw, or that had nothing to pool, is left out.
    """
    rng = np.random.default_rng(seed)
    before = [[np.asarray(values, dtype=float) for values in pair] for pair in baseline]
    after = [[np.asarray(values, dtype=float) for values in pair] for pair in candidate]
    ratios: dict[str, list[float]] = {name: [] for name in statistics}
    for _ in range(draws):
        left: list[np.ndarray] = []
        right: list[np.ndarray] = []
        for pair in rng.integers(len(before), size=len(before)):
            for request in rng.integers(len(before[pair]), size=len(before[pair])):
                left.append(before[pair][request])
                right.append(after[pair][request])
        denominators, numerators = np.concatenate(left), np.concatenate(right)
        if not len(denominators) or not len(numerators):
            continue
        for name, of in statistics.items():
            below = of(denominators)
            ratios[name].append(of(numerators) / below if below > 0 else np.nan)
    return _intervals(ratios, expanded_levels(confidence, len(before)), draws)


def step_ratio_interval(
    baseline: Sequence[Sequence[Rate]],
    candidate: Sequence[Sequence[Rate]],
    *,
    seed: int,
    confidence: float = 0.95,
    draws: int = DRAWS,
) -> Interval | None:
    """The interval of a rate over steps, candidate / baseline; [pair][step] -> (amount, seconds).

    Steps do not correspond between the sides, so each side draws its own. None where a block has no such step.
    """
    if not all(baseline) or not all(candidate):
        return None
    rng = np.random.default_rng(seed)
    sides = [
        [np.array([[rate.amount, rate.seconds] for rate in block]) for block in blocks]
        for blocks in (baseline, candidate)
    ]
    ratios = []
    for _ in range(draws):
        pairs = rng.integers(len(sides[0]), size=len(sides[0]))
        rates = []
        for blocks in sides:
            total = sum(
                (blocks[pair][rng.integers(len(blocks[pair]), size=len(blocks[pair]))].sum(axis=0) for pair in pairs),
                start=np.zeros(2),
            )
            rates.append(total[0] / total[1])
        ratios.append(rates[1] / rates[0] if rates[0] > 0 else np.nan)
    return _intervals({"rate": ratios}, expanded_levels(confidence, len(sides[0])), draws).get("rate")


def pair_ratio_interval(
    baseline: Sequence[Rate], candidate: Sequence[Rate], confidence: float = 0.95
) -> Interval | None:
    """The interval of a whole-window rate: Student t on the pairs' log ratios, around the ratio of the pooled rates.

    None for fewer than two pairs, or where a side did nothing in one of them.
    """
    if len(baseline) < 2 or any(rate.amount <= 0 for rate in (*baseline, *candidate)):
        return None
    logs = np.log([after.per_second / before.per_second for before, after in zip(baseline, candidate, strict=True)])
    spread = float(t.ppf((1 + confidence) / 2, len(logs) - 1) * np.std(logs, ddof=1) / np.sqrt(len(logs)))
    centre = _pooled_log(candidate) - _pooled_log(baseline)
    return Interval(float(np.exp(centre - spread)), float(np.exp(centre + spread)))


def _pooled_log(rates: Sequence[Rate]) -> float:
    return float(np.log(sum(rate.amount for rate in rates) / sum(rate.seconds for rate in rates)))


def _intervals(ratios: dict[str, list[float]], levels: tuple[float, float], draws: int) -> dict[str, Interval]:
    complete = {name: values for name, values in ratios.items() if len(values) == draws and np.all(np.isfinite(values))}
    return {name: Interval(*(float(end) for end in np.quantile(values, levels))) for name, values in complete.items()}
