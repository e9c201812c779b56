"""Which neurons are in memory: slots, and which neuron leaves when another needs its slot.

Of each neuron it is known how often it is wanted: by the profile at first, then by a mean that
forgets. Of the next few slots the one leaves whose neuron is wanted least. What a layer needs now
never goes, nor what is being read. So those that are wanted often stay, whatever passes through.
Source: docs/storage.md has what was compared
"""

from typing import NamedTuple

import numpy as np

from numba_kernels.compiler import njit
from numba_kernels.serve.doorbell import atomic_load, atomic_store
from numba_kernels.storage.reads.read_queue import FAILED

MEMORY = np.float32(1 / 64)  # what one request more counts in how often a neuron is wanted
LOOKED_AT = 16  # slots, of which the neuron that is wanted least leaves

HAND, EPOCH, NUM_WANTED, NUM_MISSED = range(4)  # words of `state`


class NeuronSlots(NamedTuple):
    """N neurons of all layers, S slots; see `neuron_file` for parts.

    slot_of (N,) int32, -1: not in memory; rates (N,) float32: how often it is wanted, 0 to 1
    row_of (S,) int32, -1: empty; held (S,) int32: the parts that are there, which reading threads
    write, or FAILED of `read_queue`; asked (S,) uint8: those that were asked for; used (S,) int64:
    in which layer of which request last
    state (4,) int64: the slot to look at next, this request's number, neurons wanted and missed
    """

    slot_of: np.ndarray
    rates: np.ndarray
    row_of: np.ndarray
    held: np.ndarray
    asked: np.ndarray
    used: np.ndarray
    state: np.ndarray


def new_slots(rates: np.ndarray, num_slots: int) -> NeuronSlots:
    """Empty slots; rates (N,): how often each neuron is wanted, as far as that is known."""
    return NeuronSlots(
        slot_of=np.full(rates.size, -1, np.int32),
        rates=rates.astype(np.float32),
        row_of=np.full(num_slots, -1, np.int32),
        held=np.zeros(num_slots, np.int32),
        asked=np.zeros(num_slots, np.uint8),
        used=np.zeros(num_slots, np.int64),
        state=np.zeros(4, np.int64),
    )


@njit(nogil=True, cache=True)
def empty_slot(slots, slot):
    """Keep nothing in the slot; nothing of it may be on its way."""
    if slots.row_of[slot] >= 0:
        slots.slot_of[slots.row_of[slot]] = -1
    slots.row_of[slot] = -1
    slots.asked[slot] = np.uint8(0)
    atomic_store(slots.held, slot, np.int32(0))


@njit(nogil=True, cache=True)
def forget_slots(slots):
    """Keep no neuron; none may be on its way."""
    for slot in range(slots.row_of.shape[0]):
        empty_slot(slots, slot)


@njit(nogil=True, cache=True)
def forget_rates(slots, first, last):
    """Before a request of neurons first..last-1: what was wanted before counts a little less."""
    rates = slots.rates[first:last]
    for i in range(rates.shape[0]):
        rates[i] -= rates[i] * MEMORY


@njit(nogil=True, cache=True)
def count_wanted(slots, row):
    """The neuron is wanted in this request, after `forget_rates`."""
    slots.rates[row] += MEMORY


@njit(nogil=True, cache=True)
def _is_coming(slots, slot):
    """Whether a part of the slot is being read."""
    held = atomic_load(slots.held, slot)
    return not held & FAILED and np.int32(slots.asked[slot]) & ~held != 0


@njit(nogil=True, cache=True)
def lacking(slots, slot, parts):
    """Those of `parts` that have to be asked for; they count as asked for from now on.

    Parts of a read that failed are asked for again.
    """
    held = atomic_load(slots.held, slot)
    if held & FAILED:
        held &= ~FAILED
        atomic_store(slots.held, slot, np.int32(held))
        slots.asked[slot] = np.uint8(held)
    missing = np.uint8(parts & ~np.int32(slots.asked[slot]))
    slots.asked[slot] |= missing
    return missing


@njit(nogil=True, cache=True)
def put_in(slots, row, slot):
    """Neuron `row`, which is in no slot, has this one from now on, and nothing of it is there."""
    empty_slot(slots, slot)
    slots.row_of[slot], slots.slot_of[row] = row, slot


@njit(nogil=True, cache=True)
def slot_for(slots, row):
    """The slot of neuron `row`, which is given one if it has none.

    Fewer may be wanted and read at once than there are slots.
    """
    state, slot = slots.state, np.int64(slots.slot_of[row])
    if slot < 0:
        slot = _next_to_leave(slots)
        put_in(slots, row, slot)
    slots.used[slot] = state[EPOCH]
    return slot


@njit(nogil=True, cache=True)
def _next_to_leave(slots):
    """Of the next slots the first that is empty, else the one whose neuron is wanted least."""
    state, found, least, num_seen = slots.state, -1, np.float32(0), 0
    while found < 0 or num_seen < LOOKED_AT:
        slot = state[HAND]
        state[HAND] = slot + 1 if slot + 1 < slots.row_of.shape[0] else 0
        num_seen += 1
        if slots.row_of[slot] < 0:
            return slot
        if slots.used[slot] == state[EPOCH] or _is_coming(slots, slot):
            continue
        rate = slots.rates[slots.row_of[slot]]
        if found < 0 or rate < least:
            found, least = slot, rate
    return found
