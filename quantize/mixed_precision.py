"""Which linears get how many bits: the recipe that loses least for its bytes, from what each loses alone.

The loss is the KL divergence of the next token's distribution. Near the original weights it is quadratic in what is
added to them, KL ≈ ½ δᵀFδ with F the Fisher information (the gradient vanishes there, since KL is 0 at its minimum).
Rounding errors of different weights are nearly uncorrelated and of mean zero, which leaves ½ Σ F_ii E[δ_i²]: losses of
different linears add up, and within one linear the loss grows with the squared rounding error. So one measured loss at
4 bits gives that at any other width b: KL_b = KL_4 ‖W − Ŵ_b‖² / ‖W − Ŵ_4‖².

Linears that read the same input get the same bits, because servers fuse them into one (q, k and v; gate and up), and so
do all experts of a layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from quantize.errors import QuantizeError
from quantize.method import METHODS
from quantize.recipe import Override, Recipe
from quantize.scheme import PER_CHANNEL

BASE_BITS = 4
ORIGINAL_BITS = 16
"""The width that stands for leaving a linear as it is, whatever the checkpoint's dtype is."""

TARGET_BITS = 5.0
"""Where nothing was asked for: about a fifth of the weights at 8 bits, the rest at 4."""


@dataclass(frozen=True)
class Unit:
    """Linears that are decided together. `patterns` are globs over full module names; `loss` (nats per token) and
    `bits` (in all, scales included) by width, ORIGINAL_BITS among them."""

    patterns: tuple[str, ...]
    parameters: int
    loss: Mapping[int, float]
    bits: Mapping[int, float]


@dataclass(frozen=True)
class Step:
    """A unit from one width to a larger one, worth `gain` nats for `cost` bits."""

    unit: int
    width: int
    gain: float
    cost: float


def choose_widths(
    units: Sequence[Unit], target_bits: float | None = None, target_kl: float | None = None
) -> tuple[int, ...]:
    """One width per unit, by the greatest gain per bit first: along each unit's convex hull of loss against bits, which
    is optimal but for the last step. target_bits: the most bits per weight on average, linears left alone counted at
    what they have. target_kl: the most nats per token in all, for as few bits as possible. Three bits are only used
    where the target cannot be met with four everywhere, because few servers take them.

    Raises QuantizeError when the target cannot be met."""
    weights = sum(unit.parameters for unit in units)
    widths = sorted(units[0].loss)
    if target_bits is None:
        allowed = [width for width in widths if width >= BASE_BITS]
        budget = float("inf")
    else:
        budget = target_bits * weights
        least = sum(unit.bits[widths[0]] for unit in units)
        if budget < least:
            raise QuantizeError(
                f"target_bits: {target_bits:g} is below what {widths[0]} bits everywhere cost with their scales, "
                f"{least / weights:.2f}"
            )
        fits = sum(unit.bits[BASE_BITS] for unit in units) <= budget
        allowed = [width for width in widths if width >= BASE_BITS or not fits]
    chosen = [allowed[0]] * len(units)
    spent = sum(unit.bits[allowed[0]] for unit in units)
    loss = sum(unit.loss[allowed[0]] for unit in units)
    for step in sorted(hull_steps(units, allowed), key=lambda step: -step.gain / step.cost):
        if target_kl is not None and loss <= target_kl:
            break
        # A unit whose earlier step did not fit has not arrived at where this one starts.
        if spent + step.cost > budget or not reached(units[step.unit], allowed, chosen[step.unit], step.width):
            continue
        chosen[step.unit] = step.width
        spent += step.cost
        loss -= step.gain
    return tuple(chosen)


def hull_steps(units: Sequence[Unit], widths: Sequence[int]) -> Iterable[Step]:
    for number, unit in enumerate(units):
        corners = hull(unit, widths)
        for narrow, wide in pairwise(corners):
            gain, cost = unit.loss[narrow] - unit.loss[wide], unit.bits[wide] - unit.bits[narrow]
            if gain > 0:
                yield Step(number, wide, gain, cost)


def hull(unit: Unit, widths: Sequence[int]) -> list[int]:
    """The widths on the lower convex hull of loss against bits, from the first of `widths` on."""
    corners: list[int] = []
    for width in widths:
        while len(corners) > 1 and slope(unit, corners[-2], corners[-1]) <= slope(unit, corners[-1], width):
            corners.pop()
        corners.append(width)
    return corners


def slope(unit: Unit, narrow: int, wide: int) -> float:
    """Nats gained per bit."""
    return (unit.loss[narrow] - unit.loss[wide]) / (unit.bits[wide] - unit.bits[narrow])


def reached(unit: Unit, widths: Sequence[int], now: int, then: int) -> bool:
    corners = hull(unit, widths)
    return corners.index(now) + 1 == corners.index(then)


def check_target(recipe: Recipe, target_bits: float | None, target_kl: float | None) -> None:
    """Raises QuantizeError, before anything is measured, for a target or a recipe that no mixture can follow."""
    if target_bits is not None and target_kl is not None:
        raise QuantizeError("target_bits and target_kl: both are given; keep one of them")
    if target_bits is not None and not 0 < target_bits <= ORIGINAL_BITS:
        raise QuantizeError(f"target_bits: {target_bits:g} is not above 0 and at most {ORIGINAL_BITS}")
    if target_kl is not None and not 0 < target_kl < float("inf"):
        raise QuantizeError(f"target_kl: {target_kl:g} is not a positive number of nats per token")
    if recipe.overrides:
        raise QuantizeError("overrides: the recipe has some already, and auto writes them itself; take them out")
    if recipe.method not in METHODS or BASE_BITS not in recipe.plan.bits:
        raise QuantizeError(f"method: {recipe.method} has no mixture of 4 and 8 bits; use gptq, int4, awq or awq+gptq")
    if recipe.format != "compressed-tensors":
        raise QuantizeError(f"format: {recipe.format} stores all modules in one width; auto needs compressed-tensors")


@dataclass(frozen=True)
class Mixture:
    """A recipe and what it is expected to come to: bits per weight over all linears with their scales, those that keep
    their weights included, and the loss in nats per token after rounding to nearest."""

    recipe: Recipe
    bits_per_weight: float
    kl: float


def mixed_recipe(
    recipe: Recipe,
    units: Sequence[Unit],
    group_size: int,
    target_bits: float | None = None,
    target_kl: float | None = None,
) -> Mixture:
    """The recipe for a target; without any, for TARGET_BITS. Its own width is the one that most weights have, the
    others are overrides."""
    if target_bits is None and target_kl is None:
        target_bits = TARGET_BITS
    widths = choose_widths(units, target_bits, target_kl)
    parameters: dict[int, int] = {}
    for unit, width in zip(units, widths, strict=True):
        if width in recipe.plan.bits:
            parameters[width] = parameters.get(width, 0) + unit.parameters
    if all(width == ORIGINAL_BITS for width in widths):
        raise QuantizeError("target: it leaves every linear as it is; ask for fewer bits or a larger loss")
    base = max(parameters, key=lambda width: parameters[width], default=BASE_BITS)
    overrides = tuple(
        Override(pattern, skip=True)
        if width == ORIGINAL_BITS
        else Override(pattern, bits=width, group_size=group_size_of(width, group_size))
        for unit, width in zip(units, widths, strict=True)
        if width != base
        for pattern in unit.patterns
    )
    chosen = list(zip(units, widths, strict=True))
    return Mixture(
        replace(recipe, bits=base, group_size=group_size_of(base, group_size), overrides=overrides),
        sum(unit.bits[width] for unit, width in chosen) / sum(unit.parameters for unit in units),
        sum(unit.loss[width] for unit, width in chosen),
    )


def group_size_of(width: int, group_size: int) -> int:
    """Eight bits need no groups."""
    return PER_CHANNEL if width == 8 else group_size
