"""How fast threads read memory: the ceiling of every kernel that reads weights."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_MIN_BYTES = 64 << 20


def measure_read_bandwidth(num_threads: int, num_bytes: int, seconds: float = 1.0) -> float:
    """Return GB/s (1e9) of a plain sequential read by `num_threads` threads, the best pass.

    Each thread first writes its own part, so that it lies on the thread's NUMA node, then takes the
    maximum of it again and again; `num_bytes` should exceed the last-level cache.
    Errors:  ValueError for fewer than one thread
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}")
    items = np.empty(max(num_bytes, _MIN_BYTES) // 4, np.float32)
    parts = np.array_split(items, num_threads)
    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda part: part.fill(1.0), parts))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            best_s = min(best_s, time.perf_counter() - started)
    return items.nbytes / best_s / 1e9
