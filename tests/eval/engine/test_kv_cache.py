"""What a KV dtype costs, in error and in bytes, is what kv_cache.py says; it costs the same under every schedule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.engine import Engine, EngineConfig, SamplingParams
from eval.engine.attention import StepContext, TorchAttention
from eval.engine.kv_cache import KV_DTYPES, KVCache, KVGeometry, quantize_rows
from eval.engine.native_attention import NativeAttention, native_library

CPU = torch.device("cpu")
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 90, 6, 2, 32
SCALING = HEAD_DIM**-0.5


@pytest.fixture(params=["torch", "native"])
def backend(request):
    if request.param == "torch":
        return TorchAttention()
    library = native_library()
    if library is None:
        pytest.skip("no C++ compiler here")
    return NativeAttention(library)


def one_prompt(dtype):
    """A step of one request's TOKENS, and an empty cache of one layer for it."""
    blocks = -(-TOKENS // 16)
    return StepContext(
        KVCache.allocate(KVGeometry(1, KV_HEADS, HEAD_DIM), blocks, 16, dtype, CPU),
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.tensor([TOKENS], dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32)[None],
        torch.arange(TOKENS),
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40))
def test_a_row_is_kept_to_half_a_scale(row):
    rows = torch.tensor([row])
    codes, scales = quantize_rows(rows)
    error = (codes.double() * scales.double()[:, None] - rows.double()).abs()
    # Beside half a scale: the rounding of scale and quotient. A scale below the smallest normal number is not exact.
    assert error.max() <= scales.item() * (0.5 + 1e-4) or rows.abs().max() < 127 * torch.finfo(torch.float32).tiny


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 2.0)])
def test_attention_over_int8_keeps_its_stated_bound(backend, window, softcap):
    torch.manual_seed(0)
    query = 2 * torch.randn(TOKENS, HEADS, HEAD_DIM)
    key, value = torch.randn(2, TOKENS, KV_HEADS, HEAD_DIM) * torch.rand(2, TOKENS, KV_HEADS, 1) * 4
    exact = TorchAttention().attend(one_prompt(torch.float32), 0, query, key, value, SCALING, window, softcap)
    actual = backend.attend(one_prompt(torch.int8), 0, query, key, value, SCALING, window, softcap)

    per_query_head = [quantize_rows(rows)[1].repeat_interleave(HEADS // KV_HEADS, dim=1) for rows in (key, value)]
    values = value.repeat_interleave(HEADS // KV_HEADS, dim=1)
    errors, bounds = (actual - exact).abs(), torch.empty_like(exact)
    for position in range(TOKENS):
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        key_scale, value_scale = (scales[seen].amax(dim=0) for scales in per_query_head)
        moved = SCALING * query[position].abs().sum(dim=-1) * key_scale / 2
        spread = values[seen].amax(dim=0) - values[seen].amin(dim=0)
        bounds[position] = value_scale[:, None] / 2 + torch.tanh(moved / 2)[:, None] * spread
    assert (errors <= bounds + 1e-5).all()
    assert errors.max() > 1e-3, "int8 cannot be as exact as that: is the cache in use?"


def test_what_is_not_finite_reaches_the_output(backend):
    torch.manual_seed(0)
    for bad in (math.nan, math.inf):
        query, key, value = (torch.randn(TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        key[40, 1, 3] = bad
        value[60, 0, 5] = bad
        output = backend.attend(one_prompt(torch.int8), 0, query, key, value, SCALING, None, None)
        assert not output[40:, 3:].isfinite().any()
        assert not output[60:, :3].isfinite().any()


@pytest.mark.parametrize("name", KV_DTYPES)
def test_a_block_takes_what_the_geometry_says(name):
    geometry = KVGeometry(3, 2, 20)
    cache = KVCache.allocate(geometry, 7, 4, KV_DTYPES[name], CPU)
    assert cache.nbytes == 7 * geometry.block_bytes(4, KV_DTYPES[name])
    assert sum(tensor.nbytes for tensor in cache.tensors) == cache.nbytes


def test_int8_takes_about_half_the_bytes_of_bfloat16(tiny_model):
    def engine(kv_dtype):
        model = tiny_model("qwen3", head_dim=64).to(torch.bfloat16)
        return Engine(model, None, EngineConfig(kv_dtype=kv_dtype, kv_cache_bytes=10**5))

    plain, int8 = engine("auto"), engine("int8")
    assert plain.identity()["kv_dtype"] == "bfloat16"
    assert int8.identity()["kv_dtype"] == "int8"
    assert int8.identity()["dtype"] == "bfloat16"
    assert plain.memory()["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 2
    assert int8.memory()["kv_bytes_per_token"] == 2 * 2 * 2 * (64 + 4)
    assert int8.memory()["kv_cache_bytes"] <= 10**5
    assert int8.pool.num_blocks == int(10**5 / (16 * 544)) > 1.8 * plain.pool.num_blocks


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_int8_moves_logits_less_than_five_times_as_far_as_bfloat16(architecture, tiny_model):
    generator = torch.Generator().manual_seed(1)
    pairs = [([7], torch.randint(1, 128, (100,), generator=generator).tolist()) for _ in range(4)]

    def logprobs(kv_dtype):
        engine = Engine(tiny_model(architecture), None, EngineConfig(num_blocks=40, kv_dtype=kv_dtype))
        pieces = sorted(engine.score_stream(pairs), key=lambda piece: piece[:2])
        return torch.cat([piece[2] for piece in pieces])

    exact = logprobs("float32")
    moved = {name: (logprobs(name) - exact).abs().max() for name in ("bfloat16", "float16", "int8")}
    assert moved["float16"] < moved["bfloat16"] < moved["int8"] < 5 * moved["bfloat16"]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_rounded_keys_and_values_are_the_same_under_every_schedule(kv_dtype, tiny_model, random_prompts):
    prompts = random_prompts(24)
    prompts[::4] = [prompts[1][:30] + prompt[:20] for prompt in prompts[::4]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def tokens(**options):
        settings = {"block_size": 4, "num_blocks": 1200, "kv_dtype": kv_dtype} | options
        engine = Engine(tiny_model("llama"), None, EngineConfig(**settings))
        found = [completion.token_ids for completion in engine.generate(prompts, params)]
        engine.check_integrity()
        return found

    expected = tokens(max_num_seqs=1, prefix_caching=False)
    for options in (
        {},
        {"max_prefill_chunk": 7},
        {"num_blocks": 40, "max_num_seqs": 16},
        {"attention_backend": "torch"},
    ):
        assert tokens(**options) == expected, options
