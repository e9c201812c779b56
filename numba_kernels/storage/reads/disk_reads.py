"""Reads that do nothing else: what a disk gives, beside which reading neurons is measured."""

import numpy as np

from numba_kernels.compiler import njit
from numba_kernels.serve.doorbell import atomic_add, now_ns
from numba_kernels.storage.reads.direct_file import read_bytes


@njit(nogil=True, cache=True)
def read_places(descriptor, unit, keeps_pages, places, size, most_ns, taken, into):
    """Read `size` bytes at places[i] for the next i that no thread has taken; 0, or what failed.

    taken (1,) int32 is shared by threads; it ends at the last place, or after `most_ns`.
    """
    started = now_ns()
    while now_ns() - started < most_ns:
        i = np.int64(atomic_add(taken, 0, np.int32(1)))
        if i >= places.shape[0]:
            break
        status = read_bytes(descriptor, places[i], size, unit, keeps_pages, into[:size])
        if status != 0:
            return status
    return np.int64(0)
