"""A whole layer side by side in the last slots, as matrix products of a prompt want it.

Neurons that are in other slots stay there and are copied; the others are read into the last slots
and are as much in memory as any. A step that comes in between may take those slots again.
"""

import numpy as np

from numba_kernels.compiler import njit
from numba_kernels.storage.neuron_slots import empty_slot, put_in
from numba_kernels.storage.reads.neuron_file import take_row
from numba_kernels.storage.reads.read_queue import NOW, await_batch, settle
from numba_kernels.storage.stored_neurons import ask_marked, has_come, slot_lacking


@njit(nogil=True, cache=True)
def settle_reads(stored):
    """Return when nothing is being read; what was only asked for is not any more."""
    settle(stored.queue, stored.slots.asked)
    stored.queue.failure[:] = 0


@njit(nogil=True, cache=True)
def ask_for_layer(stored, layer, base, parts, most_bytes, most_gap):
    """Ask for what the layer's neurons lack of `parts`: the i-th goes to slot base + i.

    Nothing may be on its way.
    """
    slots = stored.slots
    first, last = stored.arrays.offsets[layer], stored.arrays.offsets[layer + 1]
    for i in range(last - first):
        if slots.row_of[base + i] != first + i:
            empty_slot(slots, base + i)
    num_missing = 0
    for row in range(first, last):
        place, slot = base + row - first, np.int64(slots.slot_of[row])
        if slot >= 0 and slot != place:
            if has_come(stored, slot, parts) == 1:
                continue
            empty_slot(slots, slot)
        if slot != place:
            put_in(slots, row, place)
        _, missing = slot_lacking(stored, row, parts)
        if missing:
            stored.marks[stored.file.places[row]] = row + 1
            stored.mark_parts[stored.file.places[row]] = missing
            num_missing += 1
    if num_missing:
        ask_marked(stored, most_bytes, most_gap)


@njit(nogil=True, cache=True)
def copy_layer(slots, rows, first, base, begin, end):
    """Copy those of neurons first + begin..end-1 to slot base + i that are in other slots.

    `rows` RowBytes of the slots.
    """
    for i in range(begin, end):
        slot = np.int64(slots.slot_of[first + i])
        if slot != base + i:
            if rows.gate.shape[0]:
                take_row(rows.gate[slot], rows.gate, base + i)
            if rows.up.shape[0]:
                take_row(rows.up[slot], rows.up, base + i)
            take_row(rows.down[slot], rows.down, base + i)


@njit(nogil=True, cache=True)
def await_layer(stored):
    """Wait until all that was asked for now has come; False where a read of it failed."""
    await_batch(stored.queue, NOW)
    return stored.queue.failure[0] == 0
