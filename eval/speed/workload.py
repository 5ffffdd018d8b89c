"""What traffic a speed measurement runs: a YAML file, checked, or a ready one of `tasks/workloads` by its name.

`mode` says how requests come: `closed` keeps `concurrency` of them in flight, `open` lets them arrive at `rate` whether
or not the engine keeps up, `trace` replays timestamps of a JSONL file, `sweep` repeats `closed` or `open` over a list.
"""

import difflib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, PrivateAttr, model_validator

import tasks
from eval.errors import EvalError
from eval.settings_file import read_settings
from eval.speed.lengths import Lengths

READY = Path(tasks.__file__).parent / "workloads"

Share = Annotated[float, Field(gt=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SharedPrefix(_Part):
    """`share` of the requests begin with the same `tokens` tokens (a new prefix each repeat)."""

    share: Share
    tokens: PositiveInt


class RequestClass(_Part):
    """A part of the traffic with lengths or a priority of its own; the shares of all classes add up to 1. A lower
    `priority` goes first; where classes differ in it, the engine schedules by it."""

    name: str
    share: Share
    priority: int = 0
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None


class Slo(_Part):
    """What a request must keep to count as goodput, in milliseconds."""

    ttft_ms: PositiveFloat
    tpot_ms: PositiveFloat


class SweepOver(_Part):
    """The list a sweep runs over: one of the two."""

    concurrency: list[PositiveInt] | None = None
    rate: list[PositiveFloat] | None = None

    @model_validator(mode="after")
    def _one_list(self) -> "SweepOver":
        if (self.concurrency is None) == (self.rate is None) or not (self.concurrency or self.rate):
            raise ValueError("give one list that is not empty: concurrency or rate")
        return self


class Workload(_Part):
    """The whole file. Lengths are in tokens, rates in requests per second."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    description: str = ""
    mode: Literal["closed", "open", "sweep", "trace"]
    concurrency: PositiveInt | None = None
    rate: PositiveFloat | None = None
    arrivals: Literal["poisson", "gamma"] = "poisson"
    burstiness: PositiveFloat = 1.0
    sweep: SweepOver | None = None
    trace: Path | None = None
    requests: PositiveInt | None = None
    warmup: Annotated[int, Field(ge=0)] = 0
    repeats: PositiveInt = 4
    seed: int = 0
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    shared_prefix: SharedPrefix | None = None
    classes: tuple[RequestClass, ...] = ()
    slo: Slo | None = None
    _folder: Path = PrivateAttr(default=Path())

    @model_validator(mode="after")
    def _keys_fit_the_mode(self) -> "Workload":
        needed = {"closed": "concurrency", "open": "rate", "sweep": "sweep", "trace": "trace"}
        for mode, key in needed.items():
            given = getattr(self, key) is not None
            if mode == self.mode and not given:
                raise ValueError(f"mode {mode!r} needs the key {key!r}; add it")
            if mode != self.mode and given:
                raise ValueError(f"the key {key!r} belongs to mode {mode!r}, not {self.mode!r}; remove one of them")
        if self.burstiness != 1.0 and self.arrivals != "gamma":
            raise ValueError("the key 'burstiness' needs `arrivals: gamma`; add it")
        if self.mode == "trace":
            return self
        if self.requests is None:
            raise ValueError("the key 'requests' is missing; say how many are measured")
        for key in ("input_tokens", "output_tokens"):
            if getattr(self, key) is None and not (self.classes and all(getattr(part, key) for part in self.classes)):
                raise ValueError(f"the key {key!r} is missing; say how long requests are")
        if self.classes and abs(sum(part.share for part in self.classes) - 1) > 1e-6:
            raise ValueError(f"classes: the shares add up to {sum(part.share for part in self.classes):g}, not 1")
        return self

    @property
    def folder(self) -> Path:
        """Where relative paths of the file start: the folder that `load_workload` found it in."""
        return self._folder

    def points(self) -> list["Workload"]:
        """The single measurements in it: itself, or one closed or open workload per value of a sweep."""
        if self.sweep is None:
            return [self]
        if self.sweep.concurrency:
            return [self._point("closed", "concurrency", value) for value in self.sweep.concurrency]
        return [self._point("open", "rate", value) for value in self.sweep.rate or []]

    def _point(self, mode: str, key: str, value: float) -> "Workload":
        name = f"{self.name}.{key}-{f'{value:g}'.replace('.', '_')}"
        return self.model_copy(update={"mode": mode, key: value, "sweep": None, "name": name})

    def named_files(self) -> dict[str, Path]:
        """The files that the settings point to, by the key that names them."""
        named = {"trace": self.trace}
        for place, part in [("", self), *((f"classes.{part.name}.", part) for part in self.classes)]:
            for key in ("input_tokens", "output_tokens"):
                lengths: Lengths | None = getattr(part, key)
                named[f"{place}{key}.file"] = lengths.file if lengths is not None else None
        return {key: self.folder / path for key, path in named.items() if path is not None}

    def digest(self) -> str:
        """A sha256 over the settings and over the files they name."""
        described = self.model_dump(mode="json", exclude={"description"})
        contents = {key: hashlib.sha256(path.read_bytes()).hexdigest() for key, path in self.named_files().items()}
        return hashlib.sha256(json.dumps([described, contents], sort_keys=True).encode()).hexdigest()


def ready_workloads() -> list[str]:
    """The names of the workloads that ship."""
    return sorted(path.stem for path in READY.glob("*.yaml"))


def load_workload(name_or_path: str | Path) -> Workload:
    """A workload by its ready name or from a YAML file; raises EvalError with one line."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in ready_workloads():
            close = difflib.get_close_matches(str(name_or_path), ready_workloads(), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(ready_workloads())}"
            raise EvalError(f"no workload {str(name_or_path)!r}; {hint} (or give a .yaml file)")
        path = READY / f"{name_or_path}.yaml"
    workload = read_settings(path, Workload, EvalError)
    workload = workload.model_copy(update={"name": workload.name or path.stem})
    workload._folder = path.parent
    for key, file in workload.named_files().items():
        if not file.is_file():
            raise EvalError(f"{path}: {key}: no file {file}; correct the path")
    return workload
