"""A whole layer side by side in the last slots, as matrix products of a prompt want it.

Neurons that are in other slots stay there and are copied; the others are read into the last slots
and are as much in memory as any. A step that comes in between may take those slots again.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.storage.neuron_file import GATE, REST, take_row
from hotcold.numba_kernels.storage.neuron_slots import empty_slot, has_all, is_here, put_in
from hotcold.numba_kernels.storage.offloaded_neurons import ask_marked, claim_gate, claim_up_down
from hotcold.numba_kernels.storage.read_queue import NOW, await_batch, settle


@njit(nogil=True, cache=True)
def settle_reads(stored):
    """Return when nothing is being read; what was only asked for is not any more."""
    settle(stored.queue, stored.gates.asked, stored.up_downs.asked)
    stored.queue.failure[:] = 0


@njit(nogil=True, cache=True)
def _make_room(slots, first, last, base):
    """The i-th neuron has slot base + i, unless it is in memory elsewhere."""
    for i in range(last - first):
        if slots.row_of[base + i] != first + i:
            empty_slot(slots, base + i)
    for row in range(first, last):
        place, slot = base + row - first, np.int64(slots.slot_of[row])
        if slot >= 0 and slot != place and not is_here(slots, row):
            empty_slot(slots, slot)
        if slots.slot_of[row] < 0:
            put_in(slots, row, place)


@njit(nogil=True, cache=True)
def ask_for_layer(stored, first, last, gate_base, rest_base, most_bytes, most_gap):
    """Ask for what a layer's neurons lack: the i-th goes to slot gate_base + i, rest_base + i.

    Nothing may be on its way.
    """
    gates_stay = has_all(stored.gates)
    if not gates_stay:
        _make_room(stored.gates, first, last, gate_base)
    _make_room(stored.up_downs, first, last, rest_base)
    gates, up_downs, arrays, in_file = (
        stored.gates,
        stored.up_downs,
        stored.arrays,
        stored.file.places,
    )
    gate_bias, up_bias, norms = stored.gate_bias, stored.up_bias, stored.down_norms
    num_missing = 0
    for row in range(first, last):
        part = 0
        if not gates_stay and claim_gate(gates, gate_bias, arrays.gate_bias, row)[1]:
            part = GATE
        if claim_up_down(up_downs, up_bias, arrays.up_bias, norms, arrays.down_norms, row)[1]:
            part |= REST
        if part:
            stored.marks[in_file[row]], stored.mark_parts[in_file[row]] = row + 1, part
            num_missing += 1
    if num_missing:
        ask_marked(stored, most_bytes, most_gap)


@njit(nogil=True, cache=True)
def copy_layer(rows, gates, up_downs, first, gate_base, rest_base, begin, end):
    """Copy those of neurons first + begin..end-1 to their places that are in other slots.

    `rows` RowBytes; `gates`, `up_downs` NeuronSlots.
    """
    for i in range(begin, end):
        slot = np.int64(gates.slot_of[first + i])
        if not has_all(gates) and slot != gate_base + i:
            take_row(rows.gate[slot], rows.gate, gate_base + i)
        slot = np.int64(up_downs.slot_of[first + i])
        if slot != rest_base + i:
            if rows.up.shape[0]:
                take_row(rows.up[slot], rows.up, rest_base + i)
            take_row(rows.down[slot], rows.down, rest_base + i)


@njit(nogil=True, cache=True)
def await_layer(stored):
    """Wait until all that was asked for now has come; False where a read of it failed."""
    await_batch(stored.queue, NOW)
    return stored.queue.failure[0] == 0
