"""Where a per-channel scale can be moved from one module of a layer into another without changing what the layer
computes.

For linears C that read a tensor X, X·diag(1/s) and C·diag(s) cancel. The 1/s has to go somewhere: into the norm or the
linear that made X. Candidates are taken from the layer's structure (what has the right width and runs before C), and
each is *proved* on the layer itself: powers of two are moved, which is exact in floating point up to cancellation, and
the layer's float32 output must stay. So a residual that reads X as well, a gate behind a non-linearity, or a norm with
an unusual weight is found out by the result and not by the model's name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

TOLERANCE = 1e-4
"""Largest allowed change of the layer's output, relative to its largest value, in float32."""

GAIN = "gain"
GAIN_PLUS_ONE = "gain plus one"
ROWS = "rows"


@dataclass(frozen=True)
class Fusion:
    """`consumers` are linears that read one tensor; `source` can take the inverse scale. how: GAIN (a norm multiplies
    by its weight), GAIN_PLUS_ONE (by 1 + weight, as Gemma's) or ROWS (the source is a linear, its output rows are
    scaled). channel [K] gives the source's channel behind each input of the consumers; grouped-query attention repeats
    them."""

    source: str
    how: str
    consumers: tuple[str, ...]
    channel: torch.Tensor

    def pooled(self, per_input: torch.Tensor) -> torch.Tensor:
        """The mean of `per_input` [K] over the inputs that share a source channel, one value per channel [C]."""
        channels = int(self.channel.max()) + 1
        total = torch.zeros(channels, dtype=per_input.dtype, device=per_input.device)
        total.index_add_(0, self.channel, per_input)
        return total / torch.bincount(self.channel, minlength=channels)

    def apply(self, layer: nn.Module, scale: torch.Tensor, widen: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Divides the source by `scale` [C] and multiplies the consumers' columns; `widen(name)` gives the float32
        weight to work on, in place. Returns the scale that was really moved, [C]: a norm's weight is stored in its own
        dtype, so what is moved is the ratio of its stored values, and nothing is lost to rounding. A zero weight moves
        nothing."""
        source = layer.get_submodule(self.source)
        if self.how == ROWS:
            moved = scale
            widen(self.source).div_(scale[:, None])
        else:
            offset = 1.0 if self.how == GAIN_PLUS_ONE else 0.0
            weight = weight_of(source)
            before = weight.float() + offset
            stored = (before / scale - offset).to(weight.dtype)
            after = stored.float() + offset
            movable = (before != 0) & (after != 0) & torch.isfinite(after)
            moved = torch.where(movable, before / torch.where(movable, after, 1.0), 1.0)
            source.weight = nn.Parameter(torch.where(movable, stored, weight), requires_grad=False)
        bias = getattr(source, "bias", None)
        if bias is not None:
            source.bias = nn.Parameter((bias.float() / moved).to(bias.dtype), requires_grad=False)
        for name in self.consumers:
            widen(name).mul_(moved[self.channel][None, :])
        return moved


def find_fusions(
    layer: nn.Module, run: Callable[[nn.Module], torch.Tensor], leaders: dict[str, str], seed: int
) -> tuple[Fusion, ...]:
    """All proved fusions of a float32 `layer`, in the order in which their consumers run. `run` computes the layer's
    output on some states; `leaders` maps each linear to the first one with the same input."""
    order = execution_order(layer, run)
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    reference = run(layer)
    fusions = []
    for leader in [name for name in order if leaders.get(name) == name]:
        consumers = tuple(name for name in order if leaders.get(name) == leader)
        before = order[: order.index(leader)]
        for candidate in reversed(list(candidates(layer, linears, consumers, before))):
            if is_exact(layer, candidate, run, reference, seed):
                fusions.append(candidate)
                break
    return tuple(fusions)


def candidates(
    layer: nn.Module, linears: dict[str, nn.Linear], consumers: tuple[str, ...], before: list[str]
) -> list[Fusion]:
    """Modules that run before the consumers and whose channels fit their inputs, the nearest last."""
    inputs = linears[consumers[0]].in_features
    device = linears[consumers[0]].weight.device
    found = []
    for name in before:
        module = layer.get_submodule(name)
        if name in linears:
            channels = linears[name].out_features
            if channels == inputs:
                found.append(Fusion(name, ROWS, consumers, torch.arange(inputs, device=device)))
            elif inputs % channels == 0:
                found.extend(
                    Fusion(name, ROWS, consumers, channel.to(device))
                    for channel in repeated_channels(layer, inputs, channels)
                )
        elif module.weight.shape == (inputs,):
            identity = torch.arange(inputs, device=device)
            found.extend(Fusion(name, how, consumers, identity) for how in (GAIN_PLUS_ONE, GAIN))
    return found


def repeated_channels(layer: nn.Module, inputs: int, channels: int) -> list[torch.Tensor]:
    """Grouped-query attention: each key-value head's channels serve inputs / channels query heads in a row."""
    heads = [getattr(module, "head_dim", None) for module in layer.modules()]
    widths = {width for width in heads if isinstance(width, int)}
    query = torch.arange(inputs)
    repeat = inputs // channels
    return [query // (repeat * width) * width + query % width for width in sorted(widths) if channels % width == 0]


def execution_order(layer: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> list[str]:
    """Norms and linears by name, as they run."""
    order: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda _module, _args, name=name: order.append(name))
        for name, module in layer.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.dim() <= 2
    ]
    try:
        run(layer)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(order))


def is_exact(
    layer: nn.Module, fusion: Fusion, run: Callable[[nn.Module], torch.Tensor], reference: torch.Tensor, seed: int
) -> bool:
    """Whether the layer's output survives the move of random powers of two. The layer is left as it was."""
    channels = int(fusion.channel.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-2, 3, (channels,), generator=generator).float()).to(reference.device)
    touched = [layer.get_submodule(name) for name in (fusion.source, *fusion.consumers)]
    saved = [dict(module._parameters) for module in touched]
    try:
        for module in touched:
            module.weight = nn.Parameter(weight_of(module).detach().clone(), requires_grad=False)
        fusion.apply(layer, scale, lambda name: weight_of(layer.get_submodule(name)).data)
        change = (run(layer) - reference).abs().max()
        return bool(change <= TOLERANCE * reference.abs().max())
    finally:
        for module, parameters in zip(touched, saved, strict=True):
            module._parameters.update(parameters)


def weight_of(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight
