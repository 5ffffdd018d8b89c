"""One decoder layer, quantized by a method: weights in, packed codes and changed tensors out.

The methods themselves (`methods/`) know tensors only; this file gives them the layer's linears and their calibration
statistics, and measures what came out in the same terms for all of them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from quantize.gram import relative_output_error, relative_weight_error
from quantize.manifest import ModuleRecord
from quantize.methods.awq import Consumer, clip_and_round, search_scale
from quantize.methods.fusion import ROWS, Fusion
from quantize.methods.gptq import gptq
from quantize.recipe import Recipe
from quantize.scheme import QuantizedWeight, Scheme, dequantize, quantize_rtn


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
        )


def round_module(weight: torch.Tensor, scheme: Scheme, fallback: str | None = None) -> QuantizedModule:
    """A linear rounded to nearest, without any calibration."""
    begin = time.perf_counter()
    quantized = quantize_rtn(weight, scheme)
    error = relative_weight_error(weight.float(), dequantize(quantized, torch.float32))
    return QuantizedModule(quantized, error, "weights", time.perf_counter() - begin, fallback)


def gptq_layer(
    layer: nn.Module, schemes: Mapping[str, Scheme], grams: Mapping[str, torch.Tensor], recipe: Recipe
) -> dict[str, QuantizedModule]:
    """The linears of a layer by their names in it. Those with one input and one scheme go through GPTQ as one tall
    matrix, since columns only compensate within their own row."""
    results: dict[str, QuantizedModule] = {}
    batches: dict[tuple[int, Scheme, torch.dtype], list[str]] = {}
    for name, scheme in schemes.items():
        weight = linear(layer, name).weight
        if name not in grams:
            results[name] = round_module(weight, scheme, "round to nearest: no calibration input reached it")
            continue
        batches.setdefault((id(grams[name]), scheme, weight.dtype), []).append(name)
    for (_gram, scheme, dtype), names in batches.items():
        begin = time.perf_counter()
        weights = [linear(layer, name).weight.float() for name in names]
        gram = grams[names[0]]
        outcome = gptq(torch.cat(weights), gram, scheme, dtype, recipe.damp, recipe.act_order)
        seconds = (time.perf_counter() - begin) / len(names)
        start = 0
        for name, weight in zip(names, weights, strict=True):
            rows = slice(start, start + weight.shape[0])
            start = rows.stop
            quantized = take_rows(outcome.quantized, rows)
            results[name] = QuantizedModule(
                quantized,
                relative_output_error(weight, dequantize(quantized, torch.float32), gram),
                "outputs",
                seconds,
                outcome.fallback,
                outcome.dead_columns,
                int(outcome.clipped[rows].sum()),
            )
    return results


def awq_layer(
    layer: nn.Module, schemes: Mapping[str, Scheme], grams: Mapping[str, torch.Tensor], fusions: tuple[Fusion, ...]
) -> tuple[dict[str, QuantizedModule], dict[str, torch.Tensor]]:
    """The linears of a layer by their names in it, and the other tensors that took the inverse scales (norms,
    biases)."""
    before = dict(layer.named_parameters())
    weights = {name: linear(layer, name).weight.float().clone() for name in schemes}
    dtypes = {name: linear(layer, name).weight.dtype for name in schemes}
    grams = dict(grams)
    seconds = dict.fromkeys(schemes, 0.0)
    for fusion in fusions:
        begin = time.perf_counter()
        scale_inputs(layer, fusion, weights, schemes, grams, dtypes)
        for name in fusion.consumers:
            seconds[name] = seconds.get(name, 0.0) + (time.perf_counter() - begin) / len(fusion.consumers)
    results = {}
    for name, scheme in schemes.items():
        if name not in grams:
            results[name] = round_module(
                weights[name].to(dtypes[name]), scheme, "round to nearest: no calibration input"
            )
            continue
        begin = time.perf_counter()
        quantized, clipped = clip_and_round(weights[name], grams[name], scheme, dtypes[name])
        error = relative_output_error(weights[name], dequantize(quantized, torch.float32), grams[name])
        dead = int((grams[name].diagonal() == 0).sum())
        spent = seconds[name] + time.perf_counter() - begin
        results[name] = QuantizedModule(quantized, error, "outputs", spent, None, dead, clipped)
    changed = {
        name: parameter.data
        for name, parameter in layer.named_parameters()
        if parameter is not before[name] and name.removesuffix(".weight") not in schemes
    }
    return results, changed


def scale_inputs(
    layer: nn.Module,
    fusion: Fusion,
    weights: dict[str, torch.Tensor],
    schemes: Mapping[str, Scheme],
    grams: dict[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """One AWQ scale: found, moved in `weights` and in the layer's norm, and the inputs' moments brought along. Left
    alone when a linear concerned keeps its weights: their dtype could not take the scale without rounding."""
    concerned = (*fusion.consumers, *((fusion.source,) if fusion.how == ROWS else ()))
    if not all(name in schemes for name in concerned) or fusion.consumers[0] not in grams:
        return
    gram = grams[fusion.consumers[0]]
    consumers = [Consumer(weights[name], schemes[name]) for name in fusion.consumers]
    activity = fusion.pooled(gram.diagonal()).sqrt()
    scale = search_scale(consumers, gram, activity, fusion.channel, dtypes[fusion.consumers[0]])
    moved = fusion.apply(layer, scale, weights.__getitem__)[fusion.channel]
    scaled = gram / (moved[:, None] * moved[None, :])
    for name in fusion.consumers:
        grams[name] = scaled


def linear(layer: nn.Module, name: str) -> nn.Linear:
    module = layer.get_submodule(name)
    assert isinstance(module, nn.Linear)
    return module


def take_rows(quantized: QuantizedWeight, rows: slice) -> QuantizedWeight:
    zero_point = None if quantized.zero_point is None else quantized.zero_point[rows].contiguous()
    return QuantizedWeight(
        quantized.codes[rows].contiguous(), quantized.scale[rows].contiguous(), zero_point, quantized.scheme
    )
