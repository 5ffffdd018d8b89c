"""What every layer, every kind of linear and every linear loses alone when it is rounded to 4 bits.

The loss is the KL divergence of the next token's distribution from the original's, over the full vocabulary, in nats
per token of the calibration text, computed in float32. One walk through the decoder carries the states of all these
models at once: those that differ in a layer leave the original's states there and have states of their own from then
on. So every layer is read once, and what is in memory is one layer and one state per linear.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantize.calibration import calibrate
from quantize.checkpoint import Checkpoint, refuse_nonfinite
from quantize.decoder import Decoder, linears_of, load_module, load_own_tensors, open_decoder, refuse_shared_keys
from quantize.errors import QuantizeError
from quantize.formats.choose import FORMATS
from quantize.formats.compressed_tensors import METHOD
from quantize.gram import InputRecorder
from quantize.layer import round_module
from quantize.mixed_precision import BASE_BITS, ORIGINAL_BITS, Choice, Unit
from quantize.module_names import kind_of
from quantize.progress import Progress, silent
from quantize.recipe import AUTO_GROUP_SIZES, Recipe
from quantize.scheme import PER_CHANNEL, Scheme, dequantize
from quantize.targets import Targets, choose_targets
from quantize.walk import Walk, float32_copy

SAMPLES, SEQUENCE_LENGTH = 4, 128
"""Enough to rank linears: all of them are judged on the same tokens, so that what the text adds cancels out."""

SMALL_GROUP = 32
"""Smaller groups at 4 bits lie between the recipe's own groups and 8 bits, in loss and in bytes."""

HEAD_TOKENS = 256
"""Tokens whose full distributions are in memory at a time."""

LAYERS_SHARE = 600
"""Of 1000 parts of the work, roughly; the rest goes into the head."""

SHAPE_BITS = 128
"""`weight_shape` beside every packed linear."""

States = list[torch.Tensor]
Key = tuple[int | None, str | None]
"""(layer, kind); None: all of them."""


@dataclass(frozen=True)
class Rounding:
    """One way to round a linear: `squared_error` ‖W−Ŵ‖², `stored_bits` in all, scales included."""

    bits: int
    group_size: int
    squared_error: float
    stored_bits: float


@dataclass(frozen=True)
class ModuleLoss:
    """A linear (or one of every expert of a layer, which are one kind). kl in nats per token at 4 bits in the recipe's
    groups. reads: the kind whose input it shares, its own name when none."""

    layer: int
    kind: str
    pattern: str
    kl: float
    parameters: int
    roundings: tuple[Rounding, ...]
    reads: str

    def loss(self, number: int) -> float:
        """What rounding `number` loses in nats per token: the measured loss, by the squared errors."""
        base = next(rounding for rounding in self.roundings if rounding.bits == BASE_BITS).squared_error
        return self.kl * self.roundings[number].squared_error / base if base > 0 else 0.0


@dataclass(frozen=True)
class Sensitivity:
    """`layers` and `kinds` are measured whole, not summed over their modules."""

    modules: tuple[ModuleLoss, ...]
    layers: Mapping[int, float]
    kinds: Mapping[str, float]
    group_size: int
    calibration: Mapping[str, Any]
    seconds: float

    def units(self) -> tuple[Unit, ...]:
        """What can be decided on: the linears of a layer that share an input, and all its experts as one, because
        servers run them as one."""
        together: dict[tuple[int, str], list[ModuleLoss]] = {}
        for module in self.modules:
            experts, star, _ = module.kind.partition("*")
            together.setdefault((module.layer, experts if star else module.reads), []).append(module)
        return tuple(unit_of(members) for members in together.values())


def unit_of(members: list[ModuleLoss]) -> Unit:
    parameters = sum(module.parameters for module in members)
    choices = [
        Choice(
            rounding.bits,
            rounding.group_size,
            sum(module.loss(number) for module in members),
            sum(module.roundings[number].stored_bits for module in members),
        )
        for number, rounding in enumerate(members[0].roundings)
    ]
    original = Choice(ORIGINAL_BITS, PER_CHANNEL, 0.0, float(ORIGINAL_BITS * parameters))
    return Unit(tuple(module.pattern for module in members), parameters, (*choices, original))


def measure_sensitivity(
    source: Path | str,
    recipe: Recipe,
    *,
    calibration: Path | None = None,
    samples: int = SAMPLES,
    sequence_length: int = SEQUENCE_LENGTH,
    device: str | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """The recipe says which linears, in which groups, with or without zero points. Raises QuantizeError as
    `quantize_checkpoint` does."""
    begin = time.perf_counter()
    checkpoint = Checkpoint.open(source, quantized_ok=False)
    decoder = open_decoder(checkpoint)
    refuse_shared_keys(decoder, "sensitivity")
    # Asked now: what a walk puts back on the meta device is tied no more.
    tied = decoder.head_is_tied()
    plain = replace(recipe, bits=BASE_BITS, samples=samples, sequence_length=sequence_length)
    targets = choose_targets(decoder, plain, checkpoint)
    group_sizes = {scheme.group_size for name, scheme in targets.schemes.items() if name.startswith(decoder.prefix)}
    if not group_sizes:
        raise QuantizeError(f"{checkpoint.path}: the recipe leaves no linear in the layers to measure")
    checkpoint.weights_digest(refuse_nonfinite(checkpoint))
    text = calibrate(checkpoint, plain, calibration)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    walk = Walk(decoder, checkpoint, text.token_ids, place)
    found = Losses(walk, decoder, checkpoint, targets, progress or silent)
    found.run(tied)
    return Sensitivity(
        tuple(replace(module, kl=found.kl[module.layer, module.kind]) for module in found.modules),
        {index: found.kl[index, None] for index in range(len(decoder.layers)) if (index, None) in found.kl},
        {kind: kl for (index, kind), kl in found.kl.items() if index is None and kind is not None},
        max(group_sizes),
        text.to_mapping(checkpoint.chat_template_digest()),
        round(time.perf_counter() - begin, 3),
    )


class Losses:
    """The walk with all its variants. `variants` are the states of the models that differ from the original so far."""

    def __init__(
        self, walk: Walk, decoder: Decoder, checkpoint: Checkpoint, targets: Targets, progress: Progress
    ) -> None:
        self.walk, self.decoder, self.checkpoint, self.targets = walk, decoder, checkpoint, targets
        self.tell = progress
        self.original: States = [state.float() for state in walk.states]
        self.probe = walk.probe.float()
        self.variants: dict[Key, States] = {}
        self.modules: list[ModuleLoss] = []
        self.kl: dict[Key, float] = {}

    def run(self, tied: bool) -> None:
        count = len(self.decoder.layers)
        for index in range(count):
            # Every layer adds variants, so the work done grows with the square.
            self.tell(f"layer {index + 1} of {count}", int(LAYERS_SHARE * (index / count) ** 2), 1000)
            self.pass_layer(index)
        with head_in_memory(self.decoder, self.checkpoint, self.walk.device, tied):
            self.kl = divergences(self.walk, self.decoder, self.original, self.variants, self.tell)
        if not all(isfinite(kl) for kl in self.kl.values()):
            raise QuantizeError(f"{self.checkpoint.path}: its outputs on the calibration text are not finite")
        self.tell("done", 1000, 1000)

    def pass_layer(self, index: int) -> None:
        layer = self.decoder.layers[index]
        prefix = self.decoder.layer_prefix(index)
        load_module(self.decoder, layer, prefix, self.checkpoint, self.walk.device)
        schemes = {name.removeprefix(prefix): scheme for name, scheme in self.targets.in_layer(prefix).items()}
        exact = float32_copy(layer)
        shared = self.shared_inputs(index, exact, schemes)
        rounded: dict[str, dict[str, torch.Tensor]] = {}
        for kind, names in by_kind(schemes).items():
            record, weights = round_kind(index, kind, prefix, names, schemes, layer)
            self.modules.append(replace(record, reads=shared.get(kind, kind)))
            rounded[kind] = weights
        everywhere = {kind for which, kind in self.variants if which is None}
        for (which, changed), states in self.variants.items():
            with replaced_weights(exact, rounded.get(changed or "", {}) if which is None else {}):
                self.variants[which, changed] = self.advance(index, exact, states)
        for kind, weights in rounded.items():
            with replaced_weights(exact, weights):
                self.variants[index, kind] = self.advance(index, exact, self.original)
            if kind not in everywhere:
                self.variants[None, kind] = list(self.variants[index, kind])
        if rounded:
            everything = {name: weight for weights in rounded.values() for name, weight in weights.items()}
            with replaced_weights(exact, everything):
                self.variants[index, None] = self.advance(index, exact, self.original)
        self.original = self.advance(index, exact, self.original)
        self.probe = self.walk.run_layer(index, exact, self.probe)
        layer.to("meta")

    def advance(self, index: int, layer: nn.Module, states: States) -> States:
        return [self.walk.run_layer(index, layer, state, batch) for batch, state in enumerate(states)]

    def shared_inputs(self, index: int, layer: nn.Module, schemes: Mapping[str, Scheme]) -> dict[str, str]:
        """For each kind, the first one that reads the same input."""
        recorder = InputRecorder({name: module for name, module in linears_of(layer).items() if name in schemes})
        with recorder.watching():
            self.walk.run_layer(index, layer, self.probe)
        return {kind_of(name): kind_of(leader) for name, leader in recorder.leader.items()}


def by_kind(names: Mapping[str, Scheme]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    return kinds


def round_kind(
    index: int, kind: str, prefix: str, names: list[str], schemes: Mapping[str, Scheme], layer: nn.Module
) -> tuple[ModuleLoss, dict[str, torch.Tensor]]:
    """The record of one kind, its loss still open, and its weights rounded to 4 bits, float32."""
    parameters, weights = 0, {}
    roundings: list[list[Rounding]] = []
    for name in names:
        weight = layer.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        parameters += weight.numel()
        roundings.append([])
        for scheme in schemes_to_try(schemes[name]):
            rounded = round_module(weight.data, scheme, weight.dtype, FORMATS[METHOD])
            approximation = dequantize(rounded.quantized, torch.float32)
            error = (weight.data.float() - approximation).square().sum().item()
            roundings[-1].append(Rounding(scheme.bits, scheme.group_size, error, stored_bits(weight, scheme)))
            if name not in weights and scheme.bits == BASE_BITS:
                weights[name] = approximation
    together = tuple(
        replace(
            same[0],
            squared_error=sum(rounding.squared_error for rounding in same),
            stored_bits=sum(rounding.stored_bits for rounding in same),
        )
        for same in zip(*roundings, strict=True)
    )
    return ModuleLoss(index, kind, prefix + kind, 0.0, parameters, together, kind), weights


def schemes_to_try(scheme: Scheme) -> list[Scheme]:
    """From the fewest bits to the most: 3 and 4 in the scheme's own groups, 4 in small ones, 8 per channel."""
    own = [replace(scheme, bits=bits) for bits in (3, BASE_BITS)]
    small = (
        [replace(scheme, bits=BASE_BITS, group_size=SMALL_GROUP)] if scheme.group_size in AUTO_GROUP_SIZES[:2] else []
    )
    return [*own, *small, replace(scheme, bits=8, group_size=PER_CHANNEL)]


def stored_bits(weight: torch.Tensor, scheme: Scheme) -> float:
    """Bits of a packed linear: codes, scales in the weights' dtype, zero points, and its shape."""
    outputs, inputs = weight.shape
    groups = outputs * (inputs // scheme.group_width(inputs))
    zero_point = 0 if scheme.symmetric else scheme.bits
    return scheme.bits * weight.numel() + groups * (8 * weight.element_size() + zero_point) + SHAPE_BITS


@contextmanager
def replaced_weights(layer: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The layer with other weights in some of its linears, by their names in it."""
    before = {name: layer.get_submodule(name)._parameters["weight"] for name in weights}
    for name, weight in weights.items():
        layer.get_submodule(name)._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    try:
        yield
    finally:
        for name, parameter in before.items():
            layer.get_submodule(name)._parameters["weight"] = parameter


def divergences(
    walk: Walk, decoder: Decoder, original: States, variants: Mapping[Key, States], tell: Progress
) -> dict[Key, float]:
    """KL(original ‖ variant) in nats per token for the last layer's outputs of each."""
    totals = dict.fromkeys(variants, 0.0)
    tokens = sum(state.shape[0] * state.shape[1] for state in original)
    done = 0
    for number, batch in enumerate(original):
        for row in range(batch.shape[0]):
            for start in range(0, batch.shape[1], HEAD_TOKENS):
                piece = (slice(row, row + 1), slice(start, start + HEAD_TOKENS))
                expected = distribution(decoder, walk, batch[piece])
                probability = expected.exp()
                for key, states in variants.items():
                    found = distribution(decoder, walk, states[number][piece])
                    totals[key] += (probability * (expected - found)).sum().item()
                done += expected.shape[0]
                tell("full vocabulary", LAYERS_SHARE + (1000 - LAYERS_SHARE) * done // tokens, 1000)
    # Rounding in float32 can leave a distance of nothing slightly below 0.
    return {key: max(0.0, total / tokens) if isfinite(total) else total for key, total in totals.items()}


def distribution(decoder: Decoder, walk: Walk, state: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the next token [tokens, vocabulary] for outputs of the last layer [1, tokens, hidden]: the
    model's own forward, with layers that only hand that state on. What follows them looks at one position at a time."""

    def hand_on(*_args: Any, **_kwargs: Any) -> Any:
        return (state,) if walk.returns_tuple else state

    try:
        for layer in decoder.layers:
            layer.forward = hand_on
        ids = torch.zeros(state.shape[:2], dtype=torch.int64, device=state.device)
        whole: Any = decoder.model
        with torch.inference_mode():
            logits = whole(input_ids=ids, use_cache=False).logits[0]
    finally:
        for layer in decoder.layers:
            del layer.forward
    return torch.log_softmax(logits.float(), dim=-1)


@contextmanager
def head_in_memory(decoder: Decoder, checkpoint: Checkpoint, device: torch.device, tied: bool) -> Iterator[None]:
    """Everything outside the layers on `device`, in float32, the head among it."""
    head = decoder.model.get_output_embeddings()
    for name, module in decoder.model.named_modules():
        if f"{name}.".startswith(f"{decoder.prefix}.") or (module is head and tied):
            continue
        load_own_tensors(decoder, module, f"{name}." if name else "", checkpoint, device)
        for own, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[own] = nn.Parameter(parameter.float(), requires_grad=False)
        for own, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[own] = buffer.float()
    if tied and head is not None:
        embedding: Any = decoder.model.get_input_embeddings()
        head._parameters["weight"] = embedding._parameters["weight"]
    try:
        yield
    finally:
        whole: nn.Module = decoder.model
        whole.to("meta")
