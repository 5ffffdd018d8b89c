"""Each check passes on clean blocks and says why on the fault that it is there for."""

from dataclasses import replace

import numpy as np
import pytest

from eval.speed.metrics import Block, RequestTiming, StepTiming
from eval.speed.validity import check_validity, enough_pairs, two_modes


def clean_block(step_ms=(10.0,) * 30):
    times = 100 + np.cumsum(np.array(step_ms)) / 1e3
    requests = tuple(
        RequestTiming(f"w/r0/{index}", 100.0, 100.0, tuple(times), input_tokens=8, requested_output_tokens=len(times))
        for index in range(4)
    )
    begins = np.concatenate([[100.0], times[:-1]])
    steps = tuple(StepTiming(begin, end, 0, 4, 40) for begin, end in zip(begins, times, strict=True))
    return Block(requests, steps)


def records_of(block):
    return [
        {
            "request_id": request.request_id,
            "input_tokens": request.input_tokens,
            "output_tokens": len(request.token_times_s),
            "ttft_ms": 1e3 * (request.token_times_s[0] - request.arrival_s) if request.token_times_s else None,
        }
        for request in block.requests
    ]


def check(block, records=None, foreign=(0.0, 0.1), other=None, open_loop=False):
    sides = {"baseline": [other or clean_block()] * 4, "candidate": [block] * 4}
    of = {"baseline": records_of(sides["baseline"][0]), "candidate": records_of(block) if records is None else records}
    return check_validity(sides, of, foreign_cores=foreign, quiet_cores=0.15, open_loop=open_loop, pairs=4)


def with_request(block, **changes):
    return Block((replace(block.requests[0], **changes), *block.requests[1:]), block.steps)


def test_a_clean_measurement_passes_every_check():
    assert set(check(clean_block(), open_loop=True).values()) == {"pass"}


@pytest.mark.parametrize(
    ("name", "block", "word", "says"),
    [
        ("prefix_cache", with_request(clean_block(), prompt_cache_hit=16), "warn", "4 of 16 requests took 64 prompt"),
        ("preemptions", with_request(clean_block(), preemptions=2), "warn", "8 preemptions"),
        ("bimodal", clean_block([10.0, 20.0] * 15), "warn", "either 10.0 or 20.0 ms"),
        ("failures", with_request(clean_block(), error="does not fit"), "fail", "does not fit"),
        ("output_length", with_request(clean_block(), requested_output_tokens=31), "fail", "30 tokens, not 31"),
        ("same_work", with_request(clean_block(), input_tokens=9), "fail", "differ in tokens"),
    ],
)
def test_a_doubt_is_a_warning_and_other_work_a_failure_that_says_why(name, block, word, says):
    said = check(block)[name]
    assert said.startswith(f"{word}: ")
    assert says in said


def test_hits_in_a_prefix_that_was_meant_to_be_shared_pass():
    block = with_request(clean_block(), prompt_cache_hit=16, shared_prefix_tokens=20)
    assert check(block)["prefix_cache"] == "pass"


def test_the_engine_must_count_the_same_tokens_and_the_same_ttft():
    block = clean_block()
    records = records_of(block)
    records[0] = {**records[0], "output_tokens": 29, "ttft_ms": 500.0}
    checks = check(block, records)
    assert "client (8, 30), engine (8, 29)" in checks["token_counts"]
    assert "disagree on TTFT" in checks["clock"]


def test_one_pair_is_too_few():
    assert enough_pairs(1).startswith("warn: a single pair")
    assert enough_pairs(2) == "pass"


def test_a_busy_machine_is_told():
    assert "0.80 cores" in check(clean_block(), foreign=(0.7, 0.9))["quiet_machine"]


def test_a_queue_that_keeps_growing_is_told_for_open_traffic():
    requests = tuple(
        RequestTiming(f"{i}", i * 0.1, i * 0.1 + i * 0.2, (i * 0.1 + i * 0.2 + 0.1,), 8, 1) for i in range(12)
    )
    said = check(Block(requests, ()), other=Block(requests, ()), open_loop=True)["steady_queue"]
    assert "above the capacity" in said


def test_one_group_is_not_two():
    rng = np.random.default_rng(0)
    assert two_modes(rng.normal(10, 1, 500)) is None
    assert two_modes(rng.uniform(5, 15, 500)) is None
    assert two_modes([10.0] * 50 + [30.0] * 2) is None
    assert two_modes(np.concatenate([rng.normal(10, 0.3, 70), rng.normal(16, 0.3, 30)])) == pytest.approx(
        (10, 16), rel=0.02
    )
