"""The engine's promise as one property: whatever arrives, is aborted, preempted, drafted or sampled in parallel, every
request's tokens are its own, and the pool is whole after every step and empty at the end."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.engine import Engine, EngineConfig, SamplingParams

MAX_TOKENS = 12
PROMPTS = [[1, 2, 3] * 8, [1, 2, 3] * 8 + [4], [9], [5, 6] * 10, [1, 2, 3] * 4 + [7] * 9, [8] * 13, list(range(40, 57))]
SEEDS = [None, 5, 6]
"""None: greedy."""

CONFIGS = {
    "roomy": {},
    "tight": {"num_blocks": 14, "max_prefill_chunk": 9},
    "tight, by priority": {"num_blocks": 14, "scheduler_policy": "priority"},
    "tight, shortest first, no prefix cache": {
        "num_blocks": 12,
        "scheduler_policy": "shortest-prompt",
        "prefix_caching": False,
    },
    "few rows, small steps": {"max_num_seqs": 3, "max_batched_tokens": 7, "num_blocks": 20},
    "one-token blocks": {"block_size": 1, "num_blocks": 60, "max_prefill_chunk": 1},
}
DRAFTERS = ["none", "prompt-lookup", "a noisy draft model", "half right"]

EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, len(PROMPTS) - 1),
            st.integers(1, MAX_TOKENS),
            st.sampled_from(SEEDS),
            st.sampled_from([1, 1, 2, 4]),
            st.integers(0, 2),
        ),
        st.tuples(st.just("abort"), st.integers(0, 12)),
        st.tuples(st.just("step"), st.integers(1, 5)),
    ),
    min_size=1,
    max_size=25,
)


def params_of(seed, max_tokens=MAX_TOKENS, n=1):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0 if seed is None else 0.8, seed=seed, n=n)


class HalfRight:
    """Drafts the coming tokens, of which every third is wrong."""

    def __init__(self, expected):
        self.expected = expected

    def propose(self, requests):
        for request in requests:
            prompt = PROMPTS.index(request.token_ids[: request.num_prompt_tokens])
            done, last = request.num_output_tokens, request.params.max_tokens - 1
            future = self.expected(prompt, request.params.seed)[done : min(done + 4, last)]
            request.draft_token_ids = [token ^ ((done + place) % 3 == 0) for place, token in enumerate(future)]


@pytest.fixture(scope="module")
def expected(tiny_model, greedy_reference):
    """The tokens of (prompt, seed): transformers' own when greedy, those of the request alone when sampled."""
    alone = Engine(tiny_model("llama"), None, EngineConfig(block_size=4, num_blocks=200, prefix_caching=False))

    @functools.cache
    def tokens(prompt, seed):
        if seed is None:
            return greedy_reference(tiny_model("llama"), [PROMPTS[prompt]], MAX_TOKENS)[0]
        return alone.generate([PROMPTS[prompt]], params_of(seed))[0].token_ids

    return tokens


@pytest.fixture(scope="module")
def engine_of(tiny_model, expected, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    noisy = tiny_model("llama")
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    noisy.save_pretrained(folder)

    @functools.cache
    def engine(config, drafter):
        options = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 16} | CONFIGS[config]
        if drafter in ("prompt-lookup", "a noisy draft model"):
            options["speculative"] = drafter if drafter == "prompt-lookup" else str(folder)
        built = Engine(tiny_model("llama"), None, EngineConfig(**options))
        if drafter == "half right":
            built._speculator = HalfRight(expected)
        return built

    return engine


@settings(max_examples=80, deadline=None)
@given(events=EVENTS, config=st.sampled_from(sorted(CONFIGS)), drafter=st.sampled_from(DRAFTERS))
def test_any_run_leaves_the_pool_whole_and_the_tokens_right(events, config, drafter, engine_of, expected):
    engine = engine_of(config, drafter)
    engine.telemetry.clear()
    added, tokens = {}, {}

    def step():
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.check_integrity()

    for event in events:
        match event:
            case ("add", prompt, max_tokens, seed, n, priority):
                request = engine.add_request(PROMPTS[prompt], params_of(seed, max_tokens, n), priority=priority)
                added[request] = (prompt, max_tokens, seed, n)
            case ("abort", index) if index < len(added):
                engine.abort(list(added)[index])
                engine.check_integrity()
            case ("step", count):
                for _ in range(count):
                    step()
    while engine.has_unfinished():
        step()
    assert engine.pool.num_used == 0
    assert engine.scheduler.num_waiting == 0
    reasons = {record.request_id: record.finish_reason for record in engine.telemetry.requests}
    for request, (prompt, max_tokens, seed, n) in added.items():
        for index in range(n):
            wanted = expected(prompt, None if seed is None else seed + index)[:max_tokens]
            given_tokens = tokens.get((request, index), [])
            assert given_tokens == wanted[: len(given_tokens)]
            reason = reasons[request if n == 1 else f"{request}-{index}"]
            assert reason == "abort" or (reason == "length" and len(given_tokens) == max_tokens)
