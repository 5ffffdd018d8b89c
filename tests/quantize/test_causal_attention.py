"""Native causal attention against torch's in float32, and the calls that it leaves alone."""

import pytest
import torch
from torch.nn import functional

from quantize.causal_attention import FasterCausalAttention, is_plain_causal
from quantize.kernels.native import has_avx512


def example(batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int) -> list[torch.Tensor]:
    """Query, key, value as a model hands them over: heads and tokens transposed."""
    generator = torch.Generator().manual_seed(tokens)
    return [
        (torch.randn(batch, tokens, count, head_dim, generator=generator) * 2).to(torch.bfloat16).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 16), (2, 4, 2, 7, 64), (1, 9, 3, 130, 64), (2, 2, 1, 65, 80), (1, 2, 2, 200, 128)], ids=str
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_as_close_to_float32_as_bf16_can_be(shape, scale):
    query, key, value = example(*shape)
    exact = functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), is_causal=True, enable_gqa=True, scale=scale
    )
    with FasterCausalAttention():
        ours = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=scale)
    assert ours.shape == query.shape
    assert ours.dtype is torch.bfloat16
    # Weights and outputs are each rounded to bf16, by at most 2^-9 of the largest value.
    assert (ours.float() - exact).abs().max() <= 2**-8 * value.float().abs().max()


def test_huge_scores_give_no_nan():
    query, key, value = (tensor * 100 for tensor in example(1, 2, 2, 70, 64))
    with FasterCausalAttention():
        ours = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.isfinite(ours).all()


@pytest.mark.skipif(not has_avx512(), reason="needs AVX-512 with BF16")
def test_only_plain_causal_calls_are_taken():
    query, key, value = example(1, 4, 2, 8, 32)
    assert is_plain_causal(query, key, value, is_causal=True, enable_gqa=True)
    assert not is_plain_causal(query, key, value, is_causal=True)
    assert not is_plain_causal(query, query, query)
    assert not is_plain_causal(query, query, query, torch.zeros(8, 8, dtype=torch.bfloat16), is_causal=True)
    assert not is_plain_causal(query.float(), query.float(), query.float(), is_causal=True)
    assert not is_plain_causal(query[:, :, :4], query, query, is_causal=True)
