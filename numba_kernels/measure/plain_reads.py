"""Reads that do nothing but read, beside which kernels are measured."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.vector_ir import prefetch_row


@njit(nogil=True, cache=True)
def read_row(words):  # type: ignore[no-untyped-def]
    """The sum of 64-bit words.

    Shapes:  words (W,)
    Dtypes:  words uint64
    """
    total = np.uint64(0)
    for i in range(words.shape[0]):
        total += words[i]
    return total


@njit(nogil=True, cache=True)
def read_listed(gate, up, down, ids, first, last):  # type: ignore[no-untyped-def]
    """Of each layer, gate rows of ids[first:last], then four up rows, four down rows, and so on.

    Shapes:  gate, up, down (L * N, W); ids (L, A)
    Dtypes:  gate, up, down uint64; ids int32
    """
    total, rows = np.uint64(0), gate.shape[0] // ids.shape[0]
    for layer in range(ids.shape[0]):
        base, listed = layer * rows, ids[layer]
        for i in range(first, last):
            if i + 2 < last:
                prefetch_row(gate, base + listed[i + 2])
            total += read_row(gate[base + listed[i]])
        for i in range(first, last, 4):
            for matrix in (up, down):
                for k in range(i, min(i + 4, last)):
                    if k + 2 < last:
                        prefetch_row(matrix, base + listed[k + 2])
                    total += read_row(matrix[base + listed[k]])
    return total
