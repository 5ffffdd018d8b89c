"""Decode steps recorded once per batch size and replayed: on a GPU a step is then one launch instead of a thousand.

The one idea: a recording reads its inputs where they lay when it was made. So they lie in tensors of their own, of the
largest size; a step of n requests runs in the smallest bucket that holds it, and the rows behind n are padding (slot
-1, no context), which the attention neither writes nor reads. What records is given from outside: CUDA graphs do on a
GPU.
"""

import bisect
from collections.abc import Callable

import numpy as np
import torch

from eval.engine.attention import StepContext
from eval.engine.kv_cache import KVCache

Forward = Callable[[torch.Tensor, torch.Tensor, StepContext], torch.Tensor]
"""(token ids [n], positions [n], step) to logits [n, vocabulary]"""
Record = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
"""Runs a function and gives its result and what runs it again, into the same result."""

SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 8
LARGE_BUCKET_STEP = 32
LARGE = 64


class CannotRecord(Exception):
    """The model does on the host what no recording can hold."""


def buckets_for(max_num_seqs: int) -> list[int]:
    """Batch sizes up to `max_num_seqs`: dense where a row more costs much of the step."""
    sizes = [*SMALL_BUCKETS, *range(16, LARGE, BUCKET_STEP), *range(LARGE, max_num_seqs, LARGE_BUCKET_STEP)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """One recording per bucket, made when it is first needed."""

    def __init__(self, forward: Forward, kv: KVCache, max_num_seqs: int, table_width: int, record: Record):
        self._forward = forward
        self._kv = kv
        self._record = record
        self._buckets = buckets_for(max_num_seqs)
        self._recorded: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}
        device = kv.device
        self._token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._slots = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_num_seqs, table_width, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

    def run(
        self,
        token_ids: np.ndarray | torch.Tensor,
        positions: np.ndarray,
        slots: np.ndarray,
        context_lens: np.ndarray,
        tables: np.ndarray,
    ) -> torch.Tensor:
        """Logits [n, vocabulary] of one token for each of n requests; the next run writes over them. `tables`
        [n, as many blocks as the longest has]. Token ids may lie on the device already. Raises CannotRecord."""
        count = len(positions)
        bucket = self._buckets[bisect.bisect_left(self._buckets, count)]
        self._fill(self._token_ids, token_ids, bucket, 0)
        self._fill(self._positions, positions, bucket, 0)
        self._fill(self._slots, slots, bucket, -1)
        self._fill(self._context_lens, context_lens, bucket, 0)
        self._fill(self._tables[:, : tables.shape[1]], tables, bucket, 0)
        if bucket not in self._recorded:
            # Recording runs it, on the inputs that were just filled in.
            self._recorded[bucket] = self._record(lambda: self._run_bucket(bucket))
        logits, replay = self._recorded[bucket]
        replay()
        return logits[:count]

    def _run_bucket(self, bucket: int) -> torch.Tensor:
        step = StepContext(
            kv=self._kv,
            query_starts=self._starts[: bucket + 1],
            context_lens=self._context_lens[:bucket],
            block_tables=self._tables[:bucket],
            slot_mapping=self._slots[:bucket],
        )
        return self._forward(self._token_ids[:bucket], self._positions[:bucket], step)

    def _fill(self, target: torch.Tensor, rows: np.ndarray | torch.Tensor, bucket: int, padding: int) -> None:
        if isinstance(rows, torch.Tensor):
            target[: len(rows)] = rows
            target[len(rows) : bucket] = padding
            return
        padded = np.full((bucket, *rows.shape[1:]), padding, rows.dtype)
        padded[: len(rows)] = rows
        target[:bucket].copy_(on_its_way(torch.from_numpy(padded), target.device), non_blocking=True)


def on_its_way(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor that can be copied to `device` without waiting for what the device does now. Pinned memory is
    torch's own and is not used again before the copy is through."""
    return host.pin_memory() if device.type == "cuda" else host


def record_cuda_graph(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """`Record` by CUDA graphs. Raises CannotRecord where the forward waits for the device."""
    current = torch.cuda.current_stream()
    aside = torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        # Kernels are compiled and libraries set up in here, which no graph may contain.
        forward()
        forward()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = forward()
    except RuntimeError as error:
        raise CannotRecord(str(error).splitlines()[0]) from error
    return logits, graph.replay
