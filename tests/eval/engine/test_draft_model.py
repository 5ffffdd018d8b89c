"""A draft model, good or bad, changes no token; the better it is, the more of its drafts are accepted."""

import json
import shutil

import pytest
import torch

from eval.engine import Engine, EngineConfig, EvalError, SamplingParams
from quantize.errors import QuantizeError

MAX_TOKENS = 24
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


def engine_on(model, draft, **options):
    defaults = {"block_size": 4, "num_blocks": 600, "max_num_seqs": 16, "speculative": draft and str(draft)}
    return Engine(model, None, EngineConfig(**(defaults | options)))


def tokens_of(engine, prompts, params=GREEDY):
    completions = engine.generate(prompts, params)
    engine.check_integrity()
    assert engine.pool.num_used == 0
    if engine._draft_model is not None:
        assert engine._draft_model.pool.num_used == 0
    assert all(completion.error is None for completion in completions)
    return [output.token_ids for completion in completions for output in completion.outputs]


@pytest.fixture(scope="module")
def drafts(tiny_model, tmp_path_factory):
    """Checkpoints that draft for the tiny Llama: itself, a noisy copy, and a stranger of another shape."""
    folder = tmp_path_factory.mktemp("drafts")
    tiny_model("llama").save_pretrained(folder / "twin")
    noisy = tiny_model("llama")
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    noisy.save_pretrained(folder / "noisy")
    tiny_model("qwen3", num_hidden_layers=1).save_pretrained(folder / "stranger")
    tiny_model("llama", max_position_embeddings=40).save_pretrained(folder / "short")
    tiny_model("llama", vocab_size=96).save_pretrained(folder / "other words")
    return folder


@pytest.fixture(scope="module")
def llama_case(tiny_model, random_prompts, greedy_reference):
    prompts = random_prompts(16)
    prompts[::4] = [prompts[1][:30] + prompt[:20] for prompt in prompts[::4]]
    return prompts, greedy_reference(tiny_model("llama"), prompts, MAX_TOKENS)


SCHEDULES = {
    "together": {},
    "three drafted tokens": {"speculative_tokens": 3},
    "chunks of seven tokens": {"max_prefill_chunk": 7},
    "a budget of nine tokens per step": {"max_batched_tokens": 9, "max_num_seqs": 8},
    "forced preemption": {"num_blocks": 40},
    "no prefix cache": {"prefix_caching": False},
    "one-token blocks": {"block_size": 1},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("draft", ["twin", "noisy"])
def test_greedy_tokens_are_transformers_own(draft, schedule, llama_case, drafts, tiny_model):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"), drafts / draft, **SCHEDULES[schedule])
    assert tokens_of(engine, prompts) == expected
    assert engine.telemetry.speculation.drafts > 0
    if schedule == "together":
        rate = engine.telemetry.speculation.accept_rate
        assert rate == 1 if draft == "twin" else 0.1 < rate < 1
    if schedule == "forced preemption":
        assert sum(record.preemptions for record in engine.telemetry.requests) > 0


@pytest.mark.parametrize("draft", ["stranger", "short"])
def test_a_draft_that_knows_little_or_has_a_shorter_context_does_no_harm(draft, llama_case, drafts, tiny_model):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"), drafts / draft)
    assert tokens_of(engine, prompts) == expected


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"frequency_penalty": 0.8, "min_tokens": 5}])
def test_sampled_tokens_are_those_without_drafts_and_a_twin_draws_them_all(fields, llama_case, drafts, tiny_model):
    prompts, _ = llama_case
    params = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=seed, **fields) for seed in range(16)]
    plain = tokens_of(engine_on(tiny_model("llama"), None), prompts, params)
    for draft, lowest, highest in (("twin", 1.0, 1.0), ("noisy", 0.1, 0.99)):
        engine = engine_on(tiny_model("llama"), drafts / draft)
        assert tokens_of(engine, prompts, params) == plain
        assert lowest <= engine.telemetry.speculation.accept_rate <= highest


def test_parallel_samples_are_drafted_for_too(drafts, tiny_model):
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=3, n=5)
    plain = tokens_of(engine_on(tiny_model("llama"), None), [[1, 2, 3, 4, 5, 6]], params)
    engine = engine_on(tiny_model("llama"), drafts / "twin")
    assert tokens_of(engine, [[1, 2, 3, 4, 5, 6]], params) == plain
    assert engine.telemetry.speculation.accept_rate == 1


def test_the_draft_s_memory_and_digest_are_said(drafts, tiny_model):
    plain = engine_on(tiny_model("llama"), None)
    twin, noisy = (engine_on(tiny_model("llama"), drafts / name) for name in ("twin", "noisy"))
    assert twin.memory()["weights_bytes"] == 2 * plain.memory()["weights_bytes"]
    assert twin.memory()["kv_cache_bytes"] == 2 * plain.memory()["kv_cache_bytes"]
    identities = [engine.identity() for engine in (plain, twin, noisy)]
    assert len({identity["speculative"] for identity in identities}) == 3
    assert identities[0]["speculative_tokens"] is None
    assert identities[1]["speculative_tokens"] == 4
    limit = 40 * plain.memory()["kv_block_bytes"]
    both = engine_on(tiny_model("llama"), drafts / "twin", num_blocks=None, kv_cache_bytes=limit)
    assert both.pool.num_blocks == both._draft_model.pool.num_blocks == 20


def test_a_step_s_kv_cache_is_the_model_s_and_the_draft_s(drafts, tiny_model):
    engine = engine_on(tiny_model("llama"), drafts / "twin")
    engine.add_request([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=20))
    for _ in range(2):
        engine.step()
    record, draft = engine.telemetry.steps[-1], engine._draft_model
    assert draft.pool.num_used > 0
    of_draft = draft.pool.num_used * draft.block_bytes
    own_bytes = engine.memory()["kv_block_bytes"] - draft.block_bytes
    used_blocks = round(record.block_usage * engine.pool.num_blocks)
    assert record.kv_cache_bytes == used_blocks * own_bytes + of_draft


def test_a_draft_that_fails_ends_those_it_drafted_for_and_no_others(drafts, tiny_model, monkeypatch):
    engine = engine_on(tiny_model("llama"), drafts / "twin")
    first = engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    engine.step()
    second = engine.add_request([4, 5, 6], SamplingParams(max_tokens=9))
    with monkeypatch.context() as patch:
        patch.setattr(
            engine._draft_model._runner, "_forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
        )
        outputs = engine.step()
    assert [(one.request_id, one.finish_reason) for one in outputs if one.finished] == [(first, "error")]
    assert engine.telemetry.requests[-1].error == "RuntimeError: out of memory"
    assert [one.request_id for one in engine.samples_of(second)] == [second]
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    [expected] = tokens_of(engine_on(tiny_model("llama"), None), [[4, 5, 6]], SamplingParams(max_tokens=9))
    assert tokens_of(engine, [[4, 5, 6]], SamplingParams(max_tokens=9)) == [expected]


def test_a_draft_with_other_tokens_is_refused(drafts, tiny_model, tiny_checkpoint, tmp_path):
    with pytest.raises(EvalError, match=r"other words: a draft model must have the tokens .* has 96 of them .* 128"):
        engine_on(tiny_model("llama"), drafts / "other words")
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EvalError, match="its tokenizer differs"):
        Engine.from_checkpoint(tiny_checkpoint, speculative=str(other), num_blocks=40)


def test_a_draft_that_is_no_checkpoint_is_refused(tiny_model, tmp_path):
    with pytest.raises(EvalError, match="speculative 'lookup': it is neither prompt-lookup nor a checkpoint"):
        engine_on(tiny_model("llama"), "lookup")
    with pytest.raises(QuantizeError, match="not a checkpoint"):
        engine_on(tiny_model("llama"), tmp_path)


def test_a_checkpoint_drafts_for_itself(tiny_checkpoint):
    plain = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40, speculative=str(tiny_checkpoint))
    params = SamplingParams(max_tokens=20)
    assert engine.generate(["Hello there"], params)[0].text == plain.generate(["Hello there"], params)[0].text
    assert engine.telemetry.speculation.mean_accepted_length > 3
