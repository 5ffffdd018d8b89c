"""Memory in huge pages, where the system has them: with pages of 4 KiB a core waits for the next page's address about
as often as for the data."""

import mmap

HUGE_PAGE = 2 * 2**20


def region(nbytes: int) -> mmap.mmap:
    """At least `nbytes` zeros, which take no memory until they are written; a page of them then comes whole."""
    # Private: by default it would be shared, like tmpfs, to which most systems give no huge pages, whoever asks.
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
