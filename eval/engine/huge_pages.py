"""Memory in huge pages, where the system has them: with pages of 4 KiB a core waits for the next page's address about
as often as for the data."""

import mmap

HUGE_PAGE = 2 * 2**20


def region(nbytes: int) -> mmap.mmap:
    """At least `nbytes` zeros, which take no memory until they are written; a page of them then comes whole."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
