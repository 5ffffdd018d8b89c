"""Scheduling without a model: budgets, policies, preemption, refusals; and no schedule loses a block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.engine.block_pool import BlockPool, root_hash
from eval.engine.request import Request, SamplingParams
from eval.engine.scheduler import Scheduler, SchedulerConfig
from eval.errors import EvalError


def scheduler_with(num_blocks=64, **options):
    defaults = {
        "max_num_seqs": 4,
        "max_batched_tokens": 32,
        "block_size": 4,
        "max_total_tokens": 100,
        "max_logit_rows": 16,
    }
    return Scheduler(SchedulerConfig(**(defaults | options)), BlockPool(num_blocks), root_hash("w"))


def request_of(length, max_tokens=8, sequence=0, first_token=1, **fields):
    tokens = list(range(first_token, first_token + length))
    return Request(f"r{sequence}", tokens, SamplingParams(max_tokens=max_tokens), sequence=sequence, **fields)


def run_step(scheduler, drafts=0, accepted=0):
    """Schedule a step and let every request that is complete sample a token, as the engine does. Decoding requests
    get `drafts` drafts, of which `accepted` come true."""
    for request in scheduler.running:
        if request.is_decoding:
            left = request.params.max_tokens - request.num_output_tokens - 1
            request.draft_token_ids = [7] * min(drafts, left)
    plan = scheduler.schedule()
    assert plan.num_tokens <= scheduler.config.max_batched_tokens
    scheduler.advance(plan)
    for chunk in plan.speculative:
        request = chunk.request
        true = min(accepted, len(request.draft_token_ids))
        request.token_ids += request.draft_token_ids[:true]
        request.draft_token_ids = []
        scheduler.accept(request, true)
    for request in list(plan.requests()):
        if request.targets is not None:
            request.scored += [0.0] * (request.num_computed_tokens - request.first_scored - len(request.scored))
            if len(request.scored) == len(request.targets):
                scheduler.finish(request, "length")
        elif request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(7)
            if request.num_output_tokens == request.params.max_tokens:
                scheduler.finish(request, "length")
    scheduler.check_integrity()
    return plan


def finish_order(scheduler, requests):
    order = []
    for _ in range(500):
        run_step(scheduler)
        order += [request.request_id for request in requests if request.finished and request.request_id not in order]
        if not scheduler.has_unfinished:
            return order
    raise AssertionError("the scheduler makes no progress")


def test_decoding_goes_before_prefill():
    scheduler = scheduler_with(max_batched_tokens=8)
    scheduler.add(request_of(5, sequence=0))
    run_step(scheduler)
    scheduler.add(request_of(20, sequence=1, first_token=50))
    plan = run_step(scheduler)
    assert [request.request_id for request in plan.decodes] == ["r0"]
    assert [(chunk.start, chunk.count) for chunk in plan.prefills] == [(0, 7)]


def test_long_prompt_is_cut_into_chunks():
    scheduler = scheduler_with(max_prefill_chunk=7)
    scheduler.add(request_of(20))
    counts = [run_step(scheduler).prefill_tokens for _ in range(3)]
    assert counts == [7, 7, 6]


def test_prefix_hit_stops_before_the_last_prompt_token():
    scheduler = scheduler_with()
    scheduler.add(request_of(8, sequence=0))
    run_step(scheduler)
    twin = request_of(8, sequence=1)
    scheduler.add(twin)
    plan = run_step(scheduler)
    assert twin.prompt_cache_hit == 4
    assert [(chunk.start, chunk.count) for chunk in plan.prefills] == [(4, 4)]


def test_requests_of_one_step_share_a_prefix_too():
    scheduler = scheduler_with()
    first, second = request_of(12, sequence=0), request_of(12, sequence=1)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    assert second.block_ids[:2] == first.block_ids[:2]


def test_scoring_hit_stops_before_the_first_scored_position():
    scheduler = scheduler_with()
    for sequence in range(2):
        scheduler.add(request_of(16, sequence=sequence, targets=[1] * 9, first_scored=7))
    plan = scheduler.schedule()
    assert [(chunk.start, chunk.count) for chunk in plan.prefills] == [(0, 16), (4, 10)]
    scheduler.advance(plan)


def test_scored_rows_of_a_step_are_bounded():
    scheduler = scheduler_with(max_logit_rows=4)
    scheduler.add(request_of(16, targets=[1] * 13, first_scored=3))
    steps = []
    while scheduler.has_unfinished:
        steps.append(run_step(scheduler).prefill_tokens)
    assert steps == [7, 4, 4, 1]


def test_last_arrival_is_preempted_and_resumes_first():
    scheduler = scheduler_with(num_blocks=6, watermark=0.0)
    requests = [request_of(8, max_tokens=8, sequence=index, first_token=20 * index) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    order = finish_order(scheduler, requests)
    assert order == ["r0", "r1", "r2"]
    assert requests[0].preemptions == 0
    assert requests[1].preemptions > 0
    assert all(request.num_output_tokens == 8 for request in requests)


def test_recomputation_after_preemption_is_not_a_prompt_hit():
    scheduler = scheduler_with(num_blocks=6, watermark=0.0)
    requests = [request_of(8, max_tokens=8, sequence=index, first_token=20 * index) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    finish_order(scheduler, requests)
    assert [request.prompt_cache_hit for request in requests] == [0, 0, 0]


def test_watermark_keeps_blocks_for_those_that_run():
    scheduler = scheduler_with(num_blocks=10, watermark=0.3)
    scheduler.add(request_of(20, sequence=0))
    scheduler.add(request_of(12, sequence=1, first_token=60))
    run_step(scheduler)
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", ["r0", "r1", "r2"]), ("priority", ["r2", "r0", "r1"]), ("shortest-prompt", ["r1", "r2", "r0"])],
)
def test_policy_decides_who_goes_first(policy, expected):
    scheduler = scheduler_with(policy=policy, max_num_seqs=1)
    lengths, priorities = [9, 3, 6], [5, 5, 1]
    requests = [
        request_of(length, max_tokens=2, sequence=index, priority=priority, first_token=30 * index)
        for index, (length, priority) in enumerate(zip(lengths, priorities, strict=True))
    ]
    for request in requests:
        scheduler.add(request)
    assert finish_order(scheduler, requests) == expected


def test_a_request_of_low_priority_ages_until_nothing_overtakes_it():
    scheduler = scheduler_with(policy="priority", max_num_seqs=1)
    arrivals = [(0.0, 2), (5.0, 1), (15.0, 1), (25.0, 0), (19.0, 0)]
    requests = [
        request_of(4, max_tokens=2, sequence=index, arrival=arrival, priority=priority, first_token=10 * index)
        for index, (arrival, priority) in enumerate(arrivals)
    ]
    for request in requests:
        scheduler.add(request)
    assert finish_order(scheduler, requests) == ["r1", "r4", "r0", "r2", "r3"]


def test_request_beyond_the_context_is_refused_with_the_numbers():
    with pytest.raises(EvalError, match=r"95 prompt tokens and max_tokens=8 exceed the context of 100"):
        scheduler_with().add(request_of(95))


def test_request_beyond_the_cache_is_refused_with_the_numbers():
    with pytest.raises(EvalError, match=r"its 47 tokens take 12 KV blocks of 4 and the cache has 10"):
        scheduler_with(num_blocks=10).add(request_of(40))


def test_request_that_fits_exactly_is_served():
    scheduler = scheduler_with(num_blocks=10)
    request = request_of(33, max_tokens=8)
    scheduler.add(request)
    finish_order(scheduler, [request])
    assert request.num_output_tokens == 8


def test_unknown_policy_is_refused():
    with pytest.raises(EvalError, match="fcfs, priority, shortest-prompt"):
        scheduler_with(policy="lifo")


def test_drafts_take_what_the_step_has_left():
    scheduler = scheduler_with(max_batched_tokens=10, max_logit_rows=8)
    for sequence in range(3):
        scheduler.add(request_of(3, max_tokens=20, sequence=sequence, first_token=10 * sequence))
    run_step(scheduler)
    scheduler.add(request_of(4, sequence=3, first_token=60))
    plan = run_step(scheduler, drafts=4)
    # Three decodes and a prompt of four leave three tokens: the first in policy order gets them.
    assert [(chunk.start, chunk.count) for chunk in plan.speculative] == [(3, 4)]
    assert [request.request_id for request in plan.decodes] == ["r1", "r2"]
    assert plan.prefill_tokens == 4


def test_drafts_preempt_nobody():
    scheduler = scheduler_with(num_blocks=5, watermark=0.0)
    for sequence in range(2):
        scheduler.add(request_of(6, max_tokens=9, sequence=sequence, first_token=20 * sequence))
    run_step(scheduler)
    plan = run_step(scheduler, drafts=4)
    assert plan.preempted == 0
    # The first takes the last free block; the second has the slot beside its next token.
    assert [(chunk.start, chunk.count) for chunk in plan.speculative] == [(6, 5), (6, 2)]


def test_accepted_drafts_name_the_blocks_they_fill_and_rejected_ones_do_not():
    scheduler = scheduler_with(max_batched_tokens=64)
    scheduler.add(request_of(3, max_tokens=20))
    run_step(scheduler)
    run_step(scheduler, drafts=8, accepted=2)
    [request] = scheduler.running
    assert (request.num_tokens, request.num_computed_tokens) == (7, 6)
    assert len(scheduler.pool._block_of) == 1
    assert len(request.block_hashes) == 1


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 24), st.integers(1, 10), st.integers(0, 3)),
        st.tuples(st.just("score"), st.integers(2, 24), st.integers(1, 20), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6), st.integers(0, 5), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    events=EVENTS,
    num_blocks=st.integers(9, 20),
    chunk=st.sampled_from([None, 1, 5]),
    policy=st.sampled_from(["fcfs", "priority", "shortest-prompt"]),
    prefix_caching=st.booleans(),
)
def test_no_schedule_loses_a_block(events, num_blocks, chunk, policy, prefix_caching):
    scheduler = scheduler_with(
        num_blocks=num_blocks, max_prefill_chunk=chunk, policy=policy, prefix_caching=prefix_caching
    )
    requests = []
    for event in events:
        match event:
            case ("add", length, max_tokens, priority):
                requests.append(request_of(length, max_tokens, len(requests), priority % 2, priority=priority))
                scheduler.add(requests[-1])
            case ("score", length, targets, priority):
                targets = min(targets, length)
                fields = {"targets": [1] * targets, "first_scored": length - targets, "priority": priority}
                requests.append(request_of(length, 1, len(requests), priority % 2, **fields))
                scheduler.add(requests[-1])
            case ("abort", index) if index < len(requests):
                if not requests[index].finished:
                    scheduler.finish(requests[index], "abort")
            case ("step", count, drafts, accepted):
                for _ in range(count):
                    run_step(scheduler, drafts, accepted)
        scheduler.check_integrity()
    finish_order(scheduler, requests)
    scheduler.check_integrity()
    assert scheduler.pool.num_used == 0
    for request in requests:
        assert (
            request.finish_reason == "abort"
            or request.num_output_tokens == request.params.max_tokens
            or (request.targets is not None and len(request.scored) == len(request.targets))
        )
