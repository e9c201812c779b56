"""Memory that a process has freed goes back to the system, where it must keep a promise."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_LARGE_BYTES = 1 << 20


def give_back_freed_memory() -> None:
    """From now on each buffer of a megabyte is taken from the system, and given back when freed.

    By itself glibc learns from the first that are freed to keep buffers of up to 32 MiB, for each
    thread: of the work space of long prompts some 300 MiB stayed in each service. Where the C
    library has no mallopt(3), nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, _LARGE_BYTES)
