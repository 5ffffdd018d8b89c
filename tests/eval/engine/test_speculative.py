"""Speculation changes how fast tokens come, never which: greedy and sampled, under any schedule."""

import pytest
import torch
from scipy.stats import chi2

from eval.engine import Engine, EngineConfig, SamplingParams
from eval.engine.block_pool import extend_hashes
from eval.engine.request import Request
from eval.engine.speculative import PromptLookup
from eval.engine.telemetry import Speculation

MAX_TOKENS = 24
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


def engine_on(model, **options):
    return Engine(model, None, EngineConfig(**({"block_size": 4, "num_blocks": 600, "max_num_seqs": 16} | options)))


def tokens_of(engine, prompts, params=GREEDY):
    completions = engine.generate(prompts, params)
    engine.check_integrity()
    assert engine.pool.num_used == 0
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]


class Scripted:
    """Drafts the tokens that it was told will come, but every `wrong`-th of them one off."""

    def __init__(self, futures, wrong=3, length=4):
        self.futures, self.wrong, self.length = futures, wrong, length

    def propose(self, requests):
        for request in requests:
            prompt = tuple(request.token_ids[: request.num_prompt_tokens])
            done, most = request.num_output_tokens, request.params.max_tokens - 1
            future = self.futures[prompt][done : min(done + self.length, most)]
            request.draft_token_ids = [
                (token + 1) % 128 if (done + place) % self.wrong == 0 else token for place, token in enumerate(future)
            ]


SCHEDULES = {
    "together": {},
    "chunks of seven tokens": {"max_prefill_chunk": 7},
    "a budget of nine tokens per step": {"max_batched_tokens": 9, "max_num_seqs": 8},
    "forced preemption": {"num_blocks": 40},
    "preemption without prefix cache": {"num_blocks": 40, "prefix_caching": False},
    "few rows of logits": {"logits_bytes": 18 * 128 * 4},
    "torch attention": {"attention_backend": "torch"},
    "one-token blocks": {"block_size": 1},
}


@pytest.fixture(scope="module")
def llama_case(tiny_model, random_prompts, greedy_reference):
    prompts = random_prompts(24)
    prompts[::4] = [prompts[1][:30] + prompt[:20] for prompt in prompts[::4]]
    return prompts, greedy_reference(tiny_model("llama"), prompts, MAX_TOKENS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_tokens_with_prompt_lookup_are_transformers_own(schedule, llama_case, tiny_model):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"), speculative="prompt-lookup", **SCHEDULES[schedule])
    assert tokens_of(engine, prompts) == expected
    assert tokens_of(engine, prompts) == expected
    assert engine.telemetry.speculation.accept_rate > 0
    if "preemption" in schedule:
        assert sum(record.preemptions for record in engine.telemetry.requests) > 0


@pytest.mark.parametrize("wrong", [1, 2, 3, 7, 1000])
def test_drafts_right_up_to_any_place_change_nothing(wrong, llama_case, tiny_model):
    prompts, expected = llama_case
    futures = {tuple(prompt): future for prompt, future in zip(prompts, expected, strict=True)}
    for options in ({}, {"num_blocks": 40, "max_prefill_chunk": 5}):
        engine = engine_on(tiny_model("llama"), **options)
        engine._speculator = Scripted(futures, wrong)
        assert tokens_of(engine, prompts) == expected
        assert tokens_of(engine, prompts) == expected
        rate = engine.telemetry.speculation.accept_rate
        assert rate == 1 if wrong == 1000 else rate < 1
        assert (rate == 0) == (wrong == 1)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt_neox"])
def test_greedy_tokens_of_other_architectures(architecture, tiny_model, random_prompts, greedy_reference):
    prompts = random_prompts(8)
    expected = greedy_reference(tiny_model(architecture), prompts, MAX_TOKENS)
    engine = engine_on(tiny_model(architecture), num_blocks=40)
    engine._speculator = Scripted({tuple(p): future for p, future in zip(prompts, expected, strict=True)}, wrong=4)
    assert tokens_of(engine, prompts) == expected
    assert 0 < engine.telemetry.speculation.accept_rate < 1


def test_speculation_takes_fewer_steps(llama_case, tiny_model):
    prompts, expected = llama_case
    futures = {tuple(prompts[0]): expected[0]}
    engine = engine_on(tiny_model("llama"))
    engine._speculator = Scripted(futures, wrong=1000)
    assert tokens_of(engine, prompts[:1]) == expected[:1]
    # One step prefills; each of the others brings four drafts and a token, the last one what is left.
    assert len(engine.telemetry.steps) == 1 + -(-(MAX_TOKENS - 1) // 5)
    assert sum(step.decode_tokens for step in engine.telemetry.steps) == MAX_TOKENS - 1


SAMPLED = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "top-p and top-k": {"top_p": 0.9, "top_k": 20},
    "min-p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "min_tokens holds a stop token off": {"min_tokens": 15, "stop_token_ids": tuple(range(40))},
    "stop tokens": {"stop_token_ids": tuple(range(8))},
}


@pytest.mark.parametrize("case", SAMPLED)
def test_a_seed_gives_the_same_tokens_and_logprobs_with_any_drafts(case, tiny_model, random_prompts):
    prompts = random_prompts(10, longest=30)
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0.8, "logprobs": 2} | SAMPLED[case]
    params = [SamplingParams(**fields, seed=seed) for seed in range(10)]
    plain = engine_on(tiny_model("llama")).generate(prompts, params)
    futures = {tuple(one.prompt_token_ids): one.token_ids for one in plain}
    for options in ({}, {"num_blocks": 40}, {"max_batched_tokens": 18}):
        engine = engine_on(tiny_model("llama"), **options)
        engine._speculator = Scripted(futures, wrong=4)
        drafted = engine.generate(prompts, params)
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        assert [one.finish_reason for one in drafted] == [one.finish_reason for one in plain]
        assert 0 < engine.telemetry.speculation.accept_rate < 1
        for one, other in zip(drafted, plain, strict=True):
            assert [entry.token_id for entry in one.logprobs] == one.token_ids
            assert [entry.logprob for entry in one.logprobs] == pytest.approx(
                [entry.logprob for entry in other.logprobs], abs=1e-4
            )
        engine.check_integrity()


def chi_square_p(counts, probabilities):
    """The p-value of counts under probabilities; cells below five expected are pooled."""
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    wanted = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return float(chi2.sf(float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1))


class Stubborn:
    """Drafts the same tokens whatever came."""

    def __init__(self, drafts):
        self.drafts = drafts

    def propose(self, requests):
        for request in requests:
            request.draft_token_ids = self.drafts[: request.params.max_tokens - request.num_output_tokens - 1]


@pytest.mark.parametrize("draft", ["likely", "unlikely"])
def test_sampled_tokens_follow_the_model_s_distribution_whatever_is_drafted(draft, tiny_model):
    """The second and third token of many samples against the model's exact probabilities, over a vocabulary of 6."""
    vocabulary, count, prompt = 6, 4000, [1, 2, 3]
    model = tiny_model("llama", vocab_size=vocabulary, initializer_range=0.1)
    pairs = [[first, second] for first in range(vocabulary) for second in range(vocabulary)]
    with torch.inference_mode():
        logits = tiny_model("llama", vocab_size=vocabulary, initializer_range=0.1)(
            torch.tensor([prompt + pair for pair in pairs])
        ).logits
    first = logits[0, len(prompt) - 1].softmax(-1)
    second = logits[::vocabulary, len(prompt)].softmax(-1)
    third = logits[:, len(prompt) + 1].softmax(-1).view(vocabulary, vocabulary, vocabulary)
    exact = first[:, None, None] * second[:, :, None] * third
    joint = exact.sum(0).flatten()
    order = joint.argsort(descending=draft == "likely").tolist()
    engine = engine_on(model, num_blocks=4000, max_num_seqs=500, max_batched_tokens=4000)
    engine._speculator = Stubborn([order[0] // vocabulary, order[0] % vocabulary])
    params = [SamplingParams(max_tokens=3, temperature=1.0, seed=seed) for seed in range(count)]
    tokens = torch.tensor(tokens_of(engine, [prompt] * count, params))
    counts = torch.bincount(tokens[:, 1] * vocabulary + tokens[:, 2], minlength=vocabulary**2).double()
    assert chi_square_p(counts, joint.double()) > 1e-3
    # The same test tells a sampler that favours its drafts, even by a twentieth of the samples.
    biased = counts.clone()
    moved = count // 20
    biased *= 1 - moved / count
    biased[order[0]] += moved
    assert chi_square_p(biased, joint.double()) < 1e-3
    # A draft is accepted as often as the model would have said it.
    rate = engine.telemetry.speculation.accept_rate_per_position[0]
    likely = exact.sum((0, 2))[order[0] // vocabulary].item()
    assert rate == pytest.approx(likely, abs=5 * (likely * (1 - likely) / count) ** 0.5 + 1e-3)


def test_unverified_drafts_are_never_found_in_the_prefix_cache(llama_case, tiny_model, monkeypatch):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"), block_size=2)
    futures = {tuple(p): [(token + 1) % 128 for token in e] for p, e in zip(prompts, expected, strict=True)}
    engine._speculator = Scripted(futures, wrong=1000)
    seen = set()
    monkeypatch.setattr(engine.pool, "name", lambda block, block_hash: seen.add(block_hash))
    tokens_of(engine, prompts)
    allowed = set()
    for prompt, future in zip(prompts, expected, strict=True):
        hashes = []
        extend_hashes(hashes, prompt + future, 2, engine.scheduler._root)
        allowed |= set(hashes)
    assert seen <= allowed


def test_accepted_drafts_fill_the_prefix_cache(llama_case, tiny_model):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"))
    engine._speculator = Scripted({tuple(prompts[1]): expected[1]}, wrong=1000)
    tokens_of(engine, prompts[1:2])
    whole = prompts[1] + expected[1]
    engine._speculator = None
    engine.generate([[*whole, 5]], SamplingParams(max_tokens=1))
    assert engine.telemetry.requests[-1].prompt_cache_hit == (len(whole) - 1) // 4 * 4


def test_telemetry_counts_what_was_accepted_by_position(llama_case, tiny_model):
    prompts, expected = llama_case
    engine = engine_on(tiny_model("llama"))
    engine._speculator = Scripted({tuple(prompts[0]): expected[0]}, wrong=3)
    engine.generate(prompts[:1], GREEDY)
    speculation = engine.telemetry.speculation
    [record] = engine.telemetry.requests
    assert record.speculative_accept_rate == pytest.approx(speculation.accept_rate)
    rates = speculation.accept_rate_per_position
    assert rates == sorted(rates, reverse=True)
    assert speculation.mean_accepted_length == 1 + sum(speculation.accepted) / speculation.drafts
    engine.telemetry.clear()
    assert engine.telemetry.speculation.accept_rate is None


def test_speculation_counts_are_vllm_s():
    speculation = Speculation()
    for drafted, accepted in ((4, 4), (4, 1), (2, 0), (1, 1)):
        speculation.add(drafted, accepted)
    assert (speculation.drafted, speculation.accepted) == ([4, 3, 2, 2], [3, 1, 1, 1])
    assert speculation.drafts == 4
    assert speculation.accept_rate == 6 / 11
    assert speculation.mean_accepted_length == 1 + 6 / 4


@pytest.mark.parametrize(
    ("prompt", "output", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3], [4, 5, 1, 2]),
        ([7, 8], [7, 8, 7], [8, 7, 8, 7]),
        ([3], [3, 3], [3, 3, 3, 3]),
        ([1, 2, 9, 1, 2, 5, 6, 1], [2], [5, 6, 1, 2]),
        ([1, 2, 3, 8, 2, 3, 9, 1, 2], [3], [8, 2, 3, 9]),
        ([1, 2, 3, 4], [5], []),
        ([1], [2], []),
    ],
)
def test_prompt_lookup_copies_what_followed_the_longest_newest_match(prompt, output, drafts):
    request = Request("r", prompt, SamplingParams(max_tokens=50))
    lookup = PromptLookup(4)
    for token in output:
        request.token_ids.append(token)
        lookup.propose([request])
    assert request.draft_token_ids == drafts


def test_no_draft_goes_beyond_max_tokens():
    request = Request("r", [3, 3, 3], SamplingParams(max_tokens=4))
    lookup = PromptLookup(8)
    lengths = []
    for _ in range(4):
        request.token_ids.append(3)
        request.draft_token_ids = []
        lookup.propose([request])
        lengths.append(len(request.draft_token_ids))
    assert lengths == [2, 1, 0, 0]
