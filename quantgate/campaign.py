"""The campaign file: one baseline, some recipes, one suite, one workload, one policy.

    name: demo
    baseline: smollm2-135m
    calibration: {samples: 64, sequence_length: 512}
    variants:
      int8: {method: int8}
      gptq: {method: gptq, bits: 4, group_size: 64}
      gptq-a8: {method: gptq, bits: 4, group_size: 64, compute: a8}
      kv-int8: {kv_dtype: int8}
    suite: core
    workload: chat
    policy: default

A variant's keys are those of a recipe of `quantgate quantize`, and the numerics of `quantgate eval`, `kv_dtype` and
`compute`; one without a recipe is the baseline's weights with other numerics. `calibration` holds what all recipes
share. Relative paths in the file are relative to the file, save `output`: results go below the working directory, into
runs/NAME unless said.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from eval.errors import EvalError
from eval.settings_file import read_settings
from quantgate.errors import FrontDoorError
from quantgate.numerics import OWN, Numerics
from quantize.errors import QuantizeError
from quantize.recipe import Recipe
from tasks.yaml_file import line_of, read_yaml_mapping

WholeNumber = Annotated[int, Field(strict=True)]
"""`true` is none, though Python counts it as 1."""

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
BASELINE = "baseline"


class SharedCalibration(BaseModel):
    """Calibration settings of every recipe that does not give its own."""

    model_config = ConfigDict(extra="forbid")

    file: Path | None = None
    samples: WholeNumber | None = Field(default=None, ge=1)
    sequence_length: WholeNumber | None = Field(default=None, ge=2)


class Campaign(BaseModel):
    """A checked campaign file."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, StringConstraints(pattern=NAME.pattern)]
    baseline: Annotated[str, StringConstraints(min_length=1)]
    variants: dict[str, dict[str, Any]] = Field(min_length=1)
    calibration: SharedCalibration = SharedCalibration()
    suite: str = "core"
    data_dir: Path | None = None
    limit: WholeNumber | None = Field(default=None, ge=1)
    workload: str = "chat"
    repeats: WholeNumber | None = Field(default=None, ge=1)
    policy: str = "default"
    output: Path | None = None

    def folder(self) -> Path:
        """Where the campaign's results go."""
        return self.output if self.output is not None else Path("runs") / self.name

    def recipe(self, variant: str) -> Recipe | None:
        """A variant's recipe, with the shared calibration settings where it gives none of its own; None: the variant is
        the baseline's weights."""
        numerics = self.numerics(variant)
        own = {key: value for key, value in self.variants[variant].items() if key not in asdict(numerics)}
        if not own and numerics != OWN:
            return None
        shared = self.calibration.model_dump(include={"samples", "sequence_length"}, exclude_none=True)
        return Recipe.from_mapping(shared | own, where="recipe")

    def numerics(self, variant: str) -> Numerics:
        """What the variant has beside its weights; the baseline has its model's own."""
        return Numerics.of_mapping(self.variants.get(variant, {}))


def load_campaign(path: Path) -> Campaign:
    """A campaign file, checked whole: its recipes too, so that a wrong key in the last one fails before the first runs.

    Raises:
        FrontDoorError: one line with the file, the line and the fix.
    """
    campaign = read_settings(path, Campaign, FrontDoorError)
    tree, _ = read_yaml_mapping(path, FrontDoorError)
    for name in campaign.variants:
        line = line_of(tree, ("variants", name))
        if not NAME.fullmatch(name) or name == BASELINE:
            raise FrontDoorError(
                f"{path}:{line}: variant {name!r}: a name is letters, digits, '.', '_' or '-', and not {BASELINE!r}"
            )
        try:
            recipe, compute = campaign.recipe(name), campaign.numerics(name).compute
        except (QuantizeError, EvalError) as error:
            raise FrontDoorError(f"{path}:{line}: variants.{name}: {error}") from None
        if recipe is None and campaign.numerics(name) == Numerics(compute="a16"):
            raise FrontDoorError(f"{path}:{line}: variants.{name}: compute a16 of its own weights is the baseline")
        if recipe is not None and recipe.activations is not None and compute == "a16":
            said = f"activations: {recipe.activations} is compute a8; leave out either it or compute a16"
            raise FrontDoorError(f"{path}:{line}: variants.{name}: {said}")
        if recipe is not None and recipe.plan.is_bitsandbytes and compute == "a8":
            said = f"{recipe.method} rounds activations as its library does; leave out compute a8"
            raise FrontDoorError(f"{path}:{line}: variants.{name}: {said}")
    base = path.parent
    shared = campaign.calibration
    if campaign.data_dir is not None and not (base / campaign.data_dir).is_dir():
        line = line_of(tree, ("data_dir",))
        raise FrontDoorError(f"{path}:{line}: data_dir: no folder {base / campaign.data_dir}; correct the path")
    if shared.file is not None and not (base / shared.file).is_file():
        line = line_of(tree, ("calibration", "file"))
        raise FrontDoorError(f"{path}:{line}: calibration.file: no file {base / shared.file}; correct the path")
    return campaign.model_copy(
        update={
            "baseline": _beside(base, campaign.baseline),
            "suite": _beside(base, campaign.suite),
            "workload": _beside(base, campaign.workload),
            "policy": _beside(base, campaign.policy),
            "data_dir": base / campaign.data_dir if campaign.data_dir else None,
            "calibration": shared.model_copy(update={"file": base / shared.file if shared.file else None}),
        }
    )


def _beside(base: Path, reference: str) -> str:
    """A reference as seen from the working directory. What lies beside the campaign file wins over a built-in name, but
    a folder only where it is a checkpoint."""
    beside = base / reference
    return str(beside) if beside.is_file() or (beside / "config.json").is_file() else reference
