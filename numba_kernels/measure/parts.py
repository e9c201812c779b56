"""Parts of a layer as a thread of a service computes them, once."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.checks import RELU
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import Activation, Thresholds
from hotcold.numba_kernels.decode.ffn import NO_MASKS
from hotcold.numba_kernels.decode.rows import rows_kernel
from hotcold.numba_kernels.decode.vectors import quantize_activations
from hotcold.numba_kernels.serve.layer_ffn import layer_ffn
from hotcold.numba_kernels.serve.mailbox import barrier_wait

_NO_BIAS = np.empty(0, np.float32)


@njit(nogil=True, cache=True)
def dense_part(weights, x, room, thread, out, first, last):  # type: ignore[no-untyped-def]
    """Rows first to last times the vectors; see `rows_kernel`."""
    rows_kernel(weights, _NO_BIAS, quantize_activations(weights, x, room, thread), out, first, last)


@njit(nogil=True, cache=True)
def sparse_part(thread, num_threads, cells, arrays, ids, x, scratch, out):  # type: ignore[no-untyped-def]
    """The FFN of every layer over its ids, all of which fire, as services compute it."""
    for layer in range(ids.shape[0]):
        layer_ffn(
            thread, num_threads, cells, 0, layer, True, ids[layer], NO_MASKS,
            Thresholds(np.float32(-1), np.float32(-1)), x, arrays, scratch,
            Activation(RELU, np.float32(0)), out,
        )  # fmt: skip
        barrier_wait(cells, 0, num_threads)
