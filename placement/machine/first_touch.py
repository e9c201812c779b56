"""New memory on the nodes of the threads that will read it: they are the first to write it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hotcold.numba_kernels.decode.rows import split_range
from hotcold.placement.machine.pinning import pin_thread, use_local_memory

_PAGE_BYTES = 4096
ROWS_TOGETHER = 4  # kernels give rows to threads in such multiples


class FirstTouch:
    """Writes a byte of each page of an array that nobody has written yet.

    A page lies from then on where the thread ran that wrote it, so each thread of a service is
    played by one on the same cores. A page, huge or not, that two threads share goes to one.
    """

    def __init__(self, thread_cores: Sequence[Sequence[int]]) -> None:
        """thread_cores[t] are the cores of the service's thread t."""
        self._thread_cores = thread_cores

    def __call__(self, matrices: Sequence[np.ndarray]) -> None:
        """Touch `matrices` (R, C), in each of which thread t will read its `share` of the rows."""
        num_threads = len(self._thread_cores)

        def touch(thread: int) -> None:
            pin_thread(self._thread_cores[thread])
            use_local_memory()
            for matrix in matrices:
                first, last = split_range(matrix.shape[0], thread, num_threads, ROWS_TOGETHER)
                touch_pages(matrix[first:last])

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(touch, range(num_threads)))


def touch_pages(rows: np.ndarray) -> None:
    """Write zero into the first byte of each page of contiguous, zeroed rows, and into the last."""
    if rows.size:
        items = rows.reshape(-1).view(np.uint8)
        start = -items.ctypes.data % _PAGE_BYTES
        items[start::_PAGE_BYTES] = 0
        items[[0, -1]] = 0
