"""Which linears get how many bits: the recipe that loses least for its bytes, from what each loses alone.

The loss is the KL divergence of the next token's distribution. Near the original weights it is quadratic in what is
added to them, KL ≈ ½ δᵀFδ with F the Fisher information (the gradient vanishes there, since KL is 0 at its minimum).
Rounding errors of different weights are nearly uncorrelated and of mean zero, which leaves ½ Σ F_ii E[δ_i²]: losses of
different linears add up, and within one linear the loss grows with the squared rounding error. So one measured loss at
4 bits gives that of any other way b to store it: KL_b = KL_4 ‖W − Ŵ_b‖² / ‖W − Ŵ_4‖².

Linears that read the same input get the same bits, because servers fuse them into one (q, k and v; gate and up), and so
do all experts of a layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from quantize.errors import QuantizeError
from quantize.method import METHODS
from quantize.recipe import Override, Recipe

BASE_BITS = 4
ORIGINAL_BITS = 16
"""The width that stands for leaving a linear as it is, whatever the checkpoint's dtype is."""

TARGET_BITS = 5.0
"""Where nothing was asked for."""


@dataclass(frozen=True)
class Choice:
    """One way to store a unit: `loss` in nats per token, `stored_bits` in all, scales included."""

    bits: int
    group_size: int
    loss: float
    stored_bits: float


@dataclass(frozen=True)
class Unit:
    """Linears that are decided together. `patterns` are globs over full module names; `choices` are the same ways
    in the same order for every unit, from the fewest bits to leaving it as it is."""

    patterns: tuple[str, ...]
    parameters: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Step:
    """A unit from one choice to a larger one."""

    unit: int
    before: Choice
    after: Choice

    @property
    def gain(self) -> float:
        return self.before.loss - self.after.loss

    @property
    def cost(self) -> float:
        return self.after.stored_bits - self.before.stored_bits


def choose(
    units: Sequence[Unit], target_bits: float | None = None, target_kl: float | None = None
) -> tuple[Choice, ...]:
    """One choice per unit, by the greatest gain per bit first: along each unit's convex hull of loss against bits,
    which is optimal but for the last step. target_bits: the most bits per weight on average, linears left alone counted
    at what they have. target_kl: the most nats per token in all, for as few bits as possible. Three bits are only used
    where the target cannot be met with four everywhere, because few servers take them.

    Raises QuantizeError when the target cannot be met."""
    weights = sum(unit.parameters for unit in units)
    first = next(index for index, choice in enumerate(units[0].choices) if choice.bits == BASE_BITS)
    budget = float("inf")
    if target_bits is not None:
        budget = target_bits * weights
        least = sum(unit.choices[0].stored_bits for unit in units)
        if budget < least:
            raise QuantizeError(
                f"target_bits: {target_bits:g} is below what {units[0].choices[0].bits} bits everywhere cost with "
                f"their scales, {least / weights:.2f}"
            )
        if sum(unit.choices[first].stored_bits for unit in units) > budget:
            first = 0
    chosen = [unit.choices[first] for unit in units]
    spent = sum(choice.stored_bits for choice in chosen)
    loss = sum(choice.loss for choice in chosen)
    steps = [step for number, unit in enumerate(units) for step in hull_steps(number, unit.choices[first:])]
    for step in sorted(steps, key=lambda step: -step.gain / step.cost):
        if target_kl is not None and loss <= target_kl:
            break
        # A unit whose earlier step did not fit has not arrived at where this one starts.
        if spent + step.cost > budget or chosen[step.unit] is not step.before:
            continue
        chosen[step.unit] = step.after
        spent += step.cost
        loss -= step.gain
    return tuple(chosen)


def hull_steps(unit: int, choices: Sequence[Choice]) -> Iterator[Step]:
    """The steps along the lower convex hull of loss against bits, from the first choice on."""
    corners: list[Choice] = []
    for choice in choices:
        while len(corners) > 1 and slope(corners[-2], corners[-1]) <= slope(corners[-1], choice):
            corners.pop()
        corners.append(choice)
    for before, after in pairwise(corners):
        if after.loss < before.loss:
            yield Step(unit, before, after)


def slope(narrow: Choice, wide: Choice) -> float:
    """Nats gained per bit."""
    return (narrow.loss - wide.loss) / (wide.stored_bits - narrow.stored_bits)


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
    recipe: Recipe, units: Sequence[Unit], target_bits: float | None = None, target_kl: float | None = None
) -> Mixture:
    """The recipe for a target; without any, for TARGET_BITS. Its own width and groups are those that most weights have,
    the others are overrides."""
    if target_bits is None and target_kl is None:
        target_bits = TARGET_BITS
    chosen = list(zip(units, choose(units, target_bits, target_kl), strict=True))
    if all(choice.bits == ORIGINAL_BITS for _, choice in chosen):
        raise QuantizeError("target: it leaves every linear as it is; ask for fewer bits or a larger loss")
    parameters: dict[tuple[int, int], int] = {}
    for unit, choice in chosen:
        if choice.bits in recipe.plan.bits:
            kind = (choice.bits, choice.group_size)
            parameters[kind] = parameters.get(kind, 0) + unit.parameters
    base = next(choice for choice in units[0].choices if choice.bits == BASE_BITS)
    bits, group_size = max(parameters, key=lambda kind: parameters[kind], default=(base.bits, base.group_size))
    overrides = tuple(
        Override(pattern, skip=True)
        if choice.bits == ORIGINAL_BITS
        else Override(pattern, bits=choice.bits, group_size=choice.group_size)
        for unit, choice in chosen
        if (choice.bits, choice.group_size) != (bits, group_size)
        for pattern in unit.patterns
    )
    return Mixture(
        replace(recipe, bits=bits, group_size=group_size, overrides=overrides),
        sum(choice.stored_bits for _, choice in chosen) / sum(unit.parameters for unit in units),
        sum(choice.loss for _, choice in chosen),
    )
