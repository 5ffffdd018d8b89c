"""Weights and KV cache lie in memory that can have huge pages."""

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from eval.engine import huge_pages
from eval.engine.kv_cache import KVCache, KVGeometry

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_of(address):
    """The lines of /proc/self/smaps that say what lies at an address: its bounds and permissions, then name: value."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):
            low, high = (int(bound, 16) for bound in first.split("-"))
            if found is not None:
                return found
            found = {"permissions": others[0]} if low <= address < high else None
        elif found is not None:
            found[first.rstrip(":")] = " ".join(others)
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what its memory is")
def test_a_region_is_private_and_gets_huge_pages_where_there_are_any():
    memory = huge_pages.region(8 * huge_pages.HUGE_PAGE)
    memory[:] = b"x" * len(memory)
    found = mapping_of(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert found["permissions"] == "rw-p"
    if hasattr(mmap, "MADV_HUGEPAGE") and ENABLED.exists() and "[never]" not in ENABLED.read_text():
        assert int(found["AnonHugePages"].split()[0]) > 0


def test_a_cache_on_a_cpu_lies_in_such_a_region(monkeypatch):
    asked = []
    region = huge_pages.region
    monkeypatch.setattr(huge_pages, "region", lambda nbytes: asked.append(nbytes) or region(nbytes))
    kv = KVCache.allocate(KVGeometry(2, 3, 8), 5, 4, torch.bfloat16, torch.device("cpu"))
    assert asked == [kv.blocks.nbytes]
    assert kv.blocks.shape == (2, 2, 5, 4, 3, 8)
