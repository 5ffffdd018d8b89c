"""AWQ: input channels that carry large activations are scaled up before rounding, and the inverse scale goes into what
is before them; then each group's range is cut where that lowers the output error, and the scales are fitted to the
codes.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (arXiv 2306.00978). Both
searches minimise the squared error of the linears' outputs over all calibration tokens, computed in float32 from the
inputs' second moments; the reference code measures it on a sample of tokens instead.
"""

import torch

from quantize.gram import output_error
from quantize.methods.consumer import Consumer
from quantize.methods.refit import Refitted, refit_scales
from quantize.scheme import (
    Grid,
    Scheme,
    dequantize,
    grid_from_range,
    grouped,
    quantize_rtn,
    round_to_grid,
)

RATIOS = tuple(step / 10 for step in range(10))
FINER = (-0.05, 0.05)
"""Ratios tried first, and then around the best of them: the error is smooth in the ratio."""

CUTS = tuple(1.0 - step / 40 for step in range(21))


def search_scale(
    consumers: list[Consumer],
    gram: torch.Tensor,
    activity: torch.Tensor,
    channel: torch.Tensor,
    scale_dtype: torch.dtype,
) -> torch.Tensor:
    """The per-channel scale [C] with the least output error, of the form activity^a / weights^b (both weighings of the
    paper's code: b = 0, and b = 1 - a). `activity` [C] is the RMS of the inputs; `channel` [K] maps inputs to channels.
    Ones when nothing beats not scaling.

    A channel without activity, or without weights, keeps scale 1: both forms would be 0/0 there.
    """
    ones = torch.ones_like(activity)
    alive = activity > 0
    active = torch.where(alive, activity, activity[alive].mean() if bool(alive.any()) else ones)
    magnitude = weight_magnitude(consumers, channel, len(activity))

    def candidate(ratio: float, weighed: bool) -> torch.Tensor:
        scale = active.pow(ratio)
        if weighed:
            scale = scale / magnitude.pow(1.0 - ratio)
        scale = scale / (scale.max() * scale.min()).sqrt()
        return torch.where(alive, scale, ones).clamp(1e-4, 1e4)

    tried = {(0.0, False): scaled_error(consumers, ones, gram, channel, scale_dtype)}

    def best_of(forms: list[tuple[float, bool]]) -> tuple[float, bool]:
        for form in forms:
            if form not in tried:
                tried[form] = scaled_error(consumers, candidate(*form), gram, channel, scale_dtype)
        return min(tried, key=lambda form: tried[form])

    ratio, weighed = best_of([(ratio, weighed) for ratio in RATIOS for weighed in (False, True)])
    return candidate(*best_of([(ratio + step, weighed) for step in FINER if ratio + step > 0]))


def weight_magnitude(consumers: list[Consumer], channel: torch.Tensor, channels: int) -> torch.Tensor:
    """Mean over the outputs of |weight| relative to the largest in its group, per source channel [C], never 0."""
    shares = []
    for consumer in consumers:
        groups = grouped(consumer.weight.abs(), consumer.scheme)
        shares.append((groups / groups.amax(dim=2, keepdim=True).clamp(min=1e-12)).reshape(consumer.weight.shape))
    per_input = torch.cat(shares).mean(dim=0)
    total = torch.zeros(channels, device=per_input.device).index_add_(0, channel, per_input)
    return (total / torch.bincount(channel, minlength=channels)).clamp(min=1e-4)


def scaled_error(
    consumers: list[Consumer], scale: torch.Tensor, gram: torch.Tensor, channel: torch.Tensor, scale_dtype: torch.dtype
) -> float:
    """Output error when the weights are rounded under this scale."""
    spread = scale[channel][None, :]
    error = 0.0
    for consumer in consumers:
        rounded = (
            dequantize(quantize_rtn(consumer.weight * spread, consumer.scheme, scale_dtype), torch.float32) / spread
        )
        error += output_error(consumer.weight - rounded, gram).sum().item()
    return error


def search_clip(weight: torch.Tensor, gram: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> tuple[Grid, int]:
    """Per group, the cut of its range with the least output error of that group alone, (Δ_g H_gg Δ_gᵀ); the grid, and
    how many groups were cut."""
    groups = grouped(weight, scheme)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    width = groups.shape[2]
    blocks = torch.stack(
        [gram[start : start + width, start : start + width] for start in range(0, weight.shape[1], width)]
    )
    best = torch.full_like(low, float("inf"))
    share = torch.ones_like(low)
    for cut in CUTS:
        grid = grid_from_range(low * cut, high * cut, scheme, scale_dtype)
        rounded = dequantize(round_to_grid(weight, grid), torch.float32)
        delta = grouped(weight - rounded, scheme).transpose(0, 1)
        error = (torch.bmm(delta, blocks) * delta).sum(dim=2).T
        better = error < best
        best = torch.where(better, error, best)
        share = torch.where(better, torch.full_like(share, cut), share)
    return grid_from_range(low * share, high * share, scheme, scale_dtype), int((share < 1.0).sum())


def clip_and_round(
    weight: torch.Tensor, gram: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> tuple[Refitted, int]:
    """The scaled weight on its cut grid, its scales fitted to the codes, and how many groups were cut."""
    grid, clipped = search_clip(weight, gram, scheme, scale_dtype)
    return refit_scales(weight, gram, round_to_grid(weight, grid)), clipped
