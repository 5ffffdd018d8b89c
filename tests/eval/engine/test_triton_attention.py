"""The Triton kernels (here in Triton's interpreter) compute what the plain torch backend computes, and compile for real
GPUs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from eval.engine import Engine, EngineConfig, EvalError, SamplingParams, triton_attention
from eval.engine.attention import StepContext, TorchAttention
from eval.engine.backends import choose_backend
from eval.engine.kv_cache import KVCache, KVGeometry
from eval.engine.triton_attention import TritonAttention, supports
from quantize.kernels.triton import launch
from tests.triton_for_gpu import Case, compile_elsewhere

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="these tensors lie on the CPU")

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 80
# Sums of up to 300 float32 terms in another order, and tanh by way of exp.
FLOAT32 = 4e-6
# The output's own rounding, and that of float16 weights; the interpreter keeps bfloat16 weights in float32.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2 * 2.0**-11}


def random_cache(kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
    """Two layers, filled with tokens of an earlier step."""
    cache = KVCache.allocate(KVGeometry(2, kv_heads, head_dim), NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
    for layer in range(2):
        rows = torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, kv_heads, head_dim)
        cache.write(layer, torch.arange(NUM_BLOCKS * BLOCK_SIZE), *rows)
    return cache


def random_step(kv: KVCache, query_lens: list[int]) -> StepContext:
    """Requests with up to 150 tokens before those of the step, over shuffled blocks."""
    blocks = torch.randperm(NUM_BLOCKS).int().tolist()
    context_lens = [length + int(torch.randint(0, 150, ())) for length in query_lens]
    tables = torch.zeros(len(query_lens), 24, dtype=torch.int32)
    slots, starts = [], [0]
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for index in range(-(-context_len // BLOCK_SIZE)):
            tables[row, index] = blocks.pop()
        starts.append(starts[-1] + query_len)
        positions = torch.arange(context_len - query_len, context_len)
        slots.append(tables[row][positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
    return StepContext(
        kv,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
        tables,
        torch.cat(slots),
    )


def assert_equals_torch(query_lens, heads, kv_heads, head_dim, dtype, kv_dtype, window=None, softcap=None):
    kv = random_cache(kv_heads, head_dim, kv_dtype)
    expected_kv = KVCache(*(tensor.clone() for tensor in kv.tensors))
    tokens = sum(query_lens)
    query = torch.randn(tokens, heads, head_dim).to(dtype)
    # transformers hands over transposed views: the kernels must follow the strides.
    key = torch.randn(kv_heads, tokens, head_dim).to(dtype).transpose(0, 1)
    value = torch.randn(tokens, kv_heads, head_dim).to(dtype)
    step = random_step(kv, query_lens)
    case = (1, query, key, value, head_dim**-0.5, window, softcap)
    expected = TorchAttention().attend(replace(step, kv=expected_kv), *case)
    actual = TritonAttention().attend(step, *case)
    assert all(map(torch.equal, kv.tensors, expected_kv.tensors))
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    largest = expected_kv.read(1, torch.arange(NUM_BLOCKS * BLOCK_SIZE))[1].abs().max()
    assert (actual.float() - expected.float()).abs().max() <= FLOAT32 + ROUNDING[dtype] * largest


STEPS = {"decode": [1] * 4, "one": [1], "mixed": [1, 1, 7, 20], "prefill": [40, 3], "chunks": [17, 1, 16]}
KINDS = [(None, None), (5, None), (70, None), (None, 3.0), (33, 2.0)]


@pytest.mark.parametrize(("window", "softcap"), KINDS)
@pytest.mark.parametrize("query_lens", STEPS.values(), ids=STEPS)
def test_every_kind_of_step(query_lens, window, softcap):
    torch.manual_seed(0)
    assert_equals_torch(query_lens, 4, 2, 64, torch.float32, torch.float32, window, softcap)
    assert_equals_torch(query_lens, 6, 2, 64, torch.bfloat16, torch.bfloat16, window, softcap)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", [20, 64, 80, 96, 128, 256])
def test_every_shape_of_head(heads, kv_heads, head_dim):
    torch.manual_seed(1)
    assert_equals_torch([1, 1, 9], heads, kv_heads, head_dim, torch.float16, torch.float16)
    assert_equals_torch([1, 1, 1], heads, kv_heads, head_dim, torch.float32, torch.float32, window=20)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.int8),
        (torch.float16, torch.int8),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("query_lens", [STEPS["decode"], STEPS["mixed"]], ids=["decode", "mixed"])
def test_every_pair_of_dtypes(query_lens, dtype, kv_dtype):
    torch.manual_seed(2)
    assert_equals_torch(query_lens, 4, 2, 64, dtype, kv_dtype)
    assert_equals_torch(query_lens, 4, 2, 80, dtype, kv_dtype, window=9, softcap=2.0)


def test_a_key_that_is_not_finite_keeps_a_scale_that_is_not():
    kv = random_cache(1, 16, torch.int8)
    step = random_step(kv, [3])
    key = torch.ones(3, 1, 16)
    key[0, 0, 3], key[1, 0, 4] = torch.inf, torch.nan
    TritonAttention().attend(step, 0, torch.ones(3, 1, 16), key, torch.ones(3, 1, 16), 1.0, None, None)
    kept = kv.scales[0, 0].flatten()[step.slot_mapping]
    assert kept.isfinite().tolist() == [False, False, True]


def test_padding_changes_nothing_and_comes_out_as_zeros():
    torch.manual_seed(3)
    kv = random_cache(2, 32, torch.float32)
    step = random_step(kv, [1, 1])
    tensors = (torch.randn(4, 4, 32), torch.randn(4, 2, 32), torch.randn(4, 2, 32))
    alone = TritonAttention().attend(step, 0, *(tensor[:2] for tensor in tensors), 0.2, None, None)
    before = kv.blocks.clone()
    padded = StepContext(
        kv,
        torch.arange(5, dtype=torch.int32),
        torch.nn.functional.pad(step.context_lens, (0, 2)),
        torch.nn.functional.pad(step.block_tables, (0, 0, 0, 2)),
        torch.nn.functional.pad(step.slot_mapping, (0, 2), value=-1),
    )
    together = TritonAttention().attend(padded, 0, *tensors, 0.2, None, None)
    assert torch.equal(kv.blocks, before)
    assert torch.allclose(together[:2], alone, atol=FLOAT32)
    assert not together[2:].any()


def test_cases_without_a_kernel_are_known_beforehand():
    assert supports(128, torch.bfloat16, torch.int8)
    assert not supports(512, torch.bfloat16, torch.bfloat16)
    assert not supports(64, torch.float64, torch.float64)


def test_the_backend_is_chosen_by_name_and_refused_where_it_cannot_run(monkeypatch):
    case = (64, torch.float32, torch.float32, CPU)
    assert choose_backend("triton", *case).name == "triton"
    assert choose_backend("auto", *case).name != "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(EvalError, match="the triton attention does not run here"):
        choose_backend("triton", *case)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_engine_generates_what_transformers_does(tiny_model, random_prompts, greedy_reference, architecture):
    """Float32, mixed steps of chunks and decodes, a window and soft-capping."""
    model = tiny_model(architecture)
    prompts = random_prompts(3, longest=30)
    expected = greedy_reference(model, prompts, 5)
    config = EngineConfig(max_num_seqs=3, max_batched_tokens=20, block_size=8, attention_backend="triton")
    engine = Engine(model, config=config)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=5))
    assert [output.token_ids for output in outputs] == expected
    assert engine.identity()["attention_backend"] == "triton"


def gpu_cases() -> Iterator[Case]:
    numbers = ("query_token", "query_head", "table_stride", "block_size", "num_requests", "num_tokens", "window")
    types = dict.fromkeys(numbers, "i32") | {"scaling": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("key_scales", "value_scales", "out", "maxima", "totals"), "*fp32")
    types |= dict.fromkeys(("query_starts", "context_lens", "block_tables"), "*i32")
    decode = {"DECODE": True, "SPLIT": True, "BLOCK_Q": 1, "BLOCK_M": 16, "BLOCK_N": 64}
    prefill = {"DECODE": False, "SPLIT": False, "BLOCK_Q": 16, "BLOCK_M": 64, "BLOCK_N": 64}
    prefill |= {"maxima": None, "totals": None}
    heads = {"GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128}
    plain = {"QUANTIZED": False, "key_scales": None, "value_scales": None}
    for shape, kind, extra in (
        (decode | plain | {"DOT": tl.bfloat16}, ("*bf16", "*bf16"), {"WINDOW": False, "SOFTCAP": False}),
        (decode | {"QUANTIZED": True, "DOT": tl.bfloat16}, ("*bf16", "*i8"), {"WINDOW": False, "SOFTCAP": True}),
        (prefill | plain | {"DOT": tl.float16}, ("*fp16", "*fp16"), {"WINDOW": False, "SOFTCAP": False}),
        (
            prefill | plain | {"DOT": tl.float32, "BLOCK_Q": 4, "BLOCK_M": 16, "BLOCK_N": 32},
            ("*fp32", "*fp32"),
            {"WINDOW": True, "SOFTCAP": True},
        ),
    ):
        query, kept = kind
        yield Case(
            triton_attention._attend,
            {**types, "query": query, "keys": kept, "values": kept},
            {**heads, **shape, **extra},
            numbers[:4],
        )
    strides = ("key_token", "key_head", "value_token", "value_head")
    types = dict.fromkeys(strides, "i32") | {"key": "*bf16", "value": "*bf16", "slots": "*i64"}
    for kept, scales in (("*bf16", plain), ("*i8", {"QUANTIZED": True})):
        pointers = {"keys": kept, "values": kept, "key_scales": "*fp32", "value_scales": "*fp32"}
        shape = {"HEAD_DIM": 80, "BLOCK_D": 128, **scales}
        yield Case(triton_attention._write, {**types, **pointers}, shape, strides)
    types = {"partial": "*fp32", "maxima": "*fp32", "totals": "*fp32", "out": "*bf16", "splits": "i32"}
    yield Case(triton_attention._join, types, {"HEAD_DIM": 128, "BLOCK_D": 128})


def test_every_kernel_compiles_for_ampere_and_hopper_almost_without_spilling(tmp_path):
    results = list(compile_elsewhere("tests.eval.engine.test_triton_attention:gpu_cases", tmp_path))
    assert {result["gpu"] for result in results} == {"sm_80", "sm_90"}
    assert all(int(result["stack"]) <= 64 for result in results), results
    assert {result["kernel"] for result in results} == {"_attend", "_write", "_join"}
