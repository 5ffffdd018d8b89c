"""SmoothQuant: outliers of the activations are divided away per channel, and the weights take them in, so that both
sides round well to 8 bits.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (arXiv
2211.10438): s_j = max|X_j|^α / max|W_j|^(1-α), X·diag(1/s), W·diag(s). The paper fixes the migration strength α for a
model; here every tensor gets its own, the one with the least output error when tokens and weights are both rounded.
"""

import torch

from quantize.kernels.reference import quantize_tokens
from quantize.methods.consumer import Consumer
from quantize.scheme import dequantize, quantize_rtn

STRENGTHS = tuple(step / 20 for step in range(2, 20))


def search_strength(
    consumers: list[Consumer], tokens: torch.Tensor, channel: torch.Tensor, scale_dtype: torch.dtype
) -> torch.Tensor:
    """The per-channel scale [C] of the best strength; ones when none beats not scaling. `tokens` float32 [T, K] are
    inputs of the consumers, `channel` [K] maps inputs to channels. A channel that no token or no weight moves keeps
    scale 1."""
    channels = int(channel.max()) + 1
    inputs = largest_per_channel(tokens, channel, channels)
    weights = largest_per_channel(torch.cat([consumer.weight for consumer in consumers]), channel, channels)
    alive = (inputs > 0) & (weights > 0)
    best = torch.ones_like(inputs)
    least = rounding_error(consumers, tokens, best[channel], scale_dtype)
    for strength in STRENGTHS:
        scale = torch.where(alive, inputs.pow(strength) / weights.pow(1.0 - strength), 1.0).clamp(1e-5, 1e5)
        error = rounding_error(consumers, tokens, scale[channel], scale_dtype)
        if error < least:
            best, least = scale, error
    return best


def largest_per_channel(rows: torch.Tensor, channel: torch.Tensor, channels: int) -> torch.Tensor:
    """max |rows| [R, K] over the rows and over the inputs that share a channel, [C]."""
    per_input = rows.abs().amax(dim=0)
    return torch.zeros(channels, device=rows.device).scatter_reduce_(0, channel, per_input, "amax")


def rounding_error(
    consumers: list[Consumer], tokens: torch.Tensor, spread: torch.Tensor, scale_dtype: torch.dtype
) -> float:
    """Σ ‖X Wᵀ − Q(X / s) Q(W s)ᵀ‖² over the consumers, tokens and weights rounded as in use."""
    codes, step = quantize_tokens(tokens / spread)
    rounded = codes.float().mul_(step)
    error = 0.0
    for consumer in consumers:
        weight = dequantize(quantize_rtn(consumer.weight * spread, consumer.scheme, scale_dtype), torch.float32)
        error += (tokens @ consumer.weight.T - rounded @ weight.T).square_().sum().item()
    return error
