"""Recipes: what they accept, what they say to a mistake, and that they survive the way through a file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantize.errors import QuantizeError
from quantize.recipe import Override, Recipe


def test_defaults_follow_the_method():
    assert Recipe("int8").scheme_of("x", 64).group_size == -1
    assert Recipe("int8").bits == 8
    assert Recipe("gptq").scheme_of("x", 64).group_size == 64
    assert Recipe("gptq", bits=8).scheme_of("x", 64).group_size == -1
    assert Recipe("int4", group_size=-1).scheme_of("x", 64).group_size == -1


overrides = st.dictionaries(
    st.sampled_from(["*q_proj", "*.mlp.*", "model.layers.0.*"]),
    st.fixed_dictionaries(
        {},
        optional={
            "bits": st.sampled_from([3, 4, 8]),
            "group_size": st.sampled_from([-1, 32, 64]),
            "symmetric": st.booleans(),
            "skip": st.booleans(),
        },
    ),
)


@given(
    st.sampled_from(["int8", "int4", "awq", "gptq"]),
    st.sampled_from([None, -1, 32, 128]),
    st.sampled_from([None, True, False]),
    overrides,
    st.integers(1, 512),
)
def test_a_recipe_survives_the_way_through_a_mapping(method, group_size, symmetric, overrides, samples):
    recipe = Recipe.from_mapping(
        {
            "method": method,
            "group_size": group_size,
            "symmetric": symmetric,
            "overrides": overrides,
            "samples": samples,
            "ignore": ["lm_head", "*.o_proj"],
        }
    )
    again = Recipe.from_mapping(recipe.to_mapping())
    assert again == recipe


def test_the_order_of_overrides_counts():
    first = Recipe.from_mapping({"method": "int4", "overrides": {"a*": {"bits": 8}, "*": {"skip": True}}})
    second = Recipe.from_mapping({"method": "int4", "overrides": {"*": {"skip": True}, "a*": {"bits": 8}}})
    assert list(first.to_mapping()["overrides"]) != list(second.to_mapping()["overrides"])
    assert not first.skips("abc")
    assert second.skips("abc")


def test_the_first_matching_override_wins_and_leaves_the_rest_alone():
    recipe = Recipe("int4", symmetric=True, overrides=(Override("*down*", bits=8), Override("*", symmetric=False)))
    assert recipe.scheme_of("mlp.down_proj", 64).bits == 8
    assert recipe.scheme_of("mlp.down_proj", 64).symmetric
    assert recipe.scheme_of("mlp.down_proj", 64).group_size == -1
    assert not recipe.scheme_of("mlp.up_proj", 64).symmetric


@pytest.mark.parametrize(
    ("mapping", "named"),
    [
        ({}, "method: missing"),
        ({"method": "magic"}, "method: 'magic' is unknown; one of int8, int4"),
        ({"method": "gtpq"}, "method: 'gtpq' is unknown; did you mean gptq\\? One of int8"),
        ({"method": "external:llmcompresor:gptq"}, "did you mean external:llmcompressor:gptq\\?"),
        ({"method": "int8", "bits": 4}, "bits: int8 takes 8"),
        ({"method": "gptq", "bits": 5}, "bits: gptq takes 4 or 3 or 8"),
        ({"method": "gptq", "bits": "4"}, "bits:"),
        ({"method": "gptq", "bits": True}, "bits:"),
        ({"method": "gptq", "group_size": 0}, "group_size: 0"),
        ({"method": "gptq", "group_size": 64.0}, "group_size:"),
        ({"method": "gptq", "symmetric": "yes"}, "symmetric:"),
        ({"method": "int4", "activations": "int8"}, "activations:"),
        ({"method": "int8", "activations": "fp8"}, "activations:"),
        ({"method": "int8", "activations": "int8", "group_size": 64}, "group_size:"),
        ({"method": "int8", "activations": "int8", "symmetric": False}, "activations:"),
        ({"method": "gptq", "samples": 0}, "samples:"),
        ({"method": "awq", "seed": 2**64}, "seed: 18446744073709551616 is above"),
        ({"method": "gptq", "sequence_length": 1}, "sequence_length:"),
        ({"method": "gptq", "seed": -1}, "seed:"),
        ({"method": "gptq", "damp": 0}, "damp:"),
        ({"method": "gptq", "damp": float("nan")}, "damp:"),
        ({"method": "gptq", "damp": "much"}, "damp:"),
        ({"method": "gptq", "format": "gguf"}, "format:"),
        ({"method": "gptq", "format": ["gptq"]}, "format:"),
        ({"method": "gptq", "ignore": "lm_head"}, "ignore:"),
        ({"method": "gptq", "overrides": ["a"]}, "overrides:"),
        ({"method": "gptq", "overrides": {"a": {"bit": 4}}}, "overrides: a: bit:"),
        ({"method": "gptq", "overrides": {"a": {"bits": 7}}}, "overrides: a: bits:"),
        ({"method": "gptq", "overrides": {"a": None}}, "overrides: a:"),
        ({"method": "gptq", "gruop_size": 4}, "gruop_size: no such field"),
        ({"method": ["gptq"]}, "method:"),
        ({"method": "gptq", "token_importance": "length"}, "token_importance: 'length' is neither null nor rarity"),
        ({"method": "awq", "token_importance": "rarity"}, "token_importance: only gptq"),
        ("gptq", "mapping"),
    ],
)
def test_a_mistake_is_named_with_file_and_field_in_one_line(mapping, named):
    with pytest.raises(QuantizeError, match=named) as caught:
        Recipe.from_mapping(mapping, where="recipe.yaml")
    assert str(caught.value).startswith("recipe.yaml: ")
    assert "\n" not in str(caught.value)
