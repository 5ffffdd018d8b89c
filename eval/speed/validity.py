"""Whether a speed measurement may be believed: each check says "pass", "warn: why" (a doubt) or "fail: why" (the work
was not what the workload says, so that its times decide nothing).

Every check stands for a way in which published benchmarks went wrong: a warm prefix cache, requests preempted and
computed twice, failures dropped, output lengths not honoured, a stranger on the machine, two modes averaged into one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.speed.metrics import Block, queue_ms, ttft_ms

PASS = "pass"

BIMODAL_MINOR_SHARE = 0.1
BIMODAL_EXPLAINED = 0.8
"""Splitting a normal sample at its best point explains 2/pi = 64 % of its variance, a uniform one 75 %."""
BIMODAL_RATIO = 1.3
CLOCK_TOLERANCE_MS = 10.0
QUEUE_GROWTH_MS = 250.0
ENOUGH_PAIRS = 2


def doubts_of(validity: Mapping[str, str]) -> dict[str, str]:
    """The checks that did not pass, with what they said."""
    return {check: said for check, said in validity.items() if said != PASS}


def check_validity(
    blocks: Mapping[str, Sequence[Block]],
    request_records: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    foreign_cores: Sequence[float],
    quiet_cores: float,
    open_loop: bool,
    pairs: int | None,
) -> dict[str, str]:
    """All checks. `blocks` and `request_records` (the engine's) are by side, over all repeats; `pairs` is None where
    one side was measured alone."""
    checks = {
        "prefix_cache": _each_side(blocks, prefix_cache),
        "preemptions": _each_side(blocks, preemptions),
        "failures": _each_side(blocks, failures, "fail"),
        "output_length": _each_side(blocks, output_length, "fail"),
        "token_counts": _worst(
            [(side, token_counts(blocks[side], request_records[side])) for side in blocks], len(blocks), "fail"
        ),
        "clock": _worst([(side, clock(blocks[side], request_records[side])) for side in blocks], len(blocks)),
        "same_work": same_work(blocks),
        "bimodal": _each_side(blocks, bimodal),
        "quiet_machine": quiet_machine(foreign_cores, quiet_cores),
    }
    if pairs is not None:
        checks["enough_pairs"] = enough_pairs(pairs)
    if open_loop:
        checks["steady_queue"] = _each_side(blocks, steady_queue)
    return checks


def _each_side(blocks: Mapping[str, Sequence[Block]], check: Any, word: str = "warn") -> str:
    return _worst([(side, check(of_side)) for side, of_side in blocks.items()], len(blocks), word)


def _worst(said: Sequence[tuple[str, str | None]], sides: int, word: str = "warn") -> str:
    whys = [f"{side}: {why}" if sides > 1 else why for side, why in said if why]
    return f"{word}: {'; '.join(whys)}" if whys else PASS


def prefix_cache(blocks: Sequence[Block]) -> str | None:
    """Tokens answered from the cache that the workload did not mean to share."""
    stray = [max(0, r.prompt_cache_hit - r.shared_prefix_tokens) for block in blocks for r in block.measured()]
    hits = sum(1 for tokens in stray if tokens)
    return f"{hits} of {len(stray)} requests took {sum(stray)} prompt tokens from the cache" if hits else None


def preemptions(blocks: Sequence[Block]) -> str | None:
    count = sum(request.preemptions for block in blocks for request in block.measured())
    return f"{count} preemptions, whose tokens were computed twice; give the KV cache more blocks" if count else None


def failures(blocks: Sequence[Block]) -> str | None:
    failed = [request for block in blocks for request in block.measured() if not request.finished]
    return f"{len(failed)} requests failed, the first with: {failed[0].error}" if failed else None


def output_length(blocks: Sequence[Block]) -> str | None:
    """Output tokens received against those asked for."""
    finished = [request for block in blocks for request in block.measured() if request.finished]
    wrong = [request for request in finished if len(request.token_times_s) != request.requested_output_tokens]
    if not wrong:
        return None
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(finished)} requests have another output length than asked; {first.request_id} has "
        f"{len(first.token_times_s)} tokens, not {first.requested_output_tokens}"
    )


def token_counts(blocks: Sequence[Block], records: Sequence[Mapping[str, Any]]) -> str | None:
    """Tokens as the client counted them against the engine's own count."""
    counted = {r.request_id: (r.input_tokens, len(r.token_times_s)) for b in blocks for r in b.requests if r.finished}
    engine = {record["request_id"]: (record["input_tokens"], record["output_tokens"]) for record in records}
    wrong = [name for name, counts in counted.items() if engine.get(name) != counts]
    if not wrong:
        return None
    return f"{len(wrong)} requests differ; {wrong[0]}: client {counted[wrong[0]]}, engine {engine.get(wrong[0])}"


def clock(blocks: Sequence[Block], records: Sequence[Mapping[str, Any]]) -> str | None:
    """TTFT as the client saw it against the engine's own, which must not leave anything out."""
    engine = {record["request_id"]: record["ttft_ms"] for record in records}
    gaps = [
        abs(ttft_ms(request) - engine[request.request_id])
        for block in blocks
        for request in block.measured()
        if request.finished and engine.get(request.request_id) is not None
    ]
    late = float(np.percentile(gaps, 95)) if gaps else 0.0
    return f"client and engine disagree on TTFT by {late:.1f} ms (p95)" if late > CLOCK_TOLERANCE_MS else None


def same_work(blocks: Mapping[str, Sequence[Block]]) -> str:
    """Both sides did the same requests with the same tokens."""
    work = [
        Counter((r.request_id, r.input_tokens, len(r.token_times_s)) for block in of_side for r in block.measured())
        for of_side in blocks.values()
    ]
    different = sum(((work[0] - work[-1]) + (work[-1] - work[0])).values())
    return f"fail: {different} requests differ in tokens between the sides" if different else PASS


def bimodal(blocks: Sequence[Block]) -> str | None:
    """Whether decode steps of the commonest batch size fall into two groups, which no single number describes."""
    steps = [s for block in blocks for s in block.measured_steps() if s.decode_tokens and not s.prefill_tokens]
    if len(steps) < 20:
        return None
    batch = Counter(step.decode_tokens for step in steps).most_common(1)[0][0]
    milliseconds = [1e3 * step.seconds for step in steps if step.decode_tokens == batch]
    split = two_modes(milliseconds)
    if split is None:
        return None
    return f"decode steps of {batch} tokens take either {split[0]:.1f} or {split[1]:.1f} ms"


def two_modes(values: Sequence[float]) -> tuple[float, float] | None:
    """The means of two groups, or None where one describes the values as well.

    The best split of the sorted logarithms (Otsu's criterion: most variance between the groups) counts when the
    smaller group holds a tenth, the split explains BIMODAL_EXPLAINED of the variance and the means are BIMODAL_RATIO
    apart.
    """
    logs = np.sort(np.log(np.asarray(values, dtype=float)))
    count = len(logs)
    if count < 10 or np.var(logs) == 0:
        return None
    below = np.arange(1, count)
    sums = np.cumsum(logs)[:-1]
    mean_below, mean_above = sums / below, (logs.sum() - sums) / (count - below)
    explained = below * (count - below) / count**2 * (mean_above - mean_below) ** 2 / np.var(logs)
    best = int(np.argmax(explained))
    minor = min(below[best], count - below[best]) / count
    low, high = float(np.exp(mean_below[best])), float(np.exp(mean_above[best]))
    if minor < BIMODAL_MINOR_SHARE or explained[best] < BIMODAL_EXPLAINED or high / low < BIMODAL_RATIO:
        return None
    return low, high


def quiet_machine(foreign_cores: Sequence[float], quiet_cores: float) -> str:
    """How much of the machine other processes used while blocks ran."""
    if not foreign_cores:
        return "warn: too short to see whether the machine was quiet"
    mean = float(np.mean(foreign_cores))
    if mean <= quiet_cores:
        return PASS
    return f"warn: other processes used {mean:.2f} cores on average (at most {max(foreign_cores):.2f})"


def enough_pairs(pairs: int) -> str:
    """Whether the ratios' intervals can know of drift between blocks."""
    return (
        PASS if pairs >= ENOUGH_PAIRS else "warn: a single pair of blocks shows no drift between blocks; repeat 4 times"
    )


def steady_queue(blocks: Sequence[Block]) -> str | None:
    """Whether the queue kept growing: then the rate is above the capacity, and latency measures the run's length."""
    for block in blocks:
        waits = [queue_ms(request) for request in block.measured() if request.finished]
        third = len(waits) // 3
        if third >= 3:
            growth = float(np.median(waits[-third:]) - np.median(waits[:third]))
            if growth > QUEUE_GROWTH_MS:
                return f"the queue grew by {growth:.0f} ms within a block: the rate is above the capacity"
    return None
