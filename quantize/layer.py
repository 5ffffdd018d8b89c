"""One decoder layer, quantized by a method: weights in, packed codes and changed tensors out.

The methods themselves (`methods/`) know tensors only; this file gives them the layer's linears and their calibration
statistics, and measures what came out in the same terms for all of them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from quantize.formats.choose import FORMATS, Format
from quantize.gram import output_error, relative_output_error, relative_weight_error, share
from quantize.manifest import TOO_FEW, ModuleRecord
from quantize.method import AWQ, CLIPPED, GPTQ, SMOOTHQUANT, Method
from quantize.methods.awq import clip_and_round, search_scale
from quantize.methods.consumer import Consumer
from quantize.methods.fusion import ROWS, Fusion
from quantize.methods.gptq import gptq
from quantize.methods.search import UNCALIBRATED_POWER, UNCALIBRATED_SHARES, search_grid
from quantize.methods.smoothquant import search_strength
from quantize.recipe import Recipe
from quantize.scheme import QuantizedWeight, Scheme, dequantize, quantize_rtn, round_to_grid

FEWEST_TOKENS = {GPTQ: 1.0}
FEWEST_TOKENS_OTHERWISE = 1 / 8
"""Calibration tokens that a linear needs, per input; with fewer it is rounded to nearest, as experts are that the text
hardly uses. Measured on held-out inputs of SmolLM2-135M's MLPs at 3 and 4 bits, error against round-to-nearest: gptq
0.6 to 1.5 with half as many tokens as inputs, 0.5 to 1.3 with as many, 0.3 to 0.8 with twice as many (it fits the
sample's noise most where its second moments just fall short of full rank); a search of ranges 0.5 to 1.1 from an
eighth on."""


@dataclass(frozen=True)
class QuantizedModule:
    """One linear's result; `error_of` says what relative_error compares ("outputs" or "weights")."""

    quantized: QuantizedWeight
    relative_error: float
    error_of: str
    seconds: float
    fallback: str | None = None
    dead_columns: int = 0
    clipped_scales: int = 0
    tokens: int | None = None

    def record(self, name: str, stored: Mapping[str, torch.Tensor]) -> ModuleRecord:
        scheme = self.quantized.scheme
        return ModuleRecord(
            name=name,
            bits=scheme.bits,
            group_size=scheme.group_size,
            symmetric=scheme.symmetric,
            relative_error=self.relative_error,
            error_of=self.error_of,
            fallback=self.fallback,
            dead_columns=self.dead_columns,
            clipped_scales=self.clipped_scales,
            parameters=self.quantized.codes.numel(),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in stored.values()),
            seconds=round(self.seconds, 4),
            tokens=self.tokens,
        )


def round_module(
    weight: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype, form: Format, fallback: str | None = None
) -> QuantizedModule:
    """A linear rounded to nearest without any calibration, on the grid of least error (see `methods/search.py`)."""
    begin = time.perf_counter()
    exact = weight.float()
    alike = torch.ones(exact.shape[1], device=exact.device)
    grid, clipped = search_grid(exact, alike, scheme, scale_dtype, UNCALIBRATED_POWER, UNCALIBRATED_SHARES)
    quantized = form.storable(round_to_grid(exact, grid))
    error = relative_weight_error(exact, dequantize(quantized, torch.float32))
    seconds = time.perf_counter() - begin
    return QuantizedModule(quantized, error, "weights", seconds, fallback, clipped_scales=int(clipped.sum()))


def quantize_layer(
    layer: nn.Module,
    schemes: Mapping[str, Scheme],
    grams: Mapping[str, torch.Tensor],
    samples: Mapping[str, torch.Tensor],
    tokens: Mapping[str, int],
    fusions: tuple[Fusion, ...],
    recipe: Recipe,
) -> tuple[dict[str, QuantizedModule], dict[str, torch.Tensor]]:
    """The linears of a layer by their names in it, and the other tensors that took the inverse scales (norms, biases).

    `grams` [K, K] and `samples` [T, K] are what calibration saw at each linear, of `tokens` tokens; those with one
    input share the very same tensor.
    """
    before = dict(layer.named_parameters())
    form = FORMATS[recipe.format]
    fewest = FEWEST_TOKENS.get(recipe.plan.rounding, FEWEST_TOKENS_OTHERWISE)
    work = LayerWork(
        layer,
        schemes,
        {name: linear(layer, name).weight.float().clone() for name in schemes},
        {name: form.scale_dtype(linear(layer, name).weight.dtype) for name in schemes},
        {name: gram for name, gram in grams.items() if tokens[name] >= fewest * gram.shape[0]},
        dict(samples),
        form,
    )
    for fusion in fusions:
        begin = time.perf_counter()
        scale_inputs(work, fusion, recipe.plan)
        for name in fusion.consumers:
            work.spend(name, (time.perf_counter() - begin) / len(fusion.consumers))
    unseen = [name for name in schemes if name not in work.grams]
    results = {name: round_unseen(work, name, tokens.get(name, 0)) for name in unseen}
    if recipe.plan.rounding == GPTQ:
        results |= gptq_linears(work, recipe)
    else:
        clip = recipe.plan.rounding == CLIPPED
        results |= {name: round_seen(work, name, clip) for name in schemes if name in work.grams}
    results = {name: replace(result, tokens=tokens.get(name, 0)) for name, result in results.items()}
    changed = {
        name: parameter.data
        for name, parameter in layer.named_parameters()
        if parameter is not before[name] and name.removesuffix(".weight") not in schemes
    }
    return results, changed


@dataclass(frozen=True)
class LayerWork:
    """A layer while scales move through it: `weights` float32 [N, K] and what comes in, by linear. `dtypes` are those
    in which the scales are stored."""

    layer: nn.Module
    schemes: Mapping[str, Scheme]
    weights: dict[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    grams: dict[str, torch.Tensor]
    samples: dict[str, torch.Tensor]
    form: Format
    seconds: dict[str, float] = field(default_factory=dict)

    def spend(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def scale_inputs(work: LayerWork, fusion: Fusion, plan: Method) -> None:
    """One scale: found, moved in the weights and in the layer's norm, and the inputs brought along. Left alone when a
    linear concerned keeps its weights: their dtype could not take the scale without rounding."""
    concerned = (*fusion.consumers, *((fusion.source,) if fusion.how == ROWS else ()))
    leader = fusion.consumers[0]
    if not all(name in work.schemes for name in concerned) or leader not in work.grams:
        return
    if plan.scaling == SMOOTHQUANT and any(work.schemes[name].activations is None for name in fusion.consumers):
        return  # there is no rounding of activations to make easier
    gram = work.grams[leader]
    consumers = [Consumer(work.weights[name], work.schemes[name]) for name in fusion.consumers]
    if plan.scaling == AWQ:
        activity = fusion.pooled(gram.diagonal()).sqrt()
        scale = search_scale(consumers, gram, activity, fusion.channel, work.dtypes[leader])
    else:
        scale = search_strength(consumers, work.samples[leader], fusion.channel, work.dtypes[leader])
    moved = fusion.apply(work.layer, scale, work.weights.__getitem__)[fusion.channel]
    gram = gram / (moved[:, None] * moved[None, :])
    samples = work.samples[leader] / moved if leader in work.samples else None
    for name in fusion.consumers:
        work.grams[name] = gram
        if samples is not None:
            work.samples[name] = samples


def round_unseen(work: LayerWork, name: str, tokens: int) -> QuantizedModule:
    reason = f"{TOO_FEW}, {tokens}" if tokens else "no calibration input reached it"
    fallback = f"round to nearest: {reason}"
    return round_module(work.weights[name], work.schemes[name], work.dtypes[name], work.form, fallback)


def round_seen(work: LayerWork, name: str, clip: bool) -> QuantizedModule:
    """A linear rounded column by column on its own, its groups' ranges cut for the least output error if `clip`."""
    begin = time.perf_counter()
    weight, gram, scheme, dtype = work.weights[name], work.grams[name], work.schemes[name], work.dtypes[name]
    if clip:
        found, clipped = clip_and_round(weight, gram, scheme, dtype)
        quantized, error = stored_and_error(work, name, found.quantized, found.error, found.signal)
    else:
        quantized, clipped = work.form.storable(quantize_rtn(weight, scheme, dtype)), 0
        error = relative_output_error(weight, dequantize(quantized, torch.float32), gram)
    dead = int((gram.diagonal() == 0).sum())
    work.spend(name, time.perf_counter() - begin)
    return QuantizedModule(quantized, error, "outputs", work.seconds[name], None, dead, clipped)


def gptq_linears(work: LayerWork, recipe: Recipe) -> dict[str, QuantizedModule]:
    """Linears with one input and one scheme go through GPTQ as one tall matrix, since columns only compensate within
    their own row."""
    batches: dict[tuple[int, Scheme, torch.dtype], list[str]] = {}
    for name, scheme in work.schemes.items():
        if name in work.grams:
            batches.setdefault((id(work.grams[name]), scheme, work.dtypes[name]), []).append(name)
    results: dict[str, QuantizedModule] = {}
    for (_gram, scheme, dtype), names in batches.items():
        begin = time.perf_counter()
        gram = work.grams[names[0]]
        outcome = gptq(
            torch.cat([work.weights[name] for name in names]), gram, scheme, dtype, recipe.damp, recipe.act_order
        )
        seconds = (time.perf_counter() - begin) / len(names)
        start = 0
        for name in names:
            rows = slice(start, start + work.weights[name].shape[0])
            start = rows.stop
            quantized, error = stored_and_error(
                work, name, take_rows(outcome.quantized, rows), outcome.error[rows], outcome.signal[rows]
            )
            work.spend(name, seconds)
            results[name] = QuantizedModule(
                quantized,
                error,
                "outputs",
                work.seconds[name],
                outcome.fallback,
                outcome.dead_columns,
                int(outcome.clipped[rows].sum()),
            )
    return results


def stored_and_error(
    work: LayerWork, name: str, quantized: QuantizedWeight, error: torch.Tensor, signal: torch.Tensor
) -> tuple[QuantizedWeight, float]:
    """The weight as the format stores it, and its relative output error: `error` and `signal` [N] are what is known of
    `quantized`, so that a product with the second moments is only needed where the format changes it."""
    stored = work.form.storable(quantized)
    if stored is not quantized:
        error = output_error(work.weights[name] - dequantize(stored, torch.float32), work.grams[name])
    return stored, share(error, signal)


def linear(layer: nn.Module, name: str) -> nn.Linear:
    module = layer.get_submodule(name)
    assert isinstance(module, nn.Linear)
    return module


def take_rows(quantized: QuantizedWeight, rows: slice) -> QuantizedWeight:
    zero_point = None if quantized.zero_point is None else quantized.zero_point[rows].contiguous()
    return QuantizedWeight(
        quantized.codes[rows].contiguous(), quantized.scale[rows].contiguous(), zero_point, quantized.scheme
    )
