"""A finished evaluation as it lies on disk: `quality.json`, `samples.parquet`, `batches.parquet` in one folder.

The folder appears whole or not at all. `key` says what the numbers depend on; the same key is the same result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.quality.records import TaskResult
from eval.quality.samples import Sample, read_samples

QUALITY = "quality.json"
SAMPLES = "samples.parquet"
BATCHES = "batches.parquet"


@dataclass(frozen=True)
class QualityResult:
    """`metrics` are flat (`quality.<task>.<metric>`, `.stderr`); `integrity` maps each check to "pass" or
    "fail: why"; `seconds` is the wall time of the evaluation."""

    directory: Path
    key: str
    identity: Mapping[str, Any]
    protocol: Mapping[str, Any]
    tasks: tuple[TaskResult, ...]
    metrics: Mapping[str, float]
    integrity: Mapping[str, str]
    seconds: float

    @classmethod
    def read(cls, directory: Path) -> QualityResult:
        """The result in a folder. Raises `EvalError` where there is none."""
        path = directory / QUALITY
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            tasks = tuple(TaskResult(**task) for task in content.pop("tasks"))
            return cls(directory=directory, tasks=tasks, **content)
        except OSError:
            raise EvalError(f"{path}: no evaluation there; run `quantgate eval` first") from None
        except (ValueError, KeyError, TypeError) as error:
            raise EvalError(f"{path}: not a quality result ({error}); run the evaluation again") from None

    def samples(self) -> list[Sample]:
        return read_samples(self.directory / SAMPLES)

    def to_mapping(self) -> dict[str, Any]:
        """What quality.json holds."""
        return {
            "key": self.key,
            "identity": dict(self.identity),
            "protocol": dict(self.protocol),
            "tasks": [asdict(task) for task in self.tasks],
            "metrics": dict(self.metrics),
            "integrity": dict(self.integrity),
            "seconds": self.seconds,
        }

    def write(self, directory: Path) -> None:
        document = json.dumps(self.to_mapping(), indent=1, sort_keys=True, allow_nan=False)
        (directory / QUALITY).write_text(document + "\n", encoding="utf-8")


def flat_metrics(tasks: Sequence[TaskResult]) -> dict[str, float]:
    """The names under which MLflow gets the results."""
    metrics = {task.metric_name: task.value for task in tasks}
    return metrics | {f"{task.metric_name}.stderr": task.stderr for task in tasks if task.stderr is not None}
