"""What was packed together while scoring, so that a leak between samples can be ruled out afterwards.

One record per call to the engine. The engine runs a flat batch without padding, so `padding_side` is "none" and
`padding_ratio` 0; the masks are given as digests of the lengths that define them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PACKING_VERSION = "flat-1"


@dataclass(frozen=True)
class BatchRecord:
    """`segment_ids`: the length in tokens of each packed sample, in order (the run-length form of segment ids).

    `attention_mask_hash`: sha256 over the segment lengths, which define the block-diagonal causal mask.
    `loss_mask_hash`: sha256 over (context, scored) lengths. `sample_ids`: numbers of the requests within this run.
    """

    batch_id: int
    batch_size: int
    max_seq_len: int
    padding_side: str
    padding_ratio: float
    sample_ids: tuple[int, ...]
    segment_ids: tuple[int, ...]
    document_boundary: str
    eos_policy: str
    packing_version: str
    attention_mask_hash: str
    causal_mask_mode: str
    loss_mask_hash: str
    ignore_index: int
    position_ids_strategy: str
    truncation_side: str
    chat_template_version: str
    leakage_test_result: str


def record_batch(
    batch_id: int,
    sample_ids: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    chat_template_version: str | None,
) -> BatchRecord:
    """A record of one scored batch; `lengths`: (context tokens, scored tokens) of each sample."""
    segments = tuple(context + scored for context, scored in lengths)
    return BatchRecord(
        batch_id=batch_id,
        batch_size=len(lengths),
        max_seq_len=max(segments, default=0),
        padding_side="none",
        padding_ratio=0.0,
        sample_ids=tuple(sample_ids),
        segment_ids=segments,
        document_boundary="one request per document",
        eos_policy="no EOS added",
        packing_version=PACKING_VERSION,
        attention_mask_hash=_digest(segments),
        causal_mask_mode="causal, block-diagonal by request",
        loss_mask_hash=_digest(lengths),
        ignore_index=-100,
        position_ids_strategy="restart at 0 per request",
        truncation_side="left",
        chat_template_version=chat_template_version or "",
        leakage_test_result="",
    )


def write_batches(path: Path, batches: Sequence[BatchRecord], leakage_test_result: str) -> None:
    """Write the records to one Parquet file, each with the result of the run's leakage tests."""
    names = [field.name for field in fields(BatchRecord)]
    rows = [{**asdict(batch), "leakage_test_result": leakage_test_result} for batch in batches]
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in names}), path)


def _digest(numbers: Sequence[object]) -> str:
    return hashlib.sha256(repr(tuple(numbers)).encode()).hexdigest()
