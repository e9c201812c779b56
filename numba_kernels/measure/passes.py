"""Passes of all threads of a NUMA node, which begin together and note when each began and ended."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.checks import RELU
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import Activation, Thresholds
from hotcold.numba_kernels.decode.ffn import NO_MASKS
from hotcold.numba_kernels.decode.rows import rows_kernel
from hotcold.numba_kernels.measure.plain_reads import read_row
from hotcold.numba_kernels.serve.doorbell import barrier, now_ns
from hotcold.numba_kernels.serve.layer_ffn import layer_ffn

_NO_BIAS = np.empty(0, np.float32)


@njit(nogil=True, cache=True)
def read_passes(items, cells, num_threads, times):  # type: ignore[no-untyped-def]
    """Sum items (W,) uint64 once for each row of `times` (passes, 2) int64 ns: begin and end."""
    total = np.uint64(0)
    for i in range(times.shape[0]):
        barrier(cells, 0, 1, num_threads)
        times[i, 0] = now_ns()
        total += read_row(items)
        times[i, 1] = now_ns()
    return total  # what nobody uses would not be computed


@njit(nogil=True, cache=True)
def rows_passes(weights, x, out, first, last, cells, num_threads, times):  # type: ignore[no-untyped-def]
    """Rows first to last times the vectors, timed as `read_passes`."""
    for i in range(times.shape[0]):
        barrier(cells, 0, 1, num_threads)
        times[i, 0] = now_ns()
        rows_kernel(weights, _NO_BIAS, x, out, first, last)
        times[i, 1] = now_ns()


@njit(nogil=True, cache=True)
def gather_passes(thread, num_threads, cells, arrays, ids, x, scratch, out, times):  # type: ignore[no-untyped-def]
    """The FFN of one layer over ids[i] in pass i, timed as `read_passes`."""
    for i in range(times.shape[0]):
        barrier(cells, 0, 1, num_threads)
        times[i, 0] = now_ns()
        layer_ffn(
            thread, num_threads, cells, 0, 0, True, ids[i], NO_MASKS,
            Thresholds(np.float32(0), np.float32(-1)), x, arrays, scratch,
            Activation(RELU, np.float32(0)), out,
        )  # fmt: skip
        times[i, 1] = now_ns()
