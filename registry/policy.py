"""A policy: the limits that a candidate must keep to replace its baseline.

Rules are globs over flat metric names (`quality.piqa.acc`, `speed.chat.ttft_ms.p95`), tried from the top: the first
rule that matches a metric owns it, so special cases stand above general ones. A policy only states limits; what was
measured, and with which interval, meets it in registry.verdict.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eval.settings_file import read_settings
from registry.errors import RegistryError

POLICIES = Path(__file__).parent / "policies"
LIMITS = ("margin", "max_ratio", "min_ratio", "max", "min")

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Rule(BaseModel):
    """Limits for every metric that `metric` (a glob; `*` also spans dots) matches.

    margin: the candidate may be worse by at most this much, absolute (0.02 = two points of accuracy).
    max_ratio, min_ratio: candidate / baseline. max, min: the candidate's own value, whatever the baseline's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(min_length=1)
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    max_ratio: Positive | None = None
    min_ratio: Positive | None = None
    max: Finite | None = None
    min: Finite | None = None
    critical: bool = True
    group: str | None = None

    @model_validator(mode="after")
    def _has_a_limit(self) -> Rule:
        if not self.limits():
            raise ValueError(f"rule for '{self.metric}' states no limit; give it one of {', '.join(LIMITS)}")
        return self

    def limits(self) -> list[tuple[str, float]]:
        """(kind, limit) of each limit stated, in the order of LIMITS."""
        return [(kind, getattr(self, kind)) for kind in LIMITS if getattr(self, kind) is not None]

    def matches(self, metric: str) -> bool:
        return fnmatchcase(metric, self.metric)


class Group(BaseModel):
    """Checks that decide together: all of them, any of them, or at least a number of them must pass."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    need: Literal["all", "any"] | Annotated[int, Field(ge=1)] = "all"
    critical: bool = True

    def needed(self, size: int) -> int:
        """How many of `size` checks must pass."""
        if self.need == "all":
            return size
        return 1 if self.need == "any" else min(int(self.need), size)


class Policy(BaseModel):
    """All rules, the confidence of the intervals they are held against, and the groups."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "policy"
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]
    groups: dict[str, Group] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _groups_are_known(self) -> Policy:
        for rule in self.rules:
            if rule.group is not None and rule.group not in self.groups:
                raise ValueError(f"rule for '{rule.metric}' names group '{rule.group}', which is not under 'groups'")
        for group in self.groups:
            if all(rule.group != group for rule in self.rules):
                raise ValueError(f"group '{group}' has no rule; name it in a rule or remove it")
        return self

    def owner(self, metric: str) -> Rule | None:
        """The first rule that matches `metric`."""
        return next((rule for rule in self.rules if rule.matches(metric)), None)

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON, without the limits that are not stated."""
        mapping: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        return mapping


def load_policy(name_or_path: str | Path = "default") -> Policy:
    """A shipped policy by its name, or any YAML file by its path."""
    path = Path(name_or_path)
    if path.is_file():
        return read_settings(path, Policy, RegistryError)
    shipped = {p.stem: p for p in sorted(POLICIES.glob("*.yaml"))}
    if str(name_or_path) in shipped:
        return read_settings(shipped[str(name_or_path)], Policy, RegistryError)
    raise RegistryError(f"{name_or_path}: no such policy file, and none of the shipped ones ({', '.join(shipped)})")
