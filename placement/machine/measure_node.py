"""How fast cores read memory: in sequence, row by row, neuron by neuron.

Threads pinned to a node's cores stay in compiled loops, wait at a barrier before each pass, and
record its begin and end; a pass lasts from the first begin to the last end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.ffn.in_memory import new_scratch
from hotcold.numba_kernels.ffn_arrays import FfnArrays
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import CELLS_A_SERVICE
from hotcold.numba_kernels.measure import gather_passes, read_passes, rows_passes

_WIDTH = 4096  # of a row: the hidden size of 7B models
_DENSITY = 0.1
_ROW_BYTES = 2 * _WIDTH
_HUNDREDTH = 0x211F  # 0.01 in float16 bits
_NO_BIAS = np.empty(0, np.float32)
_PASSES = 4  # a batch; then it is another kernel's turn
_WANTED_BYTES = 1 << 30
_CACHES = 8  # times the last-level cache: with less, many rows would be read from it


@dataclass(frozen=True)
class NodeRates:
    """What all cores of a node read together, in 1e9 bytes a second.

    Each figure is the highest median of a batch of passes: a single pass may be lucky, and other
    programs only slow passes down.
    """

    read_gb_per_s: float
    rows_gb_per_s: float
    gather_gb_per_s: float


def measure_node(
    cores: tuple[int, ...], free_bytes: int, cache_bytes: int = 0, seconds: float = 4.0
) -> NodeRates:
    """Measure the node that has `cores`, with one thread each.

    The three kernels take turns, so that slow drifts affect them alike. Each pass reads memory that
    is in no cache; gathered ids are random and new for each pass.
    Units:   allocates a quarter of `free_bytes`, at most 1 GiB or 8 times `cache_bytes`
    Errors:  MemoryBudgetError where the system refuses that
    """
    num_bytes = min(max(_WANTED_BYTES, _CACHES * cache_bytes), free_bytes // 4)
    with ThreadPoolExecutor(
        len(cores), initializer=os.sched_setaffinity, initargs=(0, cores)
    ) as pool:
        bench = _Bench(pool, len(cores), num_bytes)
        kernels = (bench.read, bench.rows, bench.gather)
        for kernel in kernels:
            kernel()  # compiles
        medians: list[list[float]] = []
        end = perf_counter() + seconds
        while not medians or perf_counter() < end:
            medians.append([float(np.median(kernel())) for kernel in kernels])
    return NodeRates(*(max(found) for found in zip(*medians, strict=True)))


class _Bench:
    """The memory of a measurement, and its threads."""

    def __init__(self, pool: ThreadPoolExecutor, num_threads: int, num_bytes: int) -> None:
        self.pool, self.num_threads = pool, num_threads
        self.num_neurons = max(16, num_bytes // (3 * _ROW_BYTES))
        self.num_ids = max(1, round(_DENSITY * self.num_neurons))
        self.rng = np.random.default_rng(0)
        self.cells = aligned_empty((CELLS_A_SERVICE * INTS_A_CELL,), np.int32)
        self.x = np.full((1, _WIDTH), 0.01, np.float32)
        self.weights = aligned_empty((3 * self.num_neurons, _WIDTH), np.uint16)
        self._each(self._fill)

    def _each(self, work: Callable[[int], None]) -> None:
        list(self.pool.map(work, range(self.num_threads)))

    def _fill(self, thread: int) -> None:
        # First touch places the pages on this node.
        first, last = split_range(self.weights.shape[0], thread, self.num_threads, 1)
        self.weights[first:last] = _HUNDREDTH

    def _rates(self, work: Callable[[int, np.ndarray], None], num_bytes: int) -> np.ndarray:
        """GB/s of each pass; `work(thread, times)` records begins and ends, (passes, 2)."""
        times = np.zeros((self.num_threads, _PASSES, 2), np.int64)
        self._each(lambda thread: work(thread, times[thread]))
        seconds = (times[:, :, 1].max(0) - times[:, :, 0].min(0)) / 1e9
        return num_bytes / 1e9 / seconds

    def read(self) -> np.ndarray:
        """Sum everything as 64-bit words."""
        items = self.weights.reshape(-1).view(np.uint64)

        def work(thread: int, times: np.ndarray) -> None:
            first, last = split_range(items.size, thread, self.num_threads, 512)
            read_passes(items[first:last], self.cells, self.num_threads, times)

        return self._rates(work, self.weights.nbytes)

    def rows(self) -> np.ndarray:
        """All rows times one vector."""
        out = np.zeros((1, self.weights.shape[0]), np.float32)

        def work(thread: int, times: np.ndarray) -> None:
            first, last = split_range(self.weights.shape[0], thread, self.num_threads, 1)
            rows_passes(self.weights, self.x, out, first, last, self.cells, self.num_threads, times)

        return self._rates(work, self.weights.nbytes)

    def gather(self) -> np.ndarray:
        """The FFN over random neurons, all of which fire."""
        chosen = np.empty((_PASSES, self.num_ids), np.int32)
        for row in chosen:
            row[:] = np.sort(self.rng.choice(self.num_neurons, self.num_ids, replace=False))
        ids = read_only(chosen)  # as in services: a writable array would compile another FFN
        gate, up, down = self.weights.reshape(3, self.num_neurons, _WIDTH)
        starts, no_down_bias = np.array([[0, self.num_neurons]]), np.empty((1, 1, 0), np.float32)
        arrays = FfnArrays(starts, gate, up, down, _NO_BIAS, _NO_BIAS, no_down_bias)
        scratch = new_scratch(self.num_threads, 1, self.num_ids, _WIDTH)
        out = np.zeros((1, _WIDTH), np.float32)

        def work(thread: int, times: np.ndarray) -> None:
            gather_passes(
                thread, self.num_threads, self.cells, arrays, ids, self.x, scratch, out, times
            )

        return self._rates(work, 3 * self.num_ids * _ROW_BYTES)


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
