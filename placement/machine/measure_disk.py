"""How fast a file is read: at random places and in sequence, one read and several at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hotcold.model.bundles.direct_io import PAGE_BYTES, DirectFile, open_direct
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.measure import read_places, read_places_by_ring
from hotcold.numba_kernels.storage import NUM_THREADS, RING_DEPTH
from hotcold.numba_kernels.storage.io_ring import (
    IoRing,
    close_ring,
    leak_buffers,
    new_ring,
    register_buffers,
)

_MAX_READS = 1 << 16


def measure_disk(
    path: Path,
    sizes: Sequence[int],
    depth: int | None = None,
    seed: int | None = None,
    seconds: float = 0.25,
) -> list[float]:
    """Bytes a second for reads of each size at random offsets of a file.

    `depth` threads read; without it reads go as for neurons, by io_uring where available.
    Sizes are multiples of 4096. Caches of a file system or a host count as the disk's.
    Units:   `seconds` a size
    Errors:  OSError
    """
    file = open_direct(path)
    try:
        num_bytes = os.fstat(file.descriptor).st_size
        # Without a seed offsets are new each time: the host may cache earlier reads.
        draw = np.random.default_rng(seed)
        max_ns = round(1e9 * seconds)
        drawn = {size: _places(num_bytes, size, draw) for size in sizes}
        ring = new_ring(RING_DEPTH) if depth is None and file.keeps_pages else None
        if ring is None:
            return [_rate(file, *each, max_ns, depth or NUM_THREADS) for each in drawn.items()]
        try:
            into = aligned_empty((RING_DEPTH * max(drawn),), np.uint8)
            register_buffers(ring, into)
            return [_ring_rate(ring, file, *each, max_ns, into) for each in drawn.items()]
        except OSError:
            leak_buffers(into)  # the ring itself may have failed
            raise
        finally:
            close_ring(ring)
    finally:
        os.close(file.descriptor)


def _places(num_bytes: int, size: int, draw: np.random.Generator) -> np.ndarray:
    last = (num_bytes - size) // PAGE_BYTES
    if size % PAGE_BYTES or last < 0:
        raise OSError(f"reads of {size} bytes of a file of {num_bytes}")
    return draw.integers(0, last + 1, _MAX_READS) * PAGE_BYTES


def _ring_rate(
    ring: IoRing, file: DirectFile, size: int, places: np.ndarray, max_ns: int, into: np.ndarray
) -> float:
    done, into = np.zeros(1, np.int64), into[: RING_DEPTH * size].reshape(RING_DEPTH, size)
    read_places_by_ring(ring, file.descriptor, places, size, 0, done, into)  # compiled here
    started = time.monotonic()
    status = read_places_by_ring(ring, file.descriptor, places, size, max_ns, done, into)
    seconds = time.monotonic() - started
    _require(status)
    return int(done[0]) * size / seconds


def _require(status: int) -> None:
    if status:
        raise OSError(status, os.strerror(status) if status > 0 else "it ends early")


def _rate(file: DirectFile, size: int, places: np.ndarray, max_ns: int, depth: int) -> float:
    taken = np.zeros(1, np.int32)
    buffers = aligned_empty((depth, size), np.uint8)
    read_places(*file, places, size, 0, taken, buffers[0])  # compiled here, if at all

    def work(buffer: np.ndarray) -> int:
        return int(read_places(*file, places, size, max_ns, taken, buffer))

    with ThreadPoolExecutor(depth) as pool:
        started = time.monotonic()
        failed = [status for status in pool.map(work, buffers) if status]
        seconds = time.monotonic() - started
    _require(failed[0] if failed else 0)
    return min(int(taken[0]), places.size) * size / seconds
