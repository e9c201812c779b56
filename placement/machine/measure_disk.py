"""How fast a file is read: at random places and in sequence, one read and several at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
_SIZE_S = 0.25  # reads of one size
_SPENT_S = 0.2  # reads until what may be read at once is spent
_LONG_S = 1.0  # reads after that, in the long run
_BURSTS, _NEVER_NS = 31, 1 << 60


def measure_disk(path: Path, sizes: Sequence[int], depth: int | None = None) -> list[float]:
    """Bytes a second for reads of each size at random offsets of a file.

    `depth` threads read; without it reads go as for neurons, by io_uring where available.
    Sizes are multiples of 4096. Caches of a file system or a host count as the disk's.
    Errors:  OSError
    """
    with _opened(path) as (file, num_bytes):
        draw = np.random.default_rng()  # new offsets each time: the host may cache earlier reads
        max_ns = round(1e9 * _SIZE_S)
        drawn = {size: _places(num_bytes, size, draw) for size in sizes}
        with _ring_of(file, depth, max(drawn)) as ring:
            if ring is None:
                return [_rate(file, *each, max_ns, depth or NUM_THREADS) for each in drawn.items()]
            return [_ring_rate(*ring, file, *each, max_ns) for each in drawn.items()]


def measure_bursts(path: Path, size: int, num_reads: int) -> tuple[float, float]:
    """Bytes a second of `num_reads` reads after a pause, and in the long run.

    The first is the median of several such bursts. Their reads are neighbours, of `size` bytes, a
    multiple of 4096. Pauses are as long as these reads take in the long run: a limit over some time
    does not slow bursts that keep within it. Where io_uring is missing, both are the long run.
    Errors:  OSError
    """
    with _opened(path) as (file, num_bytes), _ring_of(file, None, size) as ring:
        draw = np.random.default_rng()
        places = _places(num_bytes, size, draw)
        if ring is None:
            rate = _rate(file, size, places, round(1e9 * _LONG_S), NUM_THREADS)
            return rate, rate
        _ring_rate(*ring, file, size, places, round(1e9 * _SPENT_S))
        long = _ring_rate(*ring, file, size, places[::-1], round(1e9 * _LONG_S))
        found, pause_s = [], num_reads * size / long
        for first in _places(num_bytes, num_reads * size, draw)[:_BURSTS]:
            time.sleep(pause_s)
            neighbours = first + np.arange(num_reads) * size
            found.append(_ring_rate(*ring, file, size, neighbours, _NEVER_NS))
        return float(np.median(found)), long


@contextmanager
def _opened(path: Path) -> Iterator[tuple[DirectFile, int]]:
    """A file, and its bytes."""
    file = open_direct(path)
    try:
        yield file, os.fstat(file.descriptor).st_size
    finally:
        os.close(file.descriptor)


@contextmanager
def _ring_of(
    file: DirectFile, depth: int | None, size: int
) -> Iterator[tuple[IoRing, np.ndarray] | None]:
    """A ring, and memory for its reads of up to `size` bytes; None where threads are to read."""
    ring = new_ring(RING_DEPTH) if depth is None and file.keeps_pages else None
    if ring is None:
        yield None
        return
    into = aligned_empty((RING_DEPTH * size,), np.uint8)
    try:
        register_buffers(ring, into)
        yield ring, into
    except OSError:
        leak_buffers(into)  # the ring itself may have failed
        raise
    finally:
        close_ring(ring)


def _places(num_bytes: int, size: int, draw: np.random.Generator) -> np.ndarray:
    last = (num_bytes - size) // PAGE_BYTES
    if size % PAGE_BYTES or last < 0:
        raise OSError(f"reads of {size} bytes of a file of {num_bytes}")
    return draw.integers(0, last + 1, _MAX_READS) * PAGE_BYTES


def _ring_rate(
    ring: IoRing, into: np.ndarray, file: DirectFile, size: int, places: np.ndarray, max_ns: int
) -> float:
    done, buffers = np.zeros(1, np.int64), into[: RING_DEPTH * size].reshape(RING_DEPTH, size)
    read_places_by_ring(ring, file.descriptor, places, size, 0, done, buffers)  # compiled here
    started = time.monotonic()
    status = read_places_by_ring(ring, file.descriptor, places, size, max_ns, done, buffers)
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
