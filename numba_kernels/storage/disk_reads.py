"""Reads that do nothing else: what a disk gives, beside which reading neurons is measured."""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.serve.doorbell import atomic_add, now_ns
from hotcold.numba_kernels.storage.direct_file import SHORT, read_bytes
from hotcold.numba_kernels.storage.io_ring import MAX_TOGETHER, add_read, next_done, submit


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


@njit(nogil=True, cache=True)
def read_places_by_ring(ring, descriptor, places, size, most_ns, done, into):
    """The same by one thread, as many reads at once as `into` has rows; 0, or what failed.

    done (1,) int64 is how many were done; none is begun after `most_ns`.
    """
    started, num_begun, status = now_ns(), 0, np.int64(0)
    free, num_free = np.arange(into.shape[0]), into.shape[0]
    done[0] = 0
    while True:
        while num_free and num_begun < places.shape[0] and now_ns() - started < most_ns:
            k = free[num_free - 1]
            address = np.int64(into[k].ctypes.data)
            add_read(ring, k, descriptor, places[num_begun], address, size)
            num_free, num_begun = num_free - 1, num_begun + 1
        if num_free == into.shape[0]:
            return status
        failed = submit(ring, min(MAX_TOGETHER, 1 + (into.shape[0] - num_free) // 4))
        if failed != 0:
            return failed
        k, result = next_done(ring)
        while k >= 0:
            if result != size:
                status, most_ns = np.int64(SHORT) if result >= 0 else -result, np.int64(0)
            free[num_free] = k
            num_free += 1
            done[0] += 1
            k, result = next_done(ring)
