"""score gives transformers' log-softmax, whatever the batching, and shares common contexts."""

import pytest
import torch

from eval.engine import Engine, EngineConfig, EvalError


def expected_logprobs(model, context, continuation):
    with torch.inference_mode():
        logits = model(torch.tensor([context + continuation])).logits[0]
    rows = logits[len(context) - 1 : -1].float().log_softmax(-1)
    return rows.gather(1, torch.tensor(continuation)[:, None]).squeeze(1).tolist()


@pytest.fixture(scope="module")
def pairs(random_prompts):
    contexts, continuations = random_prompts(12, 50, seed=2), random_prompts(12, 20, seed=3)
    # Four questions with three answers each, as multiple choice has them.
    return [(contexts[index // 3], continuation) for index, continuation in enumerate(continuations)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prefill_chunk": 3},
        {"logits_bytes": 1, "max_num_seqs": 2},
        {"num_blocks": 24},
        {"prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_scores_are_transformers_log_softmax(architecture, options, pairs, tiny_model):
    reference, model = tiny_model(architecture), tiny_model(architecture)
    engine = Engine(model, None, EngineConfig(**({"block_size": 4, "num_blocks": 400} | options)))
    together = engine.score(pairs)
    for pair, score in zip(pairs, together, strict=True):
        expected = expected_logprobs(reference, *pair)
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        assert engine.score([pair])[0].logprobs == pytest.approx(expected, abs=1e-4)
    engine.check_integrity()


def test_common_context_is_computed_once(pairs, tiny_model):
    engine = Engine(tiny_model("llama"), None, EngineConfig(block_size=4, num_blocks=400))
    engine.score(pairs[:3])
    context = len(pairs[0][0])
    hits = [record.prompt_cache_hit for record in engine.telemetry.requests]
    shared = (context - 1) // 4 * 4
    assert sorted(hits) == [0, shared, shared]


def test_greedy_continuation_is_known_as_such(tiny_model):
    engine = Engine(tiny_model("llama"), None, EngineConfig(num_blocks=100))
    [completion] = engine.generate([[5, 6, 7]])
    [greedy, other] = engine.score([([5, 6, 7], completion.token_ids), ([5, 6, 7], [completion.token_ids[0], 3, 3])])
    assert greedy.is_greedy
    assert not other.is_greedy


def test_stream_gives_every_row_of_the_vocabulary(pairs, tiny_model):
    engine = Engine(tiny_model("llama"), None, EngineConfig(num_blocks=100, logits_bytes=1, max_num_seqs=4))
    scores = engine.score(pairs)
    seen = [[] for _ in pairs]
    for index, offset, logprobs in engine.score_stream(pairs):
        assert offset == len(seen[index])
        targets = pairs[index][1][offset : offset + len(logprobs)]
        assert logprobs.exp().sum(-1) == pytest.approx(1.0, abs=1e-5)
        seen[index] += logprobs[range(len(targets)), targets].tolist()
    for score, logprobs in zip(scores, seen, strict=True):
        assert logprobs == pytest.approx(score.logprobs, abs=1e-5)


def test_empty_continuation_costs_nothing(tiny_model):
    engine = Engine(tiny_model("llama"), None, EngineConfig(num_blocks=100))
    assert engine.score([([1, 2], [])])[0].logprobs == []
    assert engine.telemetry.steps == []


def test_empty_context_is_refused_by_its_index(tiny_model):
    engine = Engine(tiny_model("llama"), None, EngineConfig(num_blocks=100))
    with pytest.raises(EvalError, match=r"scoring pair 1: .* empty context"):
        engine.score([([1], [2]), ([], [2])])


def test_weights_that_are_not_finite_are_an_error(tiny_model):
    model = tiny_model("llama")
    engine = Engine(model, None, EngineConfig(num_blocks=100))
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(EvalError, match="not finite"):
        engine.score([([1, 2], [3])])
