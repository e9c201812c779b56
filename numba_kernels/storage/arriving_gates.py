"""Gates of one token's candidates: those in memory are multiplied while the others are read.

Products of gates are the same whichever thread computes them, and when: threads take a few at once.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate
from hotcold.numba_kernels.decode.rows import rows_ahead
from hotcold.numba_kernels.ir.vector_ir import dot_ahead, prefetch_row
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL, atomic_load
from hotcold.numba_kernels.serve.work_stealing import block_rows, next_block
from hotcold.numba_kernels.storage.offloaded_neurons import (
    HERE_TAKEN,
    LATE_TAKEN,
    MAX_BYTES,
    MAX_GAP,
    NUM_HERE,
    NUM_LATE,
    READS_WHOLE,
    ask_marked,
    await_row,
    want_gates,
    want_with_gates,
)
from hotcold.numba_kernels.storage.read_queue import HERE

_LATE_TOGETHER = 8  # late gates that a thread takes at once


@njit(nogil=True, cache=True)
def ask_gates(stored, first, num_neurons, is_listed, ids, keeps_all):
    """Ask for what candidates' gates lack, and with it for the rest; by one thread alone.

    The rest is read at once where it is wanted surely (`keeps_all`), or where that takes less time.
    `stored.gate_slots` is complete then, `stored.late` has those candidates whose gates are to
    come, and after them the others.
    """
    count = ids.shape[0] if is_listed else num_neurons
    want_gates(stored, first, ids, count, stored.gate_slots, stored.missing)
    if keeps_all or (is_listed and stored.options[READS_WHOLE]):
        want_with_gates(stored, first, ids, count)
    held, late, num_late = stored.gates.held, stored.late, 0
    for i in range(count):
        row = first + (np.int64(ids[i]) if is_listed else i)
        if atomic_load(held, row) == HERE:
            late[count - 1 - (i - num_late)] = i
        else:
            late[num_late] = i
            num_late += 1
    ask_marked(stored, stored.options[MAX_BYTES], stored.options[MAX_GAP])
    stored.counters[:] = 0
    stored.counters[NUM_LATE * INTS_A_CELL] = num_late
    stored.counters[NUM_HERE * INTS_A_CELL] = count - num_late


@njit(nogil=True, cache=True)
def _values_of(stored, gate_bias, order, begin, end, last, x, function, values):
    """values[i] = fn(gate . x[0] + bias) of candidates i = order[begin:end], before order[last]."""
    gate, slots, distance = stored.arrays.gate, stored.gate_slots, rows_ahead(stored.arrays.gate)
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
def values_here(stored, x, function, values):
    """One token's gates that are in memory, by all threads; whoever is free takes the next few."""
    cells = stored.counters
    num_late = np.int64(cells[NUM_LATE * INTS_A_CELL])
    last = num_late + np.int64(cells[NUM_HERE * INTS_A_CELL])
    size = block_rows(stored.arrays.gate)
    begin = num_late + size * next_block(cells, HERE_TAKEN)
    while begin < last:
        end = min(begin + size, last)
        bias = stored.arrays.gate_bias
        _values_of(stored, bias, stored.late, begin, end, last, x, function, values)
        begin = num_late + size * next_block(cells, HERE_TAKEN)


@njit(nogil=True, cache=True)
def values_late(stored, thread, first, is_listed, ids, x, function, values):
    """The others as they come; False where one could not be read."""
    cells, late, bias, held = (
        stored.counters,
        stored.late,
        stored.arrays.gate_bias,
        stored.gates.held,
    )
    num_late = np.int64(cells[NUM_LATE * INTS_A_CELL])
    begin = _LATE_TOGETHER * next_block(cells, LATE_TAKEN)
    while begin < num_late:
        end = min(begin + _LATE_TOGETHER, num_late)
        for k in range(begin, end):
            i = np.int64(late[k])
            row = first + (np.int64(ids[i]) if is_listed else i)
            is_late = atomic_load(held, row) != HERE
            if is_late and not await_row(stored, thread, stored.gates, row):
                return False
        _values_of(stored, bias, late, begin, end, end, x, function, values)
        begin = _LATE_TOGETHER * next_block(cells, LATE_TAKEN)
    return True
