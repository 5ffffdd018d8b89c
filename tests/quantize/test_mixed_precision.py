"""Bits where they count: the choice of widths and groups, as plain arithmetic."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantize.errors import QuantizeError
from quantize.mixed_precision import ORIGINAL_BITS, Choice, Unit, check_target, choose, mixed_recipe
from quantize.recipe import Recipe

KINDS = ((3, 64), (4, 64), (4, 32), (8, -1), (ORIGINAL_BITS, -1))


def unit(name: str, parameters: int, loss: float, small_groups: bool = False) -> Unit:
    """Rounding errors fall by 4 with every bit; a scale costs an eighth of a bit, small groups twice that for two
    thirds of the loss."""
    losses = {(3, 64): 4 * loss, (4, 64): loss, (4, 32): loss * 2 / 3, (8, -1): loss / 256, (ORIGINAL_BITS, -1): 0.0}
    bits = {(3, 64): 3.125, (4, 64): 4.125, (4, 32): 4.25, (8, -1): 8.125, (ORIGINAL_BITS, -1): 16.0}
    kinds = [kind for kind in KINDS if small_groups or kind != (4, 32)]
    return Unit(
        (f"layers.{name}",), parameters, tuple(Choice(*kind, losses[kind], parameters * bits[kind]) for kind in kinds)
    )


UNITS = (unit("0.q", 100, 1.0), unit("0.up", 300, 1.5), unit("1.q", 100, 0.1), unit("1.up", 300, 0.2))


def average(units, choices):
    return sum(choice.stored_bits for choice in choices) / sum(u.parameters for u in units)


def loss(choices):
    return sum(choice.loss for choice in choices)


def widths(*arguments, **targets):
    return tuple(choice.bits for choice in choose(*arguments, **targets))


def test_what_loses_most_for_its_bytes_gets_them_first():
    assert widths(UNITS, target_bits=4.7) == (8, 4, 4, 4)
    assert widths(UNITS, target_bits=6.2) == (8, 8, 4, 4)
    assert widths(UNITS, target_bits=16) == (ORIGINAL_BITS,) * 4


def test_small_groups_come_before_eight_bits_where_they_gain_more_per_byte():
    units = (unit("0.q", 100, 1.0, True), unit("1.q", 100, 0.2, True))
    assert [(choice.bits, choice.group_size) for choice in choose(units, target_bits=4.26)] == [(4, 32), (4, 32)]
    assert [(choice.bits, choice.group_size) for choice in choose(units, target_bits=4.2)] == [(4, 32), (4, 64)]
    assert [(choice.bits, choice.group_size) for choice in choose(units, target_bits=6.2)] == [(8, -1), (4, 32)]


def test_a_target_loss_takes_as_few_bits_as_it_needs():
    assert widths(UNITS, target_kl=3.0) == (4, 4, 4, 4)
    assert widths(UNITS, target_kl=2.0) == (8, 4, 4, 4)
    assert loss(choose(UNITS, target_kl=0.35)) <= 0.35


def test_three_bits_are_used_only_where_four_do_not_fit():
    assert 3 in widths(UNITS, target_bits=3.8)
    assert 3 not in widths(UNITS, target_bits=4.2)
    with pytest.raises(QuantizeError, match=r"target_bits: 3 is below what 3 bits everywhere cost .* 3\.12"):
        choose(UNITS, target_bits=3.0)


@given(
    st.lists(st.tuples(st.integers(10, 400), st.floats(0, 10)), min_size=1, max_size=5),
    st.floats(3.2, 16),
)
def test_the_budget_is_kept_and_no_choice_within_it_less_one_step_is_better(sizes, target):
    units = [unit(str(number), parameters, kl) for number, (parameters, kl) in enumerate(sizes)]
    chosen = choose(units, target_bits=target)
    assert average(units, chosen) <= target + 1e-9
    weights = sum(u.parameters for u in units)
    # Greedy along convex hulls is optimal for the bits it spends; what it leaves unspent is less than one step.
    spent = average(units, chosen)
    four_fits = average(units, [u.choices[1] for u in units]) <= target
    allowed = [u.choices[1:] if four_fits else u.choices for u in units]
    largest_step = max(choices[-1].stored_bits - choices[0].stored_bits for choices in allowed) / weights
    best = min(
        loss(choices) for choices in product(*allowed) if average(units, choices) <= max(spent, target - largest_step)
    )
    assert loss(chosen) <= best + 1e-9 or spent >= target - largest_step


def test_the_recipe_takes_the_width_of_most_weights_and_overrides_the_others():
    mixture = mixed_recipe(Recipe("gptq"), UNITS, target_bits=4.7)
    assert (mixture.recipe.bits, mixture.recipe.group_size) == (4, 64)
    assert mixture.recipe.to_mapping()["overrides"] == {"layers.0.q": {"bits": 8, "group_size": -1}}
    assert mixture.bits_per_weight == average(UNITS, choose(UNITS, target_bits=4.7))
    assert mixture.kl == pytest.approx(1.0 / 256 + 1.8)
    nearly_all = mixed_recipe(Recipe("gptq"), UNITS, target_bits=9.5).recipe
    assert (nearly_all.bits, nearly_all.group_size) == (8, -1)
    assert nearly_all.override_of("layers.0.q").skip
    with pytest.raises(QuantizeError, match="leaves every linear as it is"):
        mixed_recipe(Recipe("gptq"), UNITS, target_bits=16)


@pytest.mark.parametrize(
    ("fields", "targets", "message"),
    [
        ({}, (5.0, 0.1), "both are given"),
        ({}, (0.0, None), "target_bits: 0 is not above 0"),
        ({}, (16.5, None), "target_bits: 16.5 is not above 0 and at most 16"),
        ({}, (float("nan"), None), "target_bits: nan"),
        ({}, (None, -1.0), "target_kl: -1 is not a positive"),
        ({}, (None, float("inf")), "target_kl: inf"),
        ({"overrides": {"*.q": {"bits": 8}}}, (5.0, None), "overrides: the recipe has some already"),
        ({"method": "int8"}, (5.0, None), "method: int8 has no mixture"),
        ({"method": "external:llmcompressor"}, (5.0, None), "has no mixture"),
        ({"method": "bnb-nf4"}, (5.0, None), "method: bnb-nf4 has no mixture"),
        ({"format": "gptq"}, (5.0, None), "format: gptq stores all modules in one width"),
    ],
)
def test_a_target_that_cannot_be_followed_is_refused_in_one_line(fields, targets, message):
    external = fields.get("method", "").startswith("external")
    with pytest.raises(QuantizeError, match=message) as caught:
        check_target(Recipe.from_mapping({"method": "gptq"} | fields), *targets)
    assert "\n" not in str(caught.value)
    assert not external or "gptq" in str(caught.value)
