"""A speed result's folder: speed.json and the evidence behind it, one Parquet file per kind of record.

`requests` and `steps` are the engine's own records of every block, warm-up included (its request ids say `warmup`);
`resources` is what the parent saw from outside. The column `variant` tells the sides apart.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from eval.errors import EvalError
from eval.speed.validity import doubts_of

SPEED_FILE = "speed.json"

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()

SCHEMAS = {
    "requests": pa.schema(
        [
            ("request_id", _TEXT),
            ("generation_id", _TEXT),
            ("route_id", _TEXT),
            ("engine_version", _TEXT),
            ("trace_id", _TEXT),
            ("variant", _TEXT),
            ("input_tokens", _INT),
            ("output_tokens", _INT),
            ("sequence_length", _INT),
            ("queue_ms", _FLOAT),
            ("prefill_ms", _FLOAT),
            ("decode_ms", _FLOAT),
            ("ttft_ms", _FLOAT),
            ("tpot_ms", _FLOAT),
            ("e2e_ms", _FLOAT),
            ("prompt_cache_hit", _INT),
            ("priority_class", _INT),
            ("preemptions", _INT),
            ("speculative_accept_rate", _FLOAT),
            ("finish_reason", _TEXT),
            ("error", _TEXT),
        ]
    ),
    "steps": pa.schema(
        [
            ("step", _INT),
            ("time", _FLOAT),
            ("batch_size", _INT),
            ("active_sequences", _INT),
            ("waiting_queue", _INT),
            ("scheduler_policy", _TEXT),
            ("prefill_tokens", _INT),
            ("decode_tokens", _INT),
            ("step_ms", _FLOAT),
            ("kv_cache_bytes", _INT),
            ("block_usage", _FLOAT),
            ("eviction_count", _INT),
            ("reuse_rate", _FLOAT),
            ("max_context", _INT),
            ("attention_backend", _TEXT),
            ("tokens_per_second", _FLOAT),
            ("variant", _TEXT),
        ]
    ),
    "resources": pa.schema(
        [
            ("time", _FLOAT),
            ("gpu_id", _TEXT),
            ("pool", _TEXT),
            ("gpu_util", _FLOAT),
            ("memory_util", _FLOAT),
            ("process_bytes", _INT),
            ("billable_units", _FLOAT),
            ("cost_center", _TEXT),
            ("variant", _TEXT),
        ]
    ),
}


@dataclass(frozen=True)
class SpeedResult:
    """What speed.json says. `metrics` are the candidate's, flat, with ratios to the baseline where there is one;
    `baseline_metrics` are the baseline's under the same names. `directory` holds the evidence."""

    directory: Path
    key: str
    workload: dict[str, Any]
    baseline: dict[str, Any] | None
    candidate: dict[str, Any]
    metrics: dict[str, float]
    baseline_metrics: dict[str, float]
    validity: dict[str, str]
    machine: dict[str, Any]
    protocol: dict[str, Any]
    seconds: float

    @property
    def warnings(self) -> dict[str, str]:
        """The validity checks that did not pass."""
        return doubts_of(self.validity)

    @staticmethod
    def read(directory: Path) -> "SpeedResult":
        """Raises EvalError with one line when the folder holds no whole result."""
        path = Path(directory) / SPEED_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return SpeedResult(directory=Path(directory), **content)
        except OSError as cause:
            raise EvalError(f"{path}: no speed result ({cause.strerror}); run `quantgate speed` first") from cause
        except (ValueError, TypeError) as cause:
            raise EvalError(f"{path}: not a speed result of this version; measure again") from cause

    def to_mapping(self) -> dict[str, Any]:
        """What speed.json holds."""
        return {name: value for name, value in vars(self).items() if name != "directory"}

    def write(self, directory: Path, evidence: dict[str, list[dict[str, Any]]]) -> None:
        """Writes speed.json and `<kind>.parquet` for each kind of SCHEMAS into an existing folder."""
        for kind, schema in SCHEMAS.items():
            parquet.write_table(pa.Table.from_pylist(evidence[kind], schema=schema), directory / f"{kind}.parquet")
        document = json.dumps(self.to_mapping(), indent=2, allow_nan=False)
        (directory / SPEED_FILE).write_text(document + "\n", encoding="utf-8")
