"""How many tokens a request has: one number, or a distribution that a seed draws from.

The four forms of a workload file: `128`, `{uniform: [64, 256]}`, `{lognormal: {median: 200, sigma: 0.8, max: 1024}}`
and `{file: lengths.txt}` (one whole number a line, sampled with replacement).
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from eval.errors import EvalError


class Lognormal(BaseModel):
    """exp(Normal(ln median, sigma)), rounded, kept within [min, max]."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median: PositiveFloat
    sigma: Annotated[float, Field(ge=0)]
    min: PositiveInt = 1
    max: PositiveInt

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "Lognormal":
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; swap them")
        return self


class Lengths(BaseModel):
    """Exactly one of the four forms is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fixed: PositiveInt | None = None
    uniform: tuple[PositiveInt, PositiveInt] | None = None
    lognormal: Lognormal | None = None
    file: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _number_is_fixed(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"fixed": value}
        if not isinstance(value, dict):
            raise ValueError("expected a number of tokens, or one of uniform, lognormal, file")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> "Lengths":
        forms = [name for name in ("fixed", "uniform", "lognormal", "file") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError("give exactly one of a number, uniform, lognormal, file")
        if self.uniform is not None and self.uniform[0] > self.uniform[1]:
            raise ValueError(f"uniform: the low end {self.uniform[0]} is above the high end {self.uniform[1]}")
        return self

    def draw(self, rng: np.random.Generator, count: int, folder: Path | None = None) -> list[int]:
        """`count` lengths in tokens, each at least 1.

        Args:
            rng: the seeded source.
            count: how many.
            folder: where a relative `file` is looked up.
        """
        if self.fixed is not None:
            return [self.fixed] * count
        if self.uniform is not None:
            low, high = self.uniform
            return [int(length) for length in rng.integers(low, high, size=count, endpoint=True)]
        if self.lognormal is not None:
            raw = self.lognormal.median * np.exp(self.lognormal.sigma * rng.standard_normal(count))
            return [int(length) for length in np.clip(np.rint(raw), self.lognormal.min, self.lognormal.max)]
        assert self.file is not None
        return [int(length) for length in rng.choice(lengths_in_file((folder or Path()) / self.file), size=count)]


def lengths_in_file(path: Path) -> list[int]:
    """The lengths of a text file, one whole number above 0 a line; blank lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise EvalError(f"{path}: lengths cannot be read ({cause}); check the path") from cause
    lengths = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not line.strip().isdecimal() or int(line) < 1:
            raise EvalError(f"{path}:{number}: {line.strip()!r} is not a whole number above 0; one length a line")
        lengths.append(int(line))
    if not lengths:
        raise EvalError(f"{path}: no lengths in it; write one whole number a line")
    return lengths
