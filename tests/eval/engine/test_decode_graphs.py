"""Recorded decode steps, and steps that run ahead of the host, change no token: here with a recording that is a
function call, since the buckets, the padding and what may run ahead are the same on a GPU."""

from collections import Counter

import pytest
import torch

from eval.engine import Engine, EngineConfig, SamplingParams
from eval.engine.attention import TorchAttention
from eval.engine.decode_graphs import CannotRecord, buckets_for
from eval.engine.model_runner import ModelRunner


class Recorder:
    """Stands for CUDA graphs: replaying writes into the first result, whatever it then holds."""

    def __init__(self):
        self.replays = Counter()

    def __call__(self, forward):
        logits = forward()
        size = len(logits)

        def replay() -> None:
            self.replays[size] += 1
            logits.copy_(forward())

        return logits.fill_(torch.nan), replay


def engine_with(record, model, **options) -> Engine:
    engine = Engine(model, config=EngineConfig(attention_backend="torch", **options))
    engine._runner = ModelRunner(
        model,
        engine._kv,
        TorchAttention(),
        engine.config.max_num_seqs,
        engine.config.max_batched_tokens,
        engine.context_tokens,
        record=record,
    )
    return engine


def test_buckets_hold_every_batch_and_end_at_the_largest():
    assert buckets_for(1) == [1]
    assert buckets_for(6) == [1, 2, 4, 6]
    assert buckets_for(128)[-4:] == [56, 64, 96, 128]
    for largest in range(1, 200):
        buckets = buckets_for(largest)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] == largest


@pytest.mark.parametrize("block_size", [2, 16])
def test_recorded_and_early_steps_give_the_same_tokens(tiny_model, random_prompts, greedy_reference, block_size):
    model = tiny_model("llama")
    prompts = random_prompts(5, longest=40)
    expected = greedy_reference(model, prompts, 20)
    recorder = Recorder()
    engine = engine_with(recorder, model, max_num_seqs=6, block_size=block_size)
    outputs = engine.generate(prompts, [SamplingParams(max_tokens=length) for length in (20, 3, 20, 11, 20)])
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.token_ids == tokens[: len(output.token_ids)]
    assert set(recorder.replays) == {6, 4}
    engine.check_integrity()


def test_a_step_that_ran_ahead_is_not_computed_again(tiny_model, random_prompts):
    """19 decode steps after the prefill, in blocks of 64 that never fill: none is computed twice, or for nothing."""
    recorder = Recorder()
    engine = engine_with(recorder, tiny_model("llama"), max_num_seqs=2, block_size=64)
    engine.generate(random_prompts(2, longest=20), SamplingParams(max_tokens=20))
    assert recorder.replays == {2: 19}


def test_who_ends_early_is_left_out_and_the_others_go_on(tiny_model, random_prompts, greedy_reference):
    model = tiny_model("llama")
    prompts = random_prompts(3, longest=20)
    expected = greedy_reference(model, prompts, 24)
    stop = expected[1][7]
    recorder = Recorder()
    engine = engine_with(recorder, model, max_num_seqs=3, block_size=64)
    plain = SamplingParams(max_tokens=24)
    params = [plain, SamplingParams(max_tokens=24, stop_token_ids=(stop,)), plain]
    outputs = engine.generate(prompts, params)
    assert outputs[0].token_ids == expected[0]
    assert outputs[1].token_ids == expected[1][: expected[1].index(stop) + 1]
    assert outputs[2].token_ids == expected[2]
    # What a request takes no part in any more was computed at most once for nothing: no step ran twice.
    assert sum(recorder.replays.values()) == 23
    engine.check_integrity()


def test_arrivals_aborts_and_preemption_between_early_steps(tiny_model, random_prompts, greedy_reference):
    model = tiny_model("llama")
    prompts = random_prompts(12, longest=30, seed=5)
    expected = greedy_reference(model, prompts, 12)
    engine = engine_with(Recorder(), model, max_num_seqs=4, block_size=4, num_blocks=26)
    tokens = {}
    generator = torch.Generator().manual_seed(0)
    waiting = list(enumerate(prompts))
    ended, aborted = set(), set()
    while waiting or engine.has_unfinished():
        if waiting and torch.rand((), generator=generator) < 0.4:
            index, prompt = waiting.pop()
            engine.add_request(prompt, SamplingParams(max_tokens=12), request_id=str(index))
            tokens[str(index)] = []
        live = [name for name in tokens if name not in ended]
        if live and torch.rand((), generator=generator) < 0.03:
            engine.abort(live[0])
            aborted.add(live[0])
            ended.add(live[0])
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            ended |= {output.request_id} if output.finished else set()
        engine.check_integrity()
    assert any(request.preemptions for request in engine.telemetry.requests)
    for name, got in tokens.items():
        wanted = expected[int(name)]
        assert got == (wanted[: len(got)] if name in aborted else wanted)


def test_sampled_requests_do_not_run_ahead_and_keep_their_tokens(tiny_model, random_prompts):
    model = tiny_model("llama")
    prompts = random_prompts(2, longest=20)
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=3)
    plain = Engine(model, config=EngineConfig(attention_backend="torch")).generate(prompts, params)
    recorded = engine_with(Recorder(), model, max_num_seqs=2).generate(prompts, params)
    assert [output.token_ids for output in recorded] == [output.token_ids for output in plain]


def test_what_cannot_be_recorded_runs_as_it_did_and_says_so_once(tiny_model, random_prompts, greedy_reference):
    def refuse(forward):
        raise CannotRecord("it waits for the device")

    model = tiny_model("llama")
    prompts = random_prompts(2, longest=20)
    expected = greedy_reference(model, prompts, 5)
    engine = engine_with(refuse, model, max_num_seqs=2)
    with pytest.warns(UserWarning, match="not recorded as CUDA graphs, so slower: it waits for the device") as warned:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=5))
    assert len(warned) == 1
    assert [output.token_ids for output in outputs] == expected
