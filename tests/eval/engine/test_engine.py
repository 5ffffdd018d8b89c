"""The engine around its requests: refusals, failures, aborts, stops, telemetry; the pool is whole after anything."""

from dataclasses import fields

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.engine import Engine, EngineConfig, EvalError, SamplingParams
from eval.engine.telemetry import RequestRecord, StepRecord


class Letters:
    """A tokenizer whose token i is the letter chr(i)."""

    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, token_ids, **_):
        return "".join(map(chr, token_ids))


@pytest.fixture
def engine(tiny_model):
    return Engine(tiny_model("llama"), Letters(), EngineConfig(block_size=4, num_blocks=200, max_num_seqs=8))


def test_text_and_ids_give_the_same(engine):
    by_text, by_ids = engine.generate(["hello", [ord(letter) for letter in "hello"]])
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == "".join(map(chr, by_text.token_ids))


def test_stop_string_ends_the_text_before_it(engine):
    [free] = engine.generate(["hello"], SamplingParams(max_tokens=12))
    stop = free.text[4:6]
    [stopped] = engine.generate(["hello"], SamplingParams(max_tokens=12, stop=stop))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.text) + 2]


def test_stop_string_that_was_complete_before_min_tokens_is_text_like_any_other(engine):
    [free] = engine.generate(["hello"], SamplingParams(max_tokens=12))
    text = free.text
    early, late = text[1:3], text[5:8]
    [held] = engine.generate(["hello"], SamplingParams(max_tokens=12, min_tokens=7, stop=(early, late)))
    first = min(place for stop in (early, late) if (place := text.find(stop, 7 - len(stop))) >= 0)
    assert held.finish_reason == "stop"
    assert held.text == text[:first]
    assert len(held.token_ids) >= 7


def test_stop_token_ends_the_request_and_min_tokens_holds_it_off(engine):
    [free] = engine.generate(["hello"], SamplingParams(max_tokens=8))
    third = free.token_ids[2]
    [stopped] = engine.generate(["hello"], SamplingParams(max_tokens=8, stop_token_ids=(third,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    [held] = engine.generate(["hello"], SamplingParams(max_tokens=8, stop_token_ids=(third,), min_tokens=8))
    assert len(held.token_ids) == 8
    assert third not in held.token_ids


def test_model_s_own_end_of_sequence_stops_unless_ignored(tiny_model):
    model = tiny_model("llama")
    [free] = Engine(model, None, EngineConfig(num_blocks=50)).generate([[1, 2, 3]], SamplingParams(max_tokens=8))
    model.generation_config.eos_token_id = [free.token_ids[3]]
    engine = Engine(model, None, EngineConfig(num_blocks=50))
    params = [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, ignore_eos=True)]
    stopped, ignored = engine.generate([[1, 2, 3]] * 2, params)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[3]) + 1]
    assert ignored.token_ids == free.token_ids


def test_seeded_sampling_is_the_same_alone_and_in_company(engine):
    params = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.95, seed=11)
    [alone] = engine.generate(["hello"], params)
    others = [SamplingParams(max_tokens=10, temperature=0.5, seed=seed) for seed in range(6)]
    together = engine.generate(["hello", *"abcdef"], [params, *others])
    assert together[0].token_ids == alone.token_ids


def test_seeded_sampling_survives_preemption(tiny_model, random_prompts):
    prompts = random_prompts(10)
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in range(10)]
    results = []
    for num_blocks in (400, 30):
        engine = Engine(tiny_model("llama"), None, EngineConfig(block_size=4, num_blocks=num_blocks))
        results.append([completion.token_ids for completion in engine.generate(prompts, params)])
    assert sum(record.preemptions for record in engine.telemetry.requests) > 0
    assert results[0] == results[1]


def test_logprobs_come_with_each_token(engine):
    [completion] = engine.generate(["hello"], SamplingParams(max_tokens=5, logprobs=3))
    assert [one.token_id for one in completion.logprobs] == completion.token_ids
    assert all(one.top[0][0] == one.token_id for one in completion.logprobs)
    scores = engine.score([("hello", completion.text)])[0]
    assert scores.logprobs == pytest.approx([one.logprob for one in completion.logprobs], abs=1e-4)


def test_failing_request_fails_alone(engine, monkeypatch):
    expected = engine.generate(["hello"])[0].token_ids

    def decode(self, token_ids, **_):
        raise UnicodeError("no such letter")

    good = engine.add_request("hello")
    bad = engine.add_request("hello", SamplingParams(stop="zz"))
    monkeypatch.setattr(Letters, "decode", decode)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [token for one in outputs if one.request_id == good for token in one.new_token_ids] == expected
    record = next(record for record in engine.telemetry.requests if record.request_id == bad)
    assert (record.finish_reason, record.error) == ("error", "UnicodeError: no such letter")
    engine.check_integrity()


def test_failing_step_fails_its_requests_and_leaves_a_working_engine(engine, monkeypatch):
    expected = engine.generate(["hello there"])[0].token_ids
    engine.pool.forget_all()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        [failed] = engine.generate(["hello there"])
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: out of memory")
    engine.check_integrity()
    assert engine.generate(["hello there"])[0].token_ids == expected


def test_interrupted_generate_leaves_nothing_behind(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["hello", "there"])
    assert not engine.has_unfinished()
    engine.check_integrity()
    assert engine.pool.num_used == 0


def test_aborted_request_gives_its_blocks_back_at_once(engine):
    running = engine.add_request("hello", SamplingParams(max_tokens=50))
    engine.step()
    engine.abort(running)
    engine.abort("no such request")
    assert engine.pool.num_used == 0
    assert not engine.has_unfinished()
    assert engine.telemetry.requests[-1].finish_reason == "abort"


def test_generate_leaves_other_people_s_requests_going(engine):
    mine = engine.add_request("hello", SamplingParams(max_tokens=30))
    engine.generate(["there"], SamplingParams(max_tokens=4))
    tokens = []
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id == mine
            tokens += output.new_token_ids
    assert tokens == engine.generate(["hello"], SamplingParams(max_tokens=30))[0].token_ids


def test_progress_counts_finished_requests(engine):
    seen = []
    params = [SamplingParams(max_tokens=count) for count in (1, 2, 2)]
    engine.generate(["hello", "there", "you"], params, progress=lambda *report: seen.append(report))
    assert seen == [("generate", 1, 3), ("generate", 3, 3)]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", SamplingParams(), "no tokens"),
        ([1, 500], SamplingParams(), "vocabulary is 0 to 127"),
        ("grüße", SamplingParams(), "vocabulary is 0 to 127"),
        ("hello", SamplingParams(max_tokens=200), "5 prompt tokens and max_tokens=200 exceed the context of 128"),
        ("hello", SamplingParams(stop_token_ids=(500,)), "outside the vocabulary of 128"),
    ],
)
def test_request_that_can_never_run_is_refused_at_once(engine, prompt, params, message):
    with pytest.raises(EvalError, match=message):
        engine.generate(["fine", prompt], [SamplingParams(), params])
    assert not engine.has_unfinished()
    assert engine.pool.num_used == 0


def test_the_context_is_what_the_cache_holds_where_that_is_less(tiny_model):
    small = Engine(tiny_model("llama"), None, EngineConfig(block_size=4, num_blocks=10))
    assert small.context_tokens == 40
    [filled] = small.generate([[5, 6, 7]], SamplingParams(max_tokens=37))
    assert len(filled.token_ids) == 37
    with pytest.raises(EvalError, match="the cache has 10: raise kv_cache_bytes"):
        small.generate([[5, 6, 7]], SamplingParams(max_tokens=100))
    assert Engine(tiny_model("llama"), None, EngineConfig(block_size=4, num_blocks=100)).context_tokens == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int3"}, "kv_dtype 'int3' is unknown"),
        ({"attention_backend": "magic"}, "auto, native, triton, torch"),
        ({"block_size": 0}, "block_size is 0: it must be at least 1"),
        ({"max_model_len": 500}, "max_model_len is 500: this model has 128 positions"),
        ({"kv_cache_bytes": 10}, "one KV block of this model takes"),
        ({"scheduler_policy": "lifo"}, "fcfs, priority"),
        ({"max_batched_tokens": 4}, "below max_num_seqs"),
    ],
)
def test_bad_option_is_refused(tiny_model, options, message):
    with pytest.raises(EvalError, match=message):
        Engine(tiny_model("llama"), None, EngineConfig(**options))


def test_unknown_option_is_refused_by_name():
    with pytest.raises(EvalError, match="compute 'a4' is unknown: use auto, a16, a8"):
        Engine.from_checkpoint("nowhere", compute="a4")
    with pytest.raises(EvalError, match="unknown engine option blocksize"):
        Engine.from_checkpoint("nowhere", blocksize=3)


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
OUT_OF_REACH = {
    "ALiBi": ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}, "0 of its 1 layers reach"),
    "ALiBi in attention of its own": ("mpt", {"d_model": 32, "n_layers": 1, "n_heads": 2}, "0 of its 1 layers reach"),
    "a state in place of attention": ("mamba", _SIZES | {"state_size": 4}, "layers of kind linear_attention"),
    "a state beside attention": (
        "jamba",
        _SIZES | {"num_key_value_heads": 2, "num_experts": 2, "mamba_d_state": 4, "attn_layer_offset": 1},
        "layers of kind linear_attention",
    ),
    "sinks": (
        "gpt_oss",
        _SIZES | {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        "its attention uses s_aux",
    ),
    "latent keys and values": (
        "deepseek_v3",
        _SIZES
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"num_key_value_heads": 2, "first_k_dense_replace": 2},
        "keys and values differ in shape",
    ),
    "attention in chunks": (
        "llama4_text",
        _SIZES | {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 1, "intermediate_size_mlp": 32},
        "layers of kind chunked_attention",
    ),
    "a decoder that counts positions itself": (
        "bart",
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
        "change with what stands before it",
    ),
    "cross-attention": (
        "trocr",
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
        "no logits_to_keep",
    ),
}


@pytest.mark.parametrize("kind", OUT_OF_REACH)
def test_a_decoder_out_of_reach_is_refused_by_name(kind):
    architecture, sizes, reason = OUT_OF_REACH[kind]
    config = AutoConfig.for_model(architecture, vocab_size=64, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(EvalError, match=f"{type(model).__name__}: .*{reason}"):
        Engine(model, None, EngineConfig(num_blocks=10))


def test_attention_that_hides_a_bias_is_refused_by_name(tiny_model, monkeypatch):
    modeling = "transformers.models.llama.modeling_llama.eager_attention_forward"

    def biased(module, query, key, value, *rest, **options):
        distances = torch.arange(key.shape[2], dtype=key.dtype)[:, None]
        return eager(module, query, key + distances, value, *rest, **options)

    from transformers.models.llama.modeling_llama import eager_attention_forward as eager

    monkeypatch.setattr(modeling, biased)
    with pytest.raises(EvalError, match="LlamaForCausalLM: its attention is more than causal softmax attention"):
        Engine(tiny_model("llama"), None, EngineConfig(num_blocks=10))


def test_weights_that_are_not_numbers_are_refused(tiny_model):
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data[0] = torch.nan
    with pytest.raises(EvalError, match="LlamaForCausalLM: its logits are not numbers"):
        Engine(model, None, EngineConfig(num_blocks=8))


def test_weights_that_are_all_zero_are_refused_as_such(tiny_model):
    model = tiny_model("llama")
    for weight in model.parameters():
        weight.data.zero_()
    with pytest.raises(EvalError, match="LlamaForCausalLM: its logits are all zero"):
        Engine(model, None, EngineConfig(num_blocks=10))


def test_records_have_the_evidence_s_fields(engine):
    engine.generate(["hello", "there"], SamplingParams(max_tokens=3))
    assert " ".join(field.name for field in fields(RequestRecord)) == (
        "request_id generation_id route_id engine_version trace_id variant input_tokens output_tokens sequence_length "
        "queue_ms prefill_ms decode_ms ttft_ms tpot_ms e2e_ms prompt_cache_hit priority_class preemptions "
        "speculative_accept_rate finish_reason error"
    )
    assert " ".join(field.name for field in fields(StepRecord)) == (
        "step time batch_size active_sequences waiting_queue scheduler_policy prefill_tokens decode_tokens step_ms "
        "kv_cache_bytes block_usage eviction_count reuse_rate max_context attention_backend tokens_per_second"
    )
    record = engine.telemetry.requests[0]
    assert (record.input_tokens, record.output_tokens, record.sequence_length) == (5, 3, 8)
    assert record.ttft_ms == pytest.approx(record.queue_ms + record.prefill_ms)
    assert record.e2e_ms == pytest.approx(record.ttft_ms + record.decode_ms)
    assert record.tpot_ms == pytest.approx(record.decode_ms / 2)
    first, second = engine.telemetry.steps[:2]
    assert (first.prefill_tokens, first.decode_tokens, first.batch_size) == (10, 0, 2)
    assert (second.prefill_tokens, second.decode_tokens, second.max_context) == (0, 2, 6)
    engine.telemetry.clear()
    assert engine.telemetry.requests == []


def test_identity_tells_weights_apart(tiny_model):
    other = tiny_model("llama")
    other.lm_head.weight.data[0, 0] += 1
    first, second = (Engine(model, None, EngineConfig(num_blocks=9)) for model in (tiny_model("llama"), other))
    assert first.identity()["weights_digest"] != second.identity()["weights_digest"]
    assert first.identity()["kv_dtype"] == "float32"
    assert first.memory()["weights_bytes"] == sum(one.nbytes for one in other.parameters()) + sum(
        one.nbytes for one in other.buffers()
    )
