"""A request's greedy tokens are transformers' own, whatever else the engine does at the same time."""

import random

import pytest
import torch

from eval.engine import Engine, EngineConfig, SamplingParams
from eval.errors import EvalError

CONTEXT = 128
MAX_TOKENS = 12
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

SCHEDULES = {
    "together": {},
    "chunks of one token": {"max_prefill_chunk": 1},
    "chunks of seven tokens": {"max_prefill_chunk": 7},
    "a budget of nine tokens per step": {"max_batched_tokens": 9, "max_num_seqs": 8},
    "forced preemption": {"num_blocks": 40, "max_num_seqs": 16},
    "preemption in chunks of seven": {"num_blocks": 40, "max_num_seqs": 16, "max_prefill_chunk": 7},
    "no prefix cache": {"prefix_caching": False},
    "preemption without prefix cache": {"num_blocks": 40, "max_num_seqs": 16, "prefix_caching": False},
    "shortest prompt first": {"scheduler_policy": "shortest-prompt", "max_num_seqs": 4},
    "torch attention": {"attention_backend": "torch"},
    "one-token blocks": {"block_size": 1},
}
OTHERS = ("qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "opt")
SCHEDULES_OF_OTHERS = (
    {},
    {"max_prefill_chunk": 1},
    {"max_prefill_chunk": 7},
    {"max_batched_tokens": 9, "max_num_seqs": 8},
    {"num_blocks": 40},
    {"num_blocks": 40, "prefix_caching": False, "max_prefill_chunk": 5},
    {"prefix_caching": False},
    {"attention_backend": "torch"},
)


def engine_on(model, **options):
    return Engine(model, None, EngineConfig(**({"block_size": 4, "num_blocks": 1200} | options)))


def tokens_of(engine, prompts):
    completions = engine.generate(prompts, PARAMS)
    engine.check_integrity()
    assert {completion.finish_reason for completion in completions} == {"length"}
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def llama_case(tiny_model, random_prompts, greedy_reference):
    """64 prompts of 1 to 60 tokens, a quarter of which begin with another's first 30."""
    prompts = random_prompts(64)
    longest = max(prompts, key=len)
    prompts[::4] = [longest[:30] + prompt[:20] for prompt in prompts[::4]]
    return prompts, greedy_reference(tiny_model("llama"), prompts, MAX_TOKENS)


def test_alone(llama_case, tiny_model):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"))
    assert [tokens_of(engine, [prompt])[0] for prompt in prompts] == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sixty_four_prompts(schedule, llama_case, tiny_model):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"), **SCHEDULES[schedule])
    assert tokens_of(engine, prompts) == expected
    if "preemption" in schedule:
        assert sum(record.preemptions for record in engine.telemetry.requests) > 0


def test_prefix_hits_change_nothing(llama_case, tiny_model):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"))
    tokens_of(engine, prompts)
    engine.telemetry.clear()
    assert tokens_of(engine, prompts) == expected
    hits = sum(record.prompt_cache_hit for record in engine.telemetry.requests)
    assert hits > 0.8 * sum(map(len, prompts))


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures(architecture, tiny_model, random_prompts, greedy_reference):
    prompts = random_prompts(10)
    prompts[1] = prompts[0][:20] + prompts[1]
    expected = greedy_reference(tiny_model(architecture), prompts, MAX_TOKENS)
    model = tiny_model(architecture)
    for options in SCHEDULES_OF_OTHERS:
        engine = engine_on(model, **options)
        assert tokens_of(engine, prompts) == expected, f"{architecture} with {options}"
        assert [tokens_of(engine, [prompt])[0] for prompt in prompts[:3]] == expected[:3]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("architecture", ["llama", *OTHERS])
def test_preemptions_and_aborts_at_any_step_change_nothing(
    architecture, prefix_caching, tiny_model, random_prompts, greedy_reference
):
    """Requests come and are aborted at random; now and then somebody takes all free blocks for a step, so that whoever
    needs one is preempted."""
    chance = random.Random(f"{architecture} {prefix_caching}")
    prompts = random_prompts(10)
    prompts[::3] = [prompts[1][:25] + prompt[:20] for prompt in prompts[::3]]
    expected = greedy_reference(tiny_model(architecture), prompts, MAX_TOKENS)
    chunk = {"max_prefill_chunk": chance.choice((1, 3, 8, None)), "prefix_caching": prefix_caching}
    engine = engine_on(tiny_model(architecture), num_blocks=70, max_num_seqs=6, **chunk)
    waiting = [*range(len(prompts)), *chance.sample(range(len(prompts)), 6)]
    tokens, prompt_of = {}, {}
    while waiting or engine.has_unfinished():
        for _ in range(min(len(waiting), chance.choice((0, 1, 1, 2)))):
            index = waiting.pop()
            request_id = engine.add_request(prompts[index], PARAMS)
            prompt_of[request_id], tokens[request_id] = index, []
        ended = {record.request_id for record in engine.telemetry.requests}
        live = [request_id for request_id in tokens if request_id not in ended]
        if live and chance.random() < 0.1:
            engine.abort(chance.choice(live))
        taken = engine.pool.allocate(engine.pool.num_free if chance.random() < 0.3 else 0)
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
        engine.pool.release(taken)
        engine.check_integrity()
    reasons = {record.request_id: record.finish_reason for record in engine.telemetry.requests}
    for request_id, found in tokens.items():
        of_prompt = expected[prompt_of[request_id]]
        assert found == (of_prompt if reasons[request_id] == "length" else of_prompt[: len(found)])
    assert set(reasons.values()) == {"length", "abort"}
    assert sum(record.preemptions for record in engine.telemetry.requests) > 1


@pytest.mark.parametrize(
    ("architecture", "without"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"sliding_window": CONTEXT}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma3_text", {"sliding_window": CONTEXT}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "sliding_attention"]}),
    ],
    ids=str,
)
def test_what_the_tiny_models_have_shows_in_their_tokens(
    architecture, without, tiny_model, random_prompts, greedy_reference
):
    """Otherwise equality would say nothing about it."""
    prompts = random_prompts(10)
    has, lacks = (greedy_reference(tiny_model(architecture, **each), prompts, MAX_TOKENS) for each in ({}, without))
    assert sum(map(list.__ne__, has, lacks)) > len(prompts) / 2


def test_longrope_runs_within_its_original_context(tiny_model, random_prompts, greedy_reference):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    model = tiny_model("llama", rope_parameters=rope)
    prompts = random_prompts(8, longest=48 - MAX_TOKENS)
    expected = greedy_reference(tiny_model("llama", rope_parameters=rope), prompts, MAX_TOKENS)
    engine = engine_on(model)
    assert tokens_of(engine, prompts) == expected
    with pytest.raises(EvalError, match="exceed the context of 48 tokens"):
        engine.generate([list(range(1, 48))], PARAMS)


def test_preempted_request_keeps_its_streamed_tokens(tiny_model, random_prompts):
    engine = engine_on(tiny_model("llama"), num_blocks=40, max_num_seqs=16)
    prompts = random_prompts(12)
    streamed = {engine.add_request(prompt, PARAMS): [] for prompt in prompts}
    while engine.has_unfinished():
        for output in engine.step():
            streamed[output.request_id] += output.new_token_ids
    assert sum(record.preemptions for record in engine.telemetry.requests) > 0
    roomy = engine_on(tiny_model("llama"))
    assert list(streamed.values()) == tokens_of(roomy, prompts)


@pytest.mark.real
def test_real_model_in_float32(real_checkpoint, greedy_reference):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = (
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a village by the sea,",
        "Water boils at",
        "The three primary colours are red, " * 12,
    )
    tokenizer = AutoTokenizer.from_pretrained(real_checkpoint)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    reference = AutoModelForCausalLM.from_pretrained(real_checkpoint, dtype=torch.float32)
    expected = greedy_reference(reference, prompts, 24)
    params = SamplingParams(max_tokens=24)
    for options in ({}, {"max_prefill_chunk": 7, "num_blocks": 12, "max_num_seqs": 4}):
        engine = Engine.from_checkpoint(real_checkpoint, dtype="float32", **options)
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_a_window_shorter_than_the_probe(architecture, tiny_model, random_prompts, greedy_reference):
    prompts = random_prompts(6)
    expected = greedy_reference(tiny_model(architecture, sliding_window=3), prompts, MAX_TOKENS)
    assert tokens_of(engine_on(tiny_model(architecture, sliding_window=3)), prompts) == expected


def test_a_repetition_penalty_is_transformers_own(tiny_model, random_prompts):
    prompts = random_prompts(8, longest=30)
    reference = tiny_model("llama")
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, repetition_penalty=1.7)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    params = SamplingParams(max_tokens=MAX_TOKENS, repetition_penalty=1.7)
    for options in ({}, {"num_blocks": 40}):
        completions = engine_on(tiny_model("llama"), **options).generate(prompts, params)
        assert [completion.token_ids for completion in completions] == expected
