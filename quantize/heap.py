"""Memory that is free but still this process's: glibc keeps freed blocks of up to 32 MB for later, in pieces that the
next layer's matrices do not fit, so that the process would grow a little with every layer."""

import ctypes


def return_freed_memory() -> None:
    """Gives the system what glibc holds unused; does nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
