"""Gates of one token's candidates: gates in memory are multiplied while the others are read.

A gate's dot product does not depend on which thread computes it, nor when, so threads take blocks
of them from shared counters.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate
from hotcold.numba_kernels.decode.rows import rows_ahead
from hotcold.numba_kernels.ir.vector_ir import dot_ahead, prefetch_row
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL, atomic_load
from hotcold.numba_kernels.serve.work_stealing import block_rows, next_block
from hotcold.numba_kernels.storage.offloaded_neurons import (
    LOADED_TAKEN,
    MAX_BYTES,
    MAX_GAP,
    NUM_LOADED,
    NUM_PENDING,
    PENDING_TAKEN,
    READS_WHOLE,
    await_row,
    claim_beside_gates,
    locate_gates,
    submit_marked,
)
from hotcold.numba_kernels.storage.read_queue import LOADED

_PENDING_BLOCK = 8  # pending gates that a thread takes at once


@njit(nogil=True, cache=True)
def submit_gates(shard, first, num_neurons, is_listed, ids, keeps_all):
    """Submit reads of the candidates' gates that are not in memory; called by one thread alone.

    Up and down rows are read with them where all are needed (`keeps_all`), or where one read of a
    whole bundle is faster. Fills `shard.gate_slots`, and `shard.gate_order`: candidates with
    pending gates, then those with loaded ones.
    """
    count = ids.shape[0] if is_listed else num_neurons
    locate_gates(shard, first, ids, count, shard.gate_slots, shard.missing)
    if keeps_all or (is_listed and shard.options[READS_WHOLE]):
        claim_beside_gates(shard, first, ids, count)
    loaded, gate_order, num_pending = shard.gates.loaded, shard.gate_order, 0
    for i in range(count):
        row = first + (np.int64(ids[i]) if is_listed else i)
        if atomic_load(loaded, row) == LOADED:
            gate_order[count - 1 - (i - num_pending)] = i
        else:
            gate_order[num_pending] = i
            num_pending += 1
    submit_marked(shard, shard.options[MAX_BYTES], shard.options[MAX_GAP])
    shard.counters[:] = 0
    shard.counters[NUM_PENDING * INTS_A_CELL] = num_pending
    shard.counters[NUM_LOADED * INTS_A_CELL] = count - num_pending


@njit(nogil=True, cache=True)
def _values_of(shard, gate_bias, order, begin, end, last, x, function, values):
    """values[i] = fn(gate . x[0] + bias), i in order[begin:end]; prefetches up to `last`."""
    gate, slots, distance = shard.arrays.gate, shard.gate_slots, rows_ahead(shard.arrays.gate)
    for k in range(begin, end):
        i = np.int64(order[k])
        if k + distance + 2 < last:
            prefetch_row(gate, slots[order[k + distance + 2]])
        following = slots[order[min(k + distance, last - 1)]]
        value = dot_ahead(gate, slots[i], following, x, 0)
        if gate_bias.shape[0]:
            value += gate_bias[slots[i]]
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
        bias = shard.arrays.gate_bias
        _values_of(shard, bias, shard.gate_order, begin, end, last, x, function, values)
        begin = num_pending + size * next_block(cells, LOADED_TAKEN)


@njit(nogil=True, cache=True)
def pending_values(shard, thread, first, is_listed, ids, x, function, values):
    """One token's values of pending gates, once each is read; False where a read failed."""
    cells, gate_order = shard.counters, shard.gate_order
    bias, loaded = shard.arrays.gate_bias, shard.gates.loaded
    num_pending = np.int64(cells[NUM_PENDING * INTS_A_CELL])
    begin = _PENDING_BLOCK * next_block(cells, PENDING_TAKEN)
    while begin < num_pending:
        end = min(begin + _PENDING_BLOCK, num_pending)
        for k in range(begin, end):
            i = np.int64(gate_order[k])
            row = first + (np.int64(ids[i]) if is_listed else i)
            is_pending = atomic_load(loaded, row) != LOADED
            if is_pending and not await_row(shard, thread, shard.gates, row):
                return False
        _values_of(shard, bias, gate_order, begin, end, end, x, function, values)
        begin = _PENDING_BLOCK * next_block(cells, PENDING_TAKEN)
    return True
