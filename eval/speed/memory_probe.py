"""What memory a process really took: read from the kernel and the CUDA allocator, never worked out from shapes.

On a CPU no allocator keeps a peak, so the peak of activations is the growth of the resident set over a probe run, less
the KV-cache pages that the probe was the first to touch.
"""

import contextlib
import ctypes
import gc
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch


def process_peak_bytes() -> int:
    """The largest resident set this process has had."""
    status = _status("VmHWM")
    if status is not None:
        return status
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def activation_peak_bytes(probe: Callable[[], object], kv_cache: Sequence[torch.Tensor]) -> int | None:
    """Peak bytes that running `probe` takes beyond what was held before it; None where the kernel does not say.

    `kv_cache`: the tensors whose pages are not activations. Lowers the mark that `process_peak_bytes` reads, so ask for
    that first.
    """
    if kv_cache[0].is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        probe()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - int(before)
    gc.collect()
    _return_free_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    resident, touched = _status("VmRSS"), _resident_bytes(kv_cache)
    probe()
    peak, touched_after = _status("VmHWM"), _resident_bytes(kv_cache)
    if resident is None or peak is None or touched is None or touched_after is None:
        return None
    return max(0, peak - resident - (touched_after - touched))


def resident_bytes(tensor: torch.Tensor) -> int | None:
    """How much of the tensor's memory has physical pages; None where /proc has no pagemap."""
    page = resource.getpagesize()
    first = tensor.data_ptr() // page
    pages = -(-(tensor.data_ptr() + tensor.nbytes) // page) - first
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(8 * first)
            entries = np.frombuffer(pagemap.read(8 * pages), dtype=np.uint64)
    except OSError:
        return None
    return int(np.count_nonzero(entries >> np.uint64(63))) * page


def _resident_bytes(tensors: Sequence[torch.Tensor]) -> int | None:
    sizes = [size for tensor in tensors if (size := resident_bytes(tensor)) is not None]
    return sum(sizes) if len(sizes) == len(tensors) else None


def _status(key: str) -> int | None:
    """A line of /proc/self/status in bytes."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
        return int(found.group(1)) * 1024 if found else None
    return None


def _return_free_memory() -> None:
    """Freed heap that stays resident would hide the probe's growth."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
