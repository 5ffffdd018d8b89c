"""The formulas of paired proportions, against published values and against simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.quality.proportions import (
    design_effect,
    few_sources_effect,
    holm,
    mcnemar_exact,
    minimum_detectable_effect,
    samples_needed,
    tango_interval,
    tango_statistic,
)


def test_tango_interval_gives_the_values_published_for_airway_reactivity() -> None:
    # Bentur et al. 2009 as analysed by Fagerland, Lydersen and Laake, BMC Medical Research Methodology 14:133 (2014).
    low, high = tango_interval(1, 7, 21, 0.95)
    assert low == pytest.approx(-0.517, abs=5e-4)
    assert high == pytest.approx(-0.026, abs=5e-4)


def test_tango_interval_agrees_with_propcis() -> None:
    # R: PropCIs::scoreci.mp on 48 and 41 discordant of 549 pairs, at 90 %.
    low, high = tango_interval(48, 41, 549, 0.90)
    assert low == pytest.approx(-0.0157, abs=1e-4)
    assert high == pytest.approx(0.0414, abs=1e-4)


def test_mcnemar_is_exact_on_the_same_table() -> None:
    assert mcnemar_exact(1, 7) == pytest.approx(0.0703, abs=1e-4)
    assert mcnemar_exact(0, 0) == 1.0


def test_no_disagreement_still_leaves_an_interval() -> None:
    low, high = tango_interval(0, 0, 400, 0.95)
    assert low == pytest.approx(-0.0095, abs=1e-4)
    assert high == pytest.approx(0.0095, abs=1e-4)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_interval_holds_its_estimate_and_mirrors_when_sides_swap(counts: tuple[int, int, int]) -> None:
    samples, gained, lost = counts
    lost = min(lost, samples - gained)
    low, high = tango_interval(gained, lost, samples, 0.95)
    assert -1 <= low <= (gained - lost) / samples <= high <= 1
    mirrored = tango_interval(lost, gained, samples, 0.95)
    assert mirrored == pytest.approx((-high, -low), abs=1e-6)


@given(st.integers(2, 200), st.integers(0, 40), st.integers(0, 40))
def test_interval_ends_solve_the_score_equation(samples: int, gained: int, lost: int) -> None:
    samples += gained + lost
    low, high = tango_interval(gained, lost, samples, 0.95)
    assert tango_statistic(gained, lost, samples, low) == pytest.approx(1.95996, abs=1e-3)
    assert tango_statistic(gained, lost, samples, high) == pytest.approx(-1.95996, abs=1e-3)


@pytest.mark.parametrize(
    ("samples", "gain_rate", "loss_rate"), [(100, 0.05, 0.05), (400, 0.01, 0.03), (600, 0.10, 0.10)]
)
def test_interval_covers_the_truth_as_often_as_it_says(samples: int, gain_rate: float, loss_rate: float) -> None:
    draws = np.random.default_rng(7).multinomial(samples, [gain_rate, loss_rate, 1 - gain_rate - loss_rate], 1500)
    truth = gain_rate - loss_rate
    covered = [low <= truth <= high for low, high in (tango_interval(b, c, samples, 0.95) for b, c, _ in draws)]
    assert 0.935 < np.mean(covered) < 0.975


def test_mcnemar_keeps_its_type_one_error() -> None:
    draws = np.random.default_rng(8).multinomial(400, [0.05, 0.05, 0.9], 2000)
    rejected = np.mean([mcnemar_exact(int(b), int(c)) < 0.05 for b, c, _ in draws])
    assert rejected <= 0.05


def test_one_point_at_eight_percent_disagreement_needs_about_6300_samples() -> None:
    assert samples_needed(0.01, math.sqrt(0.08)) == pytest.approx(6300, rel=0.01)
    assert minimum_detectable_effect(6300, math.sqrt(0.08)) == pytest.approx(0.01, rel=0.01)


def test_margin_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        samples_needed(0.0, 0.3)


def test_holm_steps_down_and_never_decreases() -> None:
    # Holm 1979: smallest times m, next times m - 1, each at least the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_holm_keeps_the_family_wise_error() -> None:
    rng = np.random.default_rng(9)
    any_rejected = np.mean([min(holm(list(rng.uniform(size=6)))) < 0.05 for _ in range(4000)])
    assert any_rejected < 0.06


def test_samples_that_repeat_their_source_count_as_few() -> None:
    rng = np.random.default_rng(10)
    values = np.repeat(rng.choice([-1.0, 0.0, 1.0], 200, p=[0.1, 0.8, 0.1]), 4)
    sources = [str(index // 4) for index in range(800)]
    assert design_effect(list(values), sources) == pytest.approx(4.0, rel=1e-6)
    assert design_effect(list(values), [str(index) for index in range(800)]) == 1.0


def test_few_sources_widen_as_student_s_t_does() -> None:
    assert few_sources_effect(["a", "b", "c"], 0.95) == 1.0
    # t with 4 degrees of freedom: 2.7764 at 97.5 %; the normal's 1.9600.
    five = [str(index % 5) for index in range(50)]
    assert few_sources_effect(five, 0.95) == pytest.approx((2.7764 / 1.9600) ** 2 * 5 / 4, rel=1e-3)
    assert few_sources_effect(["a", "a"], 0.95) == math.inf
    assert tango_interval(0, 0, 0, 0.95) == (-1.0, 1.0)
