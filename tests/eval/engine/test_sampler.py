"""Sampling: the right distribution, the right filters, and no influence between requests."""

import pytest
import torch

from eval.engine import EvalError, SamplingParams
from eval.engine.request import Request
from eval.engine.sampler import _penalise, sample, sample_each, score_rows

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, 0.5])
NO_STOPS = frozenset()


def request_with(**params):
    return Request("r", [1], SamplingParams(**params))


def draws(count, temperature=1.0, **params):
    requests = [request_with(temperature=temperature, seed=seed, **params) for seed in range(count)]
    return torch.tensor(sample(LOGITS.repeat(count, 1), requests, NO_STOPS).token_ids)


def frequencies(tokens):
    return torch.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    count = 20_000
    expected = (LOGITS / temperature).softmax(0)
    # Five standard deviations of a frequency.
    bound = 5 * (expected * (1 - expected) / count).sqrt()
    assert ((frequencies(draws(count, temperature=temperature)) - expected).abs() < bound).all()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.75}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 5}),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.3}, {0, 1}),
        ({"temperature": 1e-300}, {0}),
    ],
)
def test_filters_keep_what_they_say(params, kept):
    seen = frequencies(draws(2000, **params))
    assert set(seen.nonzero().flatten().tolist()) == kept
    expected = torch.zeros(len(LOGITS))
    expected[list(kept)] = LOGITS.softmax(0)[list(kept)]
    assert (seen - expected / expected.sum()).abs().max() < 0.06


def test_seeded_request_does_not_see_its_companions():
    def tokens(companions):
        mine = request_with(temperature=1.0, seed=7)
        others = [request_with(temperature=0.7, top_p=0.9, seed=index) for index in range(companions)]
        logits = torch.randn(companions + 1, 50, generator=torch.Generator().manual_seed(companions))
        result = []
        for step in range(30):
            logits[0] = torch.randn(50, generator=torch.Generator().manual_seed(1000 + step))
            result.append(sample(logits, [mine, *others], NO_STOPS).token_ids[0])
            mine.token_ids.append(result[-1])
        return result

    assert tokens(0) == tokens(1) == tokens(9)


def test_greedy_takes_the_largest_beside_random_rows():
    requests = [request_with(), request_with(temperature=1.0, seed=1), request_with()]
    sampled = sample(torch.stack([LOGITS, LOGITS, LOGITS.flip(0)]), requests, NO_STOPS)
    assert (sampled.token_ids[0], sampled.token_ids[2]) == (0, 5)


def test_end_of_sequence_waits_for_min_tokens():
    logits = LOGITS[None].clone()
    assert sample(logits, [request_with(min_tokens=1)], frozenset({0})).token_ids == [1]
    logits = LOGITS[None].clone()
    assert sample(logits, [request_with(min_tokens=1, ignore_eos=True)], frozenset({0})).token_ids == [0]


def test_logprobs_are_those_of_the_model_at_temperature_one():
    sampled = sample(LOGITS[None].clone(), [request_with(temperature=0.3, seed=0, logprobs=2)], NO_STOPS)
    expected = LOGITS.log_softmax(0)
    logprobs = sampled.logprobs[0]
    assert logprobs.logprob == pytest.approx(expected[logprobs.token_id].item(), abs=1e-6)
    assert [token for token, _ in logprobs.top] == [0, 1]


def test_a_row_behind_drafts_is_sampled_as_if_they_had_come():
    fields = {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0, "min_tokens": 2, "max_tokens": 9}
    drafted = request_with(**fields, stop_token_ids=(4,))
    drafted.draft_token_ids = [2, 5, 0]
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    rows = sample(logits, [drafted] * 4, NO_STOPS, range(4)).token_ids
    for place in range(4):
        plain = request_with(**fields, stop_token_ids=(4,))
        plain.token_ids += [2, 5, 0][:place]
        assert sample(logits[place : place + 1], [plain], NO_STOPS).token_ids == [rows[place]]


def test_not_finite_logits_fail_their_row_only():
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, torch.nan), LOGITS])
    requests = [request_with(), request_with(temperature=1.0), request_with(temperature=1.0, seed=3)]
    sampled = sample(logits, requests, NO_STOPS)
    assert [error is None for error in sampled.errors] == [True, False, True]
    assert sampled.token_ids[0] == 0


def test_exception_in_one_row_fails_that_row_only():
    broken = request_with(stop_token_ids=(10**6,), min_tokens=1)
    sampled = sample_each(LOGITS.repeat(3, 1), [request_with(), broken, request_with()], NO_STOPS)
    assert [error is None for error in sampled.errors] == [True, False, True]
    assert "IndexError" in sampled.errors[1]


def test_a_failing_neighbour_does_not_penalise_the_others_twice():
    penalised = request_with(repetition_penalty=1.5, logprobs=1)
    penalised.token_ids[0] = 0
    broken = request_with(stop_token_ids=(10**6,), min_tokens=1)
    alone = sample(LOGITS.repeat(1, 1), [penalised], NO_STOPS)
    beside = sample_each(LOGITS.repeat(2, 1), [penalised, broken], NO_STOPS)
    assert beside.token_ids[0] == alone.token_ids[0] == 0
    assert beside.logprobs[0] == alone.logprobs[0]


def test_logprobs_are_the_models_while_a_request_is_too_short_to_end():
    logits = LOGITS[None].clone()
    sampled = sample(logits, [request_with(min_tokens=1, logprobs=1)], frozenset({0}))
    assert sampled.token_ids == [1]
    assert [token for token, _ in sampled.logprobs[0].top] == [0]
    assert torch.equal(logits[0], LOGITS)


def test_scores_are_log_softmax_in_any_chunk(monkeypatch):
    logits, targets = torch.randn(37, 50), torch.randint(50, (37,))
    expected = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    for chunk_bytes in (1, 1000, 10**9):
        monkeypatch.setattr("eval.engine.sampler.LOGPROB_CHUNK_BYTES", chunk_bytes)
        logprobs, is_best = score_rows(logits, targets)
        assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-5)
        assert is_best == (logits.argmax(-1) == targets).tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 2),
    ],
)
def test_bad_parameters_are_refused_by_name(field, value):
    with pytest.raises(EvalError, match=rf"SamplingParams\.{field} is"):
        SamplingParams(**{field: value})


def test_penalties_lower_what_was_said_and_leave_the_logprobs_alone():
    request = Request(
        "r", [0, 1], SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logprobs=1, max_tokens=9)
    )
    request.token_ids += [2, 5, 5]
    logits = LOGITS.clone()
    _penalise(logits, request)
    torch.testing.assert_close(logits, LOGITS - torch.tensor([0, 0, 0.75, 0, 0, 1.0]))
    sampled = sample(LOGITS.unsqueeze(0), [request], NO_STOPS)
    assert sampled.logprobs[0].logprob == pytest.approx(LOGITS.log_softmax(0)[0].item())
    repeating = Request("r", [0, 4], SamplingParams(repetition_penalty=2.0))
    logits = LOGITS.clone()
    _penalise(logits, repeating)
    torch.testing.assert_close(logits, torch.tensor([1.0, 1.0, 0.0, -1.0, -4.0, 0.5]))


@pytest.mark.parametrize("field", [{"presence_penalty": 3}, {"frequency_penalty": -2.5}, {"repetition_penalty": 0}])
def test_penalties_out_of_range_are_refused(field):
    with pytest.raises(EvalError, match=next(iter(field))):
        SamplingParams(**field)
