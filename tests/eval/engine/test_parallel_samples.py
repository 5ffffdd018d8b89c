"""Parallel samples: one computation of the prompt, n continuations, each as if it had been asked for alone."""

import functools

import pytest

from eval.engine import Engine, EngineConfig, EvalError, SamplingParams

MAX_TOKENS = 10


def engine_on(model, **options):
    return Engine(model, None, EngineConfig(**({"block_size": 4, "num_blocks": 600, "max_num_seqs": 16} | options)))


def step_to_the_end(engine):
    tokens = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.check_integrity()
    assert engine.pool.num_used == 0
    return tokens


SCHEDULES = {
    "together": {},
    "no prefix cache": {"prefix_caching": False},
    "chunks of three tokens": {"max_prefill_chunk": 3},
    "preemption": {"num_blocks": 40},
    "preemption without prefix cache": {"num_blocks": 40, "prefix_caching": False},
    "fewer rows than samples": {"max_num_seqs": 3},
    "one-token blocks": {"block_size": 1},
    "speculation": {"speculative": "prompt-lookup"},
    "speculation and preemption": {"speculative": "prompt-lookup", "num_blocks": 40},
    "int8 keys and values": {"kv_dtype": "int8"},
}


FIELDS = {"max_tokens": MAX_TOKENS, "temperature": 0.9, "logprobs": 1}
SAMPLES = 6


@pytest.fixture(scope="module")
def separate(tiny_model, random_prompts):
    """The prompts of a length, and of each the completions with seeds 5, 6 and so on, every one asked for alone."""
    prompts = [prompt for prompt in random_prompts(6) if len(prompt) >= 13][:3]
    seeds = [SamplingParams(**FIELDS, seed=5 + index) for index in range(SAMPLES)]

    @functools.cache
    def of(length, kv_dtype):
        engine = engine_on(tiny_model("llama"), kv_dtype=kv_dtype)
        cut = [prompt[:length] for prompt in prompts]
        return cut, [[engine.generate([prompt], params)[0] for params in seeds] for prompt in cut]

    return of


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("length", [1, 7, 8, 13])
def test_samples_are_those_of_separate_requests_with_their_seeds(schedule, length, tiny_model, separate):
    options = SCHEDULES[schedule]
    prompts, alone = separate(length, options.get("kv_dtype", "auto"))
    engine = engine_on(tiny_model("llama"), **options)
    together = engine.generate(prompts, SamplingParams(**FIELDS, seed=5, n=SAMPLES))
    engine.check_integrity()
    assert engine.pool.num_used == 0
    # Rounding to int8 can turn the last bit of a sum into a whole step.
    bound = 1e-2 if "int8" in schedule else 1e-4
    for prompt, completion, expected in zip(prompts, together, alone, strict=True):
        assert [one.token_ids for one in completion.outputs] == [one.token_ids for one in expected]
        for output, one in zip(completion.outputs, expected, strict=True):
            assert output.prompt_token_ids == prompt
            assert [entry.logprob for entry in output.logprobs] == pytest.approx(
                [entry.logprob for entry in one.logprobs], abs=bound
            )
    assert len({tuple(output.token_ids) for output in together[0].outputs}) > 1
    if "preemption" in schedule and length == 13:
        assert sum(record.preemptions for record in engine.telemetry.requests) > 0


def test_the_prompt_is_computed_once_and_its_tail_copied_once_per_further_sample(tiny_model):
    engine = engine_on(tiny_model("llama"), prefix_caching=False)
    engine.add_request(list(range(1, 15)), SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=1, n=4))
    copies = []
    schedule = engine.scheduler.schedule

    def spy():
        plan = schedule()
        copies.append(len(plan.copies))
        return plan

    engine.scheduler.schedule = spy
    engine.step()
    assert engine.pool.num_used == 4
    engine.step()
    # Three whole blocks are shared; of the fourth, which two slots of the prompt fill, each sample has its own.
    assert engine.pool.num_used == 3 + 4
    step_to_the_end(engine)
    assert sum(step.prefill_tokens for step in engine.telemetry.steps) == 14
    assert copies[:2] == [0, 3]
    assert sum(copies) == 3


def test_nothing_is_copied_when_the_prompt_fills_its_blocks(tiny_model):
    engine = engine_on(tiny_model("llama"), prefix_caching=False)
    engine.add_request(list(range(1, 13)), SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=1, n=4))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan.copies == []
    assert engine.pool.num_used == 3 + 4


def test_samples_end_at_their_own_stops(tiny_model):
    engine = engine_on(tiny_model("llama"))
    fields = {"max_tokens": 20, "temperature": 1.0, "stop_token_ids": tuple(range(30))}
    [completion] = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(**fields, seed=3, n=8))
    for index, output in enumerate(completion.outputs):
        [alone] = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(**fields, seed=3 + index))
        assert (output.token_ids, output.finish_reason) == (alone.token_ids, alone.finish_reason)
    assert len({len(output.token_ids) for output in completion.outputs}) > 1


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_samples_of_one_or_two_tokens(max_tokens, tiny_model):
    engine = engine_on(tiny_model("llama"))
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=0, n=5)
    [completion] = engine.generate([[1, 2, 3, 4, 5]], params)
    assert [len(output.token_ids) for output in completion.outputs] == [max_tokens] * 5
    engine.check_integrity()
    assert not engine.has_unfinished()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_ends_all_samples(steps, tiny_model):
    engine = engine_on(tiny_model("llama"), max_num_seqs=3, max_prefill_chunk=4)
    request = engine.add_request(list(range(1, 8)), SamplingParams(max_tokens=30, temperature=1.0, n=5))
    for _ in range(steps):
        engine.step()
    assert len(engine.samples_of(request)) == 5
    engine.abort(request)
    assert not engine.has_unfinished()
    assert engine.scheduler.num_waiting == 0
    assert engine.pool.num_used == 0
    engine.check_integrity()
    assert sorted(record.request_id for record in engine.telemetry.requests) == [f"{request}-{i}" for i in range(5)]
    assert {record.finish_reason for record in engine.telemetry.requests} == {"abort"}


def test_a_failing_step_ends_all_samples(tiny_model, monkeypatch):
    engine = engine_on(tiny_model("llama"))
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=30, n=3))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        outputs = engine.step()
    assert sorted((output.request_id, output.index, output.finish_reason) for output in outputs) == [
        (request, index, "error") for index in range(3)
    ]
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_every_sample_s_tokens_are_streamed_under_its_index(tiny_model):
    engine = engine_on(tiny_model("llama"))
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=2, n=3)
    request = engine.add_request([1, 2, 3], params)
    streamed = step_to_the_end(engine)
    [completion] = engine.generate([[1, 2, 3]], params)
    assert streamed == {(request, index): output.token_ids for index, output in enumerate(completion.outputs)}


def test_samples_without_a_seed_differ(tiny_model):
    [completion] = engine_on(tiny_model("llama")).generate(
        [[1, 2, 3]], SamplingParams(max_tokens=20, temperature=2.0, n=4)
    )
    assert len({tuple(output.token_ids) for output in completion.outputs}) == 4


def test_n_below_one_is_refused():
    with pytest.raises(EvalError, match=r"SamplingParams\.n is 0: it must be at least 1"):
        SamplingParams(n=0)
