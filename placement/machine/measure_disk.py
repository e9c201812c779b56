"""How fast a file is read: at random places and in sequence, one read and several at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from model.bundles.direct import PAGE_BYTES, DirectFile, open_direct
from model.weights.memory import aligned_empty
from numba_kernels.storage.reads.disk_reads import read_places

DEPTH = 16  # reads at once: more threads gain little
_MOST_NS = 250_000_000
_MOST_READS = 1 << 16


def measure_disk(
    path: Path, sizes: Sequence[int], depth: int = DEPTH, seed: int | None = None
) -> list[float]:
    """Bytes a second of reads of each size at random places of a file, `depth` at once.

    Sizes are multiples of 4096. What a file system or a host keeps in memory counts as read.
    Units:   a quarter of a second a size
    Errors:  OSError
    """
    file = open_direct(path)
    try:
        num_bytes = os.fstat(file.descriptor).st_size
        # Without a seed places are new each time: the host may keep what was read before.
        draw = np.random.default_rng(seed)
        return [_rate(file, num_bytes, size, depth, draw) for size in sizes]
    finally:
        os.close(file.descriptor)


def _rate(
    file: DirectFile, num_bytes: int, size: int, depth: int, draw: np.random.Generator
) -> float:
    last = (num_bytes - size) // PAGE_BYTES
    if size % PAGE_BYTES or last < 0:
        raise OSError(f"reads of {size} bytes of a file of {num_bytes}")
    places = draw.integers(0, last + 1, _MOST_READS) * PAGE_BYTES
    taken = np.zeros(1, np.int32)
    buffers = [aligned_empty((size,), np.uint8, PAGE_BYTES, huge_pages=False) for _ in range(depth)]
    read_places(*file, places, size, 0, taken, buffers[0])  # compiled here, if at all

    def work(buffer: np.ndarray) -> int:
        return int(read_places(*file, places, size, _MOST_NS, taken, buffer))

    with ThreadPoolExecutor(depth) as pool:
        started = time.monotonic()
        failed = [status for status in pool.map(work, buffers) if status]
        seconds = time.monotonic() - started
    if failed:
        raise OSError(failed[0], os.strerror(failed[0]) if failed[0] > 0 else "it ends early")
    return min(int(taken[0]), places.size) * size / seconds
