"""Flat metrics: their names, ratios that mean candidate over baseline, and the noise floor of a side against itself."""

import numpy as np
import pytest

from eval.engine.telemetry import Speculation
from eval.speed.metrics import Block, RequestTiming, SloLimits, StepTiming
from eval.speed.summary import cost_per_million_tokens, measured_metrics, memory_metrics, ratio_metrics


def simulated(rng, repeat, step_s=0.01, requests=10, tokens=12):
    """A closed block: noisy steps, one prefill step of four steps' length first."""
    drift = float(rng.lognormal(0, 0.03))
    durations = step_s * drift * np.concatenate([[4.0], np.ones(tokens - 1)]) * rng.lognormal(0, 0.1, tokens)
    ends = 5.0 + np.cumsum(durations)
    begins = np.concatenate([[5.0], ends[:-1]])
    steps = tuple(
        StepTiming(b, e, 80 if i == 0 else 0, 0 if i == 0 else requests)
        for i, (b, e) in enumerate(zip(begins, ends, strict=True))
    )
    timings = tuple(
        RequestTiming(
            f"w/r{repeat}/{i}",
            5.0,
            5.0 + 0.002 * (i + rng.random()) * drift,
            tuple(ends + rng.normal(0, 1e-5)),
            8,
            tokens,
        )
        for i in range(requests)
    )
    return Block(timings, steps)


def blocks(seed, step_s=0.01, repeats=4):
    rng = np.random.default_rng(seed)
    return [simulated(rng, repeat, step_s) for repeat in range(repeats)]


def ratios(baseline, candidate):
    return ratio_metrics("w", baseline, candidate, SloLimits(1000, 1000), seed=0, confidence=0.95)


def test_a_side_against_itself_has_one_inside_its_intervals_as_often_as_they_claim():
    inside = []
    for seed in range(8):
        found = ratios(blocks(2 * seed), blocks(2 * seed + 1))
        lows = {name.removesuffix(".low"): value for name, value in found.items() if name.endswith(".low")}
        inside += [low <= 1 <= found[f"{name}.high"] for name, low in lows.items()]
    assert len(inside) > 8 * 15
    assert np.mean(inside) >= 0.9  # eight trials, each with some thirty intervals that move together


def test_drafts_are_pooled_over_the_blocks():
    def drafting(*drafts):
        speculation = Speculation()
        for drafted, accepted in drafts:
            speculation.add(drafted, accepted)
        return Block((), (), speculation)

    found = measured_metrics("w", [drafting((2, 2), (2, 0)), drafting(), drafting((1, 0))], None)
    assert found["speed.w.speculative_accept_rate"] == 2 / 5
    assert found["speed.w.speculative_accepted_length"] == 1 + 2 / 3
    assert found["speed.w.speculative_accept_rate.position_1"] == 1 / 3
    assert found["speed.w.speculative_accept_rate.position_2"] == 1 / 2
    assert not any("speculative" in metric for metric in measured_metrics("w", [Block((), ())], None))


def test_a_side_twice_as_fast_is_seen_in_latency_and_in_rate():
    found = ratios(blocks(1), blocks(2, step_s=0.005))
    assert found["speed.w.tpot_ms.p50.ratio"] == pytest.approx(0.5, rel=0.1)
    assert found["speed.w.tpot_ms.p50.ratio.high"] < 0.7
    assert found["speed.w.decode_tokens_per_second.ratio.low"] > 1.5
    assert found["speed.w.output_tokens_per_second.ratio.low"] > 1.5


def test_names_are_flat_and_a_ratio_is_the_quotient_of_two_reported_values():
    before, after = blocks(1), blocks(2)
    left, right = (measured_metrics("w", side, None) for side in (before, after))
    found = ratios(before, after)
    for name in ("speed.w.ttft_ms.p50", "speed.w.itl_ms.mean", "speed.w.decode_tokens_per_second"):
        assert found[f"{name}.ratio"] == pytest.approx(right[name] / left[name])
    assert "speed.w.goodput" not in left
    assert "speed.w.goodput" in measured_metrics("w", before, SloLimits(1000, 1000))
    assert "speed.w.itl_ms.max.ratio.low" not in found
    assert left["speed.w.failed_requests"] == 0


def test_capacity_is_what_lighter_weights_leave_for_the_cache():
    memory = memory_metrics(
        {
            "baseline": {"weights_bytes": 100, "kv_cache_bytes": 60, "kv_bytes_per_token": 2},
            "candidate": {"weights_bytes": 40, "kv_cache_bytes": 60, "kv_bytes_per_token": 2},
        }
    )
    assert memory["baseline"]["memory.kv_capacity_tokens"] == 30
    assert memory["candidate"]["memory.kv_capacity_tokens"] == 60
    assert memory["candidate"]["memory.kv_capacity_tokens.ratio"] == 2
    assert memory["candidate"]["memory.weights_bytes.ratio"] == pytest.approx(0.4)


def test_cost_by_hand():
    assert cost_per_million_tokens(3.6, 100) == pytest.approx(10)
