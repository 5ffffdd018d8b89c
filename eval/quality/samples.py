"""One record per scored sample, and its Parquet file.

A baseline and a candidate are compared sample by sample, so everything that says "this is the same sample"
(document, prompt and target hashes) travels with the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eval.errors import EvalError

# Metrics whose score is a mean negative log-likelihood; their headline is a perplexity, lower is better.
PERPLEXITY_METRICS = frozenset({"nll", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"})

_SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("metric", pa.string()),
        ("doc_id", pa.int64()),
        ("document_hash", pa.string()),
        ("prompt_hash", pa.string()),
        ("target_hash", pa.string()),
        ("prompt", pa.string()),
        ("target", pa.string()),
        ("answer", pa.string()),
        ("score", pa.float64()),
        ("logprobs", pa.list_(pa.float64())),
        ("source", pa.string()),
        ("tokens", pa.int64()),
        ("higher_is_better", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One sample under one metric of one task.

    `score`: the metric of this sample (0 or 1 for accuracies); for the metrics in `PERPLEXITY_METRICS` the mean
    negative log-likelihood, in nats, per unit. `tokens`: units scored (tokens; words or bytes where the metric says
    so; 1 for a perplexity per sample). `logprobs`: one log-likelihood in nats per choice, or of the one target;
    empty where text was generated. `source`: documents cut from one text, or questions about one fact, share it, and
    are resampled together. `higher_is_better`: what the task says of this score; never of those in
    `PERPLEXITY_METRICS`.
    """

    task: str
    metric: str
    doc_id: int
    document_hash: str
    prompt_hash: str
    target_hash: str
    prompt: str
    target: str
    answer: str
    score: float
    logprobs: tuple[float, ...]
    source: str
    tokens: int
    higher_is_better: bool = True


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write the records to one Parquet file, in the order given."""
    columns = {field.name: [getattr(sample, field.name) for sample in samples] for field in fields(Sample)}
    columns["logprobs"] = [list(values) for values in columns["logprobs"]]
    pq.write_table(pa.table(columns, schema=_SCHEMA), path)


def read_samples(path: Path) -> list[Sample]:
    """Read what `write_samples` wrote. Raises `EvalError` where the file is missing or is something else."""
    try:
        rows = pq.read_table(path).to_pylist()
        return [Sample(**{**row, "logprobs": tuple(row["logprobs"])}) for row in rows]
    except (OSError, pa.ArrowException, TypeError, KeyError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EvalError(f"{path}: not a samples file ({cause}); run the evaluation again") from error
