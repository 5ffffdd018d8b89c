"""The metrics' definitions, against values worked out by hand."""

import numpy as np
import pytest

from eval.speed.metrics import (
    Block,
    Rate,
    RequestTiming,
    SloLimits,
    StepTiming,
    bandwidth_utilization,
    decode_slices,
    e2e_ms,
    itl_ms,
    kept_slo,
    latency_values,
    pooled,
    prefill_ms,
    prefill_slices,
    queue_ms,
    spread_token_times,
    statistics,
    tpot_ms,
    ttft_ms,
    window_rates,
)


def request(name="a", arrival=10.0, scheduled=10.2, tokens=(10.5, 10.6, 10.8, 11.1), **more):
    return RequestTiming(name, arrival, scheduled, tuple(tokens), 5, len(tokens), **more)


def test_latencies_follow_their_definitions():
    one = request()
    assert queue_ms(one) == pytest.approx(200)
    assert prefill_ms(one) == pytest.approx(300)
    assert ttft_ms(one) == pytest.approx(500) == pytest.approx(queue_ms(one) + prefill_ms(one))
    assert itl_ms(one) == pytest.approx([100, 200, 300])
    assert e2e_ms(one) == pytest.approx(1100)


def test_tpot_leaves_the_first_token_out():
    assert tpot_ms(request()) == pytest.approx(600 / 3)


def test_a_single_token_has_no_tpot():
    assert tpot_ms(request(tokens=[10.5])) is None


def test_percentiles_interpolate_linearly():
    assert statistics([4, 1, 2, 3])["p50"] == 2.5
    assert statistics([0, 10])["p90"] == pytest.approx(9)
    assert statistics(list(range(101)))["p99"] == 99
    assert statistics([1, 2, 6], ["mean", "max"]) == {"mean": 3, "max": 6}
    values = np.random.default_rng(0).normal(size=37)
    assert statistics(values, ["p95"])["p95"] == pytest.approx(np.percentile(values, 95))


def test_tokens_of_one_delivery_share_the_gap_before_it():
    assert spread_token_times([(1.0, 1), (2.5, 3), (3.0, 1)]) == pytest.approx((1.0, 1.5, 2.0, 2.5, 3.0))


def test_warmup_and_failures_leave_the_latencies_but_failures_count_against_goodput():
    block = Block(
        requests=(
            request("warm", arrival=0, tokens=[9.0], warmup=True),
            request("good", arrival=10.0, tokens=[10.1, 10.2, 10.3]),
            request("slow", arrival=10.0, tokens=[11.5, 12.0]),
            request("broken", arrival=10.0, tokens=[], error="out of blocks"),
        ),
        steps=(),
    )
    assert block.window_s() == (10.0, 12.0)
    assert latency_values(block, "ttft_ms") == [pytest.approx([100]), pytest.approx([1500]), []]
    rates = window_rates(block, SloLimits(ttft_ms=1000, tpot_ms=200))
    assert rates["requests_per_second"].per_second == pytest.approx(1.0)
    assert rates["output_tokens_per_second"].per_second == pytest.approx(2.5)
    assert rates["goodput"].per_second == pytest.approx(0.5)


def test_slo_needs_both_limits():
    one = request()
    assert kept_slo(one, SloLimits(501, 201))
    assert not kept_slo(one, SloLimits(499, 201))
    assert not kept_slo(one, SloLimits(501, 199))


def test_step_rates_count_measured_steps_of_their_own_kind():
    steps = (
        StepTiming(9.0, 9.9, 100, 0),
        StepTiming(10.0, 10.5, 60, 2),
        StepTiming(10.5, 10.6, 0, 4, context_tokens=50),
        StepTiming(10.6, 10.8, 0, 4, context_tokens=60),
        StepTiming(12.0, 12.5, 0, 4),
    )
    block = Block((request(tokens=[10.5, 10.6, 11.1]),), steps)
    assert pooled(decode_slices(block)).per_second == pytest.approx(8 / 0.3)
    assert prefill_slices(block) == [Rate(60, 0.5)]
    # weights 1000 bytes and 2 bytes a token: 1100 bytes in 0.1 s, 1120 in 0.2 s, of 20,000 bytes a second
    assert bandwidth_utilization(block, 1000, 2, 20_000) == pytest.approx(np.median([0.55, 0.28]))


def test_blocks_pool_work_over_time_not_rates():
    assert pooled([Rate(10, 1), Rate(10, 4)]).per_second == 4
