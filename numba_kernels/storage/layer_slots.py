"""A whole layer in adjacent slots, the last ones, for a prompt's matrix products.

Neurons in other slots are copied and also stay there; the others are read into the last slots. A
decode step in between may evict them again.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.storage.neuron_file import copy_row
from hotcold.numba_kernels.storage.offloaded_units import claim, submit_marked
from hotcold.numba_kernels.storage.read_queue import NOW, await_batch
from hotcold.numba_kernels.storage.slots import assign_slot, evict, has_all, load_state


@njit(nogil=True, cache=True)
def _assign_places(slots, first, last, base):
    """Assign slot base + i to the i-th neuron unless it is loaded in another slot."""
    for i in range(last - first):
        if slots.unit_of[base + i] != first + i:
            evict(slots, base + i)
    for row in range(first, last):
        place, slot = base + row - first, np.int64(slots.slot_of[row])
        if slot >= 0 and slot != place and load_state(slots, row) <= 0:
            evict(slots, slot)
        if slots.slot_of[row] < 0:
            assign_slot(slots, row, place)


@njit(nogil=True, cache=True)
def request_layer(shard, first, last, gate_base, up_down_base, max_gap):
    """Submit reads of a layer's neurons that are not in memory; no other read may be pending.

    The i-th neuron's parts go to slots gate_base + i and up_down_base + i.
    """
    gates_stay = has_all(shard.gates)
    if not gates_stay:
        _assign_places(shard.gates, first, last, gate_base)
    _assign_places(shard.up_downs, first, last, up_down_base)
    for row in range(first, last):
        if not gates_stay:
            claim(shard, shard.gates, row)
        claim(shard, shard.up_downs, row)
    submit_marked(shard, max_gap)


@njit(nogil=True, cache=True)
def copy_layer(rows, gates, up_downs, first, gate_base, up_down_base, begin, end):
    """Copy neurons first + begin..end-1 from other slots to their places in the last ones.

    `rows` RowBytes; `gates`, `up_downs` Slots.
    """
    for i in range(begin, end):
        slot = np.int64(gates.slot_of[first + i])
        if not has_all(gates) and slot != gate_base + i:
            copy_row(rows.gate[slot], rows.gate, gate_base + i)
        slot = np.int64(up_downs.slot_of[first + i])
        if slot != up_down_base + i:
            if rows.up.shape[0]:
                copy_row(rows.up[slot], rows.up, up_down_base + i)
            copy_row(rows.down[slot], rows.down, up_down_base + i)


@njit(nogil=True, cache=True)
def await_layer(shard):
    """Wait for the layer's reads; False where one failed."""
    await_batch(shard.queue, NOW)
    return shard.queue.failure[0] == 0
