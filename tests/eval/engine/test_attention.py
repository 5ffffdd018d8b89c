"""The native kernel computes what the plain torch backend computes."""

from dataclasses import replace

import pytest
import torch

from eval.engine.attention import StepContext, TorchAttention
from eval.engine.kv_cache import KVCache, KVGeometry
from eval.engine.native_attention import SOURCE, NativeAttention, native_library, supports
from quantize.native_build import load_native

BLOCK_SIZE = 16
NUM_BLOCKS = 64
QUERY_LENS = [1, 1, 7, 40, 100]
CONTEXT_LENS = [1, 130, 50, 40, 230]

SHAPES = [(9, 3, 64), (4, 1, 128), (4, 4, 20), (2, 2, 256), (32, 4, 80)]

# float32 sums in another order: 230 terms of size 1. Outputs below 4 round by 2^-8 (bfloat16) or 2^-11 of themselves.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def random_cache(layers, kv_heads, head_dim, dtype):
    """Filled with tokens of an earlier step, as rows of random sizes."""
    cache = KVCache.allocate(KVGeometry(layers, kv_heads, head_dim), NUM_BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"))
    for layer in range(layers):
        rows = torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, kv_heads, head_dim)
        cache.write(layer, torch.arange(NUM_BLOCKS * BLOCK_SIZE), *rows)
    return cache


def copy_of(cache):
    return KVCache(*(tensor.clone() for tensor in cache.tensors))


def random_step(kv):
    """Two decodes, a prefill chunk with context, and two prefills, over shuffled blocks."""
    blocks = torch.randperm(NUM_BLOCKS).int()
    tables = torch.zeros(len(CONTEXT_LENS), 16, dtype=torch.int32)
    slots, used, starts = [], 0, [0]
    for row, (query_len, context_len) in enumerate(zip(QUERY_LENS, CONTEXT_LENS, strict=True)):
        count = -(-context_len // BLOCK_SIZE)
        tables[row, :count] = blocks[used : used + count]
        used += count
        starts.append(starts[-1] + query_len)
        positions = torch.arange(context_len - query_len, context_len)
        slots.append(tables[row][positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
    return StepContext(
        kv,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(CONTEXT_LENS, dtype=torch.int32),
        tables,
        torch.cat(slots),
    )


@pytest.fixture(scope="module")
def library():
    built = native_library()
    if built is None:
        pytest.skip("no C++ compiler here")
    return built


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (70, None), (None, 3.0), (33, 2.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.int8),
    ],
)
def test_native_equals_torch(library, dtype, kv_dtype, heads, kv_heads, head_dim, window, softcap):
    torch.manual_seed(0)
    kv = random_cache(2, kv_heads, head_dim, kv_dtype)
    expected_kv = copy_of(kv)
    tokens = sum(QUERY_LENS)
    query = torch.randn(tokens, heads, head_dim).to(dtype)
    # transformers hands over transposed views: the kernel must follow the strides.
    key = torch.randn(kv_heads, tokens, head_dim).to(dtype).transpose(0, 1)
    value = torch.randn(tokens, kv_heads, head_dim).to(dtype)
    torch.manual_seed(1)
    step = random_step(kv)
    case = (1, query, key, value, head_dim**-0.5, window, softcap)
    expected = TorchAttention().attend(replace(step, kv=expected_kv), *case)
    actual = NativeAttention(library).attend(step, *case)
    assert all(map(torch.equal, kv.tensors, expected_kv.tensors))
    assert (actual.float() - expected.float()).abs().max() < BOUND[dtype]


TEAM_OF_ITS_OWN = """
#include <omp.h>
#include "{source}"

extern "C" void one_layer(const paged::Step* step, const paged::Shape* shape, const paged::Cache* cache,
                          const void* query, int64_t qt, int64_t qh, const void* key, int64_t kt, int64_t kh,
                          const void* value, int64_t vt, int64_t vh, void* out) {{
  std::vector<paged::Tile> tiles;
  paged::list_tiles(*step, tiles);
  std::atomic<int64_t> next_item{{0}};
#pragma omp parallel num_threads(3)
  {{
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads(), tokens = step->num_tokens;
    paged::write_tokens(*step, *shape, *cache, {{key, kt, kh}}, {{value, vt, vh}}, tokens * thread / threads,
                        tokens * (thread + 1) / threads);
#pragma omp barrier
    paged::attend_items(*step, *shape, *cache, tiles, next_item, {{query, qt, qh}}, out);
  }}
}}
"""


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_the_parts_serve_a_thread_team_that_is_not_theirs(kv_dtype, library, tmp_path, monkeypatch):
    including = tmp_path / "team.cpp"
    including.write_text(TEAM_OF_ITS_OWN.format(source=SOURCE))
    monkeypatch.setenv("QUANTGATE_HOME", str(tmp_path))
    team = load_native(including)
    team.paged_attention = team.one_layer
    team.paged_attention.argtypes = library.paged_attention.argtypes
    team.paged_attention.restype = None
    torch.manual_seed(0)
    kv = random_cache(1, 3, 64, kv_dtype)
    rows = [torch.randn(sum(QUERY_LENS), heads, 64) for heads in (9, 3, 3)]
    step = random_step(kv)
    ours = replace(step, kv=copy_of(kv))
    expected = NativeAttention(library).attend(ours, 0, *rows, 0.125, None, None)
    assert torch.equal(NativeAttention(team).attend(step, 0, *rows, 0.125, None, None), expected)
    assert all(map(torch.equal, step.kv.tensors, ours.kv.tensors))


def test_keys_far_apart_in_size_stay_finite(library):
    kv = KVCache(torch.zeros(1, 2, 8, BLOCK_SIZE, 1, 16))
    step = StepContext(
        kv,
        torch.tensor([0, 100], dtype=torch.int32),
        torch.tensor([100], dtype=torch.int32),
        torch.arange(7, dtype=torch.int32)[None],
        torch.arange(100),
    )
    key = torch.linspace(-400, 400, 100)[:, None, None].expand(100, 1, 16).contiguous()
    value = torch.randn(100, 1, 16)
    output = NativeAttention(library).attend(step, 0, torch.ones(100, 1, 16), key, value, 1.0, None, None)
    # Each key is larger than all before it by far more than exp can bridge: every token attends to itself alone.
    assert torch.allclose(output, value, atol=1e-6)


def test_cases_without_a_kernel_are_known_beforehand():
    cpu = torch.device("cpu")
    assert supports(64, torch.bfloat16, torch.bfloat16, cpu)
    assert supports(64, torch.float32, torch.int8, cpu)
    assert not supports(64, torch.float64, torch.float64, cpu)
    assert not supports(200, torch.float32, torch.float32, cpu)
    assert not supports(64, torch.bfloat16, torch.bfloat16, torch.device("meta"))
