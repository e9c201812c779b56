"""Gates of one token's candidates: gates in memory are multiplied while the others are read.

A gate's dot product does not depend on which thread computes it, nor when, so threads take blocks
of them from shared counters.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate
from hotcold.numba_kernels.decode.candidates import FIRST, LAST, ROW
from hotcold.numba_kernels.decode.rows import rows_ahead
from hotcold.numba_kernels.ir.vector_ir import dot_ahead, prefetch_row
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, atomic_load
from hotcold.numba_kernels.loops.work_stealing import block_rows, next_block
from hotcold.numba_kernels.storage import MAX_GAP
from hotcold.numba_kernels.storage.offloaded_neurons import (
    LOADED_TAKEN,
    NUM_LOADED,
    NUM_PENDING,
    PENDING_TAKEN,
    claim_beside_gates,
    locate_gates,
    submit_marked,
)
from hotcold.numba_kernels.storage.read_queue import LOADED
from hotcold.numba_kernels.storage.slots import await_unit

_PENDING_BLOCK = 8  # pending gates that a thread takes at once


@njit(nogil=True, cache=True)
def submit_gates(shard, first, selection, spans, keeps_all):
    """Submit reads of the candidates' gates that are not in memory; called by one thread alone.

    Up and down rows are read with them where all are needed (`keeps_all`), or where one read of a
    whole bundle is faster. Fills `shard.gate_slots`, and `shard.gate_order`: candidates with
    pending gates, then those with loaded ones.
    """
    is_listed, slots = selection.is_listed, shard.gate_slots
    last_place = spans[:, LAST].sum() - spans[:, FIRST].sum() - 1
    for span in spans:
        begin, end = span[FIRST], span[LAST]
        # ids of the span's candidates, or its first row
        ids, base = selection.ids, first
        if is_listed:
            ids = ids[begin:end]
        else:
            base = first + span[ROW]
        locate_gates(shard, base, ids, end - begin, slots[begin:end])
        if keeps_all or (is_listed and shard.reads_whole[0]):
            claim_beside_gates(shard, base, ids, end - begin)
    loaded, row_of = shard.gates.loaded, shard.gates.unit_of
    gate_order, num_pending, num_loaded = shard.gate_order, 0, 0
    for span in spans:
        for i in range(span[FIRST], span[LAST]):
            if atomic_load(loaded, np.int64(row_of[slots[i]])) == LOADED:
                gate_order[last_place - num_loaded] = i
                num_loaded += 1
            else:
                gate_order[num_pending] = i
                num_pending += 1
    submit_marked(shard, MAX_GAP)
    shard.counters[:] = 0
    shard.counters[NUM_PENDING * INTS_A_CELL] = num_pending
    shard.counters[NUM_LOADED * INTS_A_CELL] = num_loaded


@njit(nogil=True, cache=True)
def _values_of(shard, order, begin, end, last, x, function, values):
    """values[i] = fn(gate . x[0] + bias), i in order[begin:end]; prefetches up to `last`."""
    gate, bias, row_of = shard.arrays.gate, shard.arrays.gate_bias, shard.gates.unit_of
    slots, distance = shard.gate_slots, rows_ahead(gate)
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
    cells = shard.counters
    num_pending = np.int64(cells[NUM_PENDING * INTS_A_CELL])
    last = num_pending + np.int64(cells[NUM_LOADED * INTS_A_CELL])
    size = block_rows(shard.arrays.gate)
    begin = num_pending + size * next_block(cells, LOADED_TAKEN)
    while begin < last:
        end = min(begin + size, last)
        _values_of(shard, shard.gate_order, begin, end, last, x, function, values)
        begin = num_pending + size * next_block(cells, LOADED_TAKEN)


@njit(nogil=True, cache=True)
def pending_values(shard, thread, x, function, values):
    """One token's values of pending gates, once each is read; False where a read failed."""
    cells, gate_order = shard.counters, shard.gate_order
    slots, row_of, loaded = shard.gate_slots, shard.gates.unit_of, shard.gates.loaded
    num_pending = np.int64(cells[NUM_PENDING * INTS_A_CELL])
    begin = _PENDING_BLOCK * next_block(cells, PENDING_TAKEN)
    while begin < num_pending:
        end = min(begin + _PENDING_BLOCK, num_pending)
        for k in range(begin, end):
            row = np.int64(row_of[slots[gate_order[k]]])
            is_pending = atomic_load(loaded, row) != LOADED
            if is_pending and not await_unit(
                shard.gates, shard.queue, row, shard.waited_ns, thread
            ):
                return False
        _values_of(shard, gate_order, begin, end, end, x, function, values)
        begin = _PENDING_BLOCK * next_block(cells, PENDING_TAKEN)
    return True
