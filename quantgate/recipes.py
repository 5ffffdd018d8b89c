"""Recipes from what a user gives: a YAML file, options on the command line, or a variant in a campaign file."""

from pathlib import Path
from typing import Any

import yaml

from quantgate.errors import FrontDoorError
from quantize.method import METHODS
from quantize.mixed_precision import Mixture
from quantize.recipe import Recipe
from tasks.yaml_file import read_yaml_mapping


def recipe_from_options(path: Path | None, options: dict[str, Any]) -> Recipe:
    """A recipe from a YAML file and the options given beside it; an option that was given wins.

    Raises:
        FrontDoorError: the file cannot be read, or neither names a method.
        QuantizeError: a field is wrong; the message names it.
    """
    mapping: dict[str, Any] = {}
    if path is not None:
        _, mapping = read_yaml_mapping(path, FrontDoorError)
    mapping |= {key: value for key, value in options.items() if value is not None}
    if "method" not in mapping:
        raise FrontDoorError(f"no method given: add --method ({', '.join(METHODS)}) or --recipe FILE.yaml")
    return Recipe.from_mapping(mapping, where=str(path) if path else "options")


def recipe_yaml(mixture: Mixture) -> str:
    """The recipe as `--recipe` reads it, without what is a default anyway, below what it is expected to come to."""
    mapping = mixture.recipe.to_mapping()
    usual = Recipe(mixture.recipe.method).to_mapping()
    kept = {key: value for key, value in mapping.items() if key == "method" or value != usual[key]}
    head = f"# predicted: {mixture.bits_per_weight:.3f} bits per weight, KL {mixture.kl:.3g} nats per token\n"
    return head + yaml.safe_dump(kept, sort_keys=False).rstrip()
