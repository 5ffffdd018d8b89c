"""Intervals of ratios: right where the answer is known, and honest about few pairs."""

import numpy as np
import pytest
from scipy.stats import t

from eval.speed.bootstrap import (
    expanded_levels,
    pair_ratio_interval,
    request_ratio_intervals,
    step_ratio_interval,
)
from eval.speed.metrics import Rate

MEAN = ["mean"]


def pairs_of_requests(rng, pairs=4, requests=20, factor=1.0):
    before = [[[float(v)] for v in rng.lognormal(0, 0.3, requests)] for _ in range(pairs)]
    after = [[[v[0] * factor * float(rng.lognormal(0, 0.05))] for v in block] for block in before]
    return before, after


def test_a_constant_factor_has_an_interval_of_no_width():
    before = [[[1.0], [2.0]], [[3.0], [5.0]]]
    after = [[[v[0] * 1.5] for v in block] for block in before]
    interval = request_ratio_intervals(before, after, MEAN, seed=0)["mean"]
    assert interval.low == pytest.approx(1.5)
    assert interval.high == pytest.approx(1.5)


def test_identity_contains_one_and_a_difference_is_seen():
    rng = np.random.default_rng(3)
    same = request_ratio_intervals(*pairs_of_requests(rng), MEAN, seed=0)["mean"]
    assert same.low < 1 < same.high
    slower = request_ratio_intervals(*pairs_of_requests(rng, factor=1.3), MEAN, seed=0)["mean"]
    assert 1 < slower.low < 1.3 < slower.high


def test_coverage_of_the_interval_is_at_least_nominal_when_blocks_drift():
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(60):
        before, after = pairs_of_requests(rng, pairs=4, requests=8)
        after = [[[v[0] * drift] for v in block] for block, drift in zip(after, rng.lognormal(0, 0.1, 4), strict=True)]
        interval = request_ratio_intervals(before, after, MEAN, seed=trial, draws=200)["mean"]
        covered += interval.low <= 1 <= interval.high
    assert covered >= 52


def test_same_seed_same_interval():
    sides = pairs_of_requests(np.random.default_rng(1))
    assert request_ratio_intervals(*sides, MEAN, seed=7) == request_ratio_intervals(*sides, MEAN, seed=7)


def test_a_request_that_failed_on_one_side_does_not_stop_the_interval():
    before, after = pairs_of_requests(np.random.default_rng(1))
    after[0][0] = []
    assert "mean" in request_ratio_intervals(before, after, MEAN, seed=0)


def test_levels_are_those_of_student_t():
    low, high = expanded_levels(0.95, 10**6)
    assert (low, high) == pytest.approx((0.025, 0.975), abs=1e-4)
    assert expanded_levels(0.95, 4)[0] < 0.001
    assert expanded_levels(0.95, 1) == pytest.approx((0.025, 0.975))


def test_step_ratio_of_constant_rates_is_exact():
    slow = [[Rate(8, 0.2)] * 5, [Rate(8, 0.2)] * 7]
    fast = [[Rate(8, 0.1)] * 6, [Rate(8, 0.1)] * 4]
    interval = step_ratio_interval(slow, fast, seed=0)
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((2, 2))


def test_step_ratio_needs_steps_in_every_block():
    assert step_ratio_interval([[Rate(1, 1)], []], [[Rate(1, 1)], [Rate(1, 1)]], seed=0) is None


def test_pair_interval_by_hand():
    before, after = [Rate(10, 1), Rate(10, 1)], [Rate(11, 1), Rate(12, 1)]
    logs = np.log([1.1, 1.2])
    spread = t.ppf(0.975, 1) * np.std(logs, ddof=1) / np.sqrt(2)
    interval = pair_ratio_interval(before, after)
    assert interval is not None
    assert interval.low == pytest.approx(1.15 * np.exp(-spread))
    assert interval.high == pytest.approx(1.15 * np.exp(spread))


def test_one_pair_says_nothing_about_a_window():
    assert pair_ratio_interval([Rate(1, 1)], [Rate(2, 1)]) is None
