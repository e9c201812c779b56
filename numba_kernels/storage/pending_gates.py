"""Gates of one token's candidates: gates in memory are multiplied while the others are read.

A gate's dot product does not depend on which thread computes it, nor when, so threads take blocks
of them from shared counters. Candidates are in the order of `request_units`.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate
from hotcold.numba_kernels.decode.rows import rows_ahead
from hotcold.numba_kernels.ir.vector_ir import dot_ahead, prefetch_row
from hotcold.numba_kernels.loops.work_stealing import block_rows, next_block
from hotcold.numba_kernels.storage.offloaded_units import NUM_PENDING, NUM_UNITS
from hotcold.numba_kernels.storage.slots import await_unit

_PENDING_BLOCK = 8  # pending gates that a thread takes at once


@njit(nogil=True, cache=True)
def _values_of(shard, begin, end, last, x, function, values):
    """values[i] = fn(gate . x[0] + bias), i in order[begin:end]; prefetches up to `last`."""
    gate, bias, row_of = shard.arrays.gate, shard.arrays.gate_bias, shard.gates.unit_of
    order, slots, distance = shard.order, shard.slots, rows_ahead(gate)
    for k in range(begin, end):
        i = np.int64(order[k])
        if k + distance + 2 < last:
            prefetch_row(gate, slots[order[k + distance + 2]])
        following = slots[order[min(k + distance, last - 1)]]
        value = dot_ahead(gate, slots[i], following, x, 0)
        if bias.shape[0]:
            value += bias[row_of[slots[i]]]
        values[i] = activate(function, value)


@njit(nogil=True, cache=True)
def loaded_values(shard, x, function, values):
    """One token's values of loaded gates; each thread takes the next block until none is left."""
    first, last = shard.counts[NUM_PENDING], shard.counts[NUM_UNITS]
    size, taken = block_rows(shard.arrays.gate), shard.counters[0, 0]
    begin = first + size * next_block(taken, 0)
    while begin < last:
        _values_of(shard, begin, min(begin + size, last), last, x, function, values)
        begin = first + size * next_block(taken, 0)


@njit(nogil=True, cache=True)
def pending_values(shard, thread, x, function, values):
    """One token's values of pending gates, once each is read; False where a read failed."""
    order, slots, row_of = shard.order, shard.slots, shard.gates.unit_of
    last, taken = shard.counts[NUM_PENDING], shard.counters[0, 1]
    begin = _PENDING_BLOCK * next_block(taken, 0)
    while begin < last:
        end = min(begin + _PENDING_BLOCK, last)
        for k in range(begin, end):
            unit = np.int64(row_of[slots[order[k]]])
            if not await_unit(shard.gates, shard.queue, unit, shard.waited_ns, thread):
                return False
        _values_of(shard, begin, end, end, x, function, values)
        begin = _PENDING_BLOCK * next_block(taken, 0)
    return True
