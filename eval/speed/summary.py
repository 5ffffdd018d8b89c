"""Blocks of both sides to flat metrics: `speed.<workload>.<metric>.<statistic>` and their ratios, `memory.<metric>`."""

import zlib
from collections.abc import Mapping, Sequence

from eval.engine.telemetry import Speculation
from eval.speed.bootstrap import Interval, pair_ratio_interval, request_ratio_intervals, step_ratio_interval
from eval.speed.metrics import (
    LATENCIES,
    STATISTICS,
    STEP_RATES,
    Block,
    SloLimits,
    latency_values,
    pooled,
    statistics,
    window_rates,
)

QUEUE_NOISE_MS = 1.0
"""A queue wait below this is the loop's own turn; a ratio of two such waits says nothing."""


def measured_metrics(name: str, blocks: Sequence[Block], limits: SloLimits | None) -> dict[str, float]:
    """One side's metrics of one workload; what was never observed is left out."""
    found: dict[str, float] = {}
    for metric in LATENCIES:
        values = [value for block in blocks for request in latency_values(block, metric) for value in request]
        if values:
            found.update({f"speed.{name}.{metric}.{which}": value for which, value in statistics(values).items()})
    for metric, slices in STEP_RATES.items():
        parts = [part for block in blocks for part in slices(block)]
        if parts:
            found[f"speed.{name}.{metric}"] = pooled(parts).per_second
    per_block = [window_rates(block, limits) for block in blocks]
    for metric in per_block[0]:
        found[f"speed.{name}.{metric}"] = pooled([rates[metric] for rates in per_block if metric in rates]).per_second
    found |= _speculation_metrics(name, Speculation.of_all(block.speculation for block in blocks))
    found[f"speed.{name}.failed_requests"] = float(sum(not r.finished for block in blocks for r in block.measured()))
    return found


def _speculation_metrics(name: str, speculation: Speculation) -> dict[str, float]:
    """None when nothing was drafted."""
    if speculation.accept_rate is None or speculation.mean_accepted_length is None:
        return {}
    rates = enumerate(speculation.accept_rate_per_position, start=1)
    return {
        f"speed.{name}.speculative_accept_rate": speculation.accept_rate,
        f"speed.{name}.speculative_accepted_length": speculation.mean_accepted_length,
        **{f"speed.{name}.speculative_accept_rate.position_{place}": rate for place, rate in rates},
    }


def ratio_metrics(
    name: str,
    baseline: Sequence[Block],
    candidate: Sequence[Block],
    limits: SloLimits | None,
    *,
    seed: int,
    confidence: float,
) -> dict[str, float]:
    """`<metric>.ratio` (candidate / baseline) wherever both sides have the metric, and `.ratio.low`, `.ratio.high`
    where there is enough to resample: a percentile needs one observation beyond it, a maximum has no interval."""
    before, after = measured_metrics(name, baseline, limits), measured_metrics(name, candidate, limits)
    found: dict[str, float] = {}

    def add(key: str, interval: Interval | None) -> None:
        if key not in before or key not in after or before[key] <= 0:
            return
        found[f"{key}.ratio"] = after[key] / before[key]
        if interval is not None:
            found[f"{key}.ratio.low"], found[f"{key}.ratio.high"] = interval.low, interval.high

    for metric in LATENCIES:
        if metric == "queue_ms" and before.get(f"speed.{name}.queue_ms.p50", 0.0) < QUEUE_NOISE_MS:
            continue
        left = [latency_values(block, metric) for block in baseline]
        right = [latency_values(block, metric) for block in candidate]
        observed = sum(len(request) for block in left for request in block)
        wanted = [which for which in STATISTICS if _can_resample(which, observed)]
        intervals = request_ratio_intervals(left, right, wanted, seed=_seed(seed, metric), confidence=confidence)
        for which in STATISTICS:
            add(f"speed.{name}.{metric}.{which}", intervals.get(which))
    for metric, slices in STEP_RATES.items():
        before_steps, after_steps = [slices(block) for block in baseline], [slices(block) for block in candidate]
        interval = step_ratio_interval(before_steps, after_steps, seed=_seed(seed, metric), confidence=confidence)
        add(f"speed.{name}.{metric}", interval)
    before_windows = [window_rates(block, limits) for block in baseline]
    after_windows = [window_rates(block, limits) for block in candidate]
    for metric in before_windows[0]:
        if all(metric in rates for rates in (*before_windows, *after_windows)):
            pairs = ([rates[metric] for rates in before_windows], [rates[metric] for rates in after_windows])
            add(f"speed.{name}.{metric}", pair_ratio_interval(*pairs, confidence=confidence))
    return found


def memory_metrics(sides: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """`memory.<metric>` by side, with the ratio on the candidate's.

    `kv_capacity_tokens` is what a side's weights leave for the KV cache, in tokens, out of the same memory: the weights
    and the KV cache of the baseline (of the candidate itself when it is alone).
    """
    reference = sides.get("baseline", sides["candidate"])
    budget = reference["weights_bytes"] + reference["kv_cache_bytes"]
    found: dict[str, dict[str, float]] = {}
    for side, memory in sides.items():
        capacity = (budget - memory["weights_bytes"]) / memory["kv_bytes_per_token"]
        found[side] = {f"memory.{name}": float(value) for name, value in memory.items()}
        found[side]["memory.kv_capacity_tokens"] = float(int(capacity))
    for name, before in found.get("baseline", {}).items():
        if name in found["candidate"] and before > 0:
            found["candidate"][f"{name}.ratio"] = found["candidate"][name] / before
    return found


def cost_per_million_tokens(price_per_hour: float, output_tokens_per_second: float) -> float:
    """In the currency of the price."""
    return price_per_hour / 3600 / output_tokens_per_second * 1e6


def _can_resample(which: str, observed: int) -> bool:
    if which == "max":
        return False
    return which == "mean" or observed * (1 - float(which[1:]) / 100) >= 1


def _seed(seed: int, metric: str) -> int:
    return (seed * 2654435761 + zlib.crc32(metric.encode())) & 0xFFFFFFFF
