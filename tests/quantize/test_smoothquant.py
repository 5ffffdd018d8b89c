"""SmoothQuant: the strength is chosen by the error that it leaves, and channels without a scale of their own keep 1."""

import pytest
import torch

from quantize.methods.consumer import Consumer
from quantize.methods.smoothquant import largest_per_channel, rounding_error, search_strength
from quantize.scheme import Scheme

W8A8 = Scheme(8, activations="int8")


def example(seed: int) -> tuple[list[Consumer], torch.Tensor]:
    """Two linears and tokens [T, K] with the few huge channels that language models have."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(200, 64, generator=generator)
    tokens[:, ::16] *= 60
    weights = [torch.randn(rows, 64, generator=generator) * 0.1 for rows in (48, 16)]
    return [Consumer(weight, W8A8) for weight in weights], tokens


@pytest.mark.parametrize("seed", range(3))
def test_outliers_moved_into_the_weights_leave_a_fraction_of_the_error(seed):
    consumers, tokens = example(seed)
    scale = search_strength(consumers, tokens, torch.arange(64), torch.float32)
    assert rounding_error(consumers, tokens, scale, torch.float32) < 0.3 * rounding_error(
        consumers, tokens, torch.ones(64), torch.float32
    )


def test_the_searched_strength_is_at_least_as_good_as_the_papers_half():
    consumers, tokens = example(5)
    channel = torch.arange(64)
    weights = largest_per_channel(torch.cat([consumer.weight for consumer in consumers]), channel, 64)
    half = (largest_per_channel(tokens, channel, 64) / weights).sqrt()
    scale = search_strength(consumers, tokens, channel, torch.float32)
    best = rounding_error(consumers, tokens, half, torch.float32)
    assert rounding_error(consumers, tokens, scale, torch.float32) <= 1.0001 * best


def test_heads_that_share_a_channel_share_its_scale():
    consumers, tokens = example(1)
    channel = torch.arange(64) % 16
    scale = search_strength(consumers, tokens, channel, torch.float32)
    assert scale.shape == (16,)
    assert largest_per_channel(tokens, channel, 16).allclose(tokens.view(200, 4, 16).abs().amax(dim=(0, 1)))


def test_channels_without_inputs_or_weights_keep_scale_one():
    consumers, tokens = example(2)
    tokens[:, :8] = 0
    for consumer in consumers:
        consumer.weight[:, 8:16] = 0
    scale = search_strength(consumers, tokens, torch.arange(64), torch.bfloat16)
    assert (scale[:16] == 1).all()
    assert torch.isfinite(scale).all()
