"""Which neurons are in memory: slots, and which neuron leaves when another needs its slot.

The first slots are pinned. The others are a clock: a slot that was used again since it was filled
has up to MOST_CREDIT passes of the hand, one that was not is the next to go. What a layer needs now
never goes, nor what is being read.
Source: the main queue of S3-FIFO (Yang et al., SOSP 2023); docs/storage.md has what was compared
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from numba_kernels.serve.doorbell import atomic_load, atomic_store
from numba_kernels.storage.read_queue import FAILED

MOST_CREDIT = np.uint8(3)

HAND, NUM_PINNED, EPOCH, NUM_WANTED, NUM_MISSED = range(5)  # words of `state`


class NeuronSlots(NamedTuple):
    """N neurons of all layers, S slots; see `neuron_file` for parts.

    slot_of (N,) int32, -1: not in memory; row_of (S,) int32, -1: empty; held (S,) int32: the parts
    that are there, which reading threads write, or FAILED of `read_queue`; asked (S,) uint8: those
    that were asked for; credit (S,) uint8; used (S,) int64: in which layer of which request last
    state (5,) int64: the hand, pinned slots, this request's number, neurons wanted and missed
    """

    slot_of: np.ndarray
    row_of: np.ndarray
    held: np.ndarray
    asked: np.ndarray
    credit: np.ndarray
    used: np.ndarray
    state: np.ndarray


def new_slots(num_neurons: int, num_slots: int, pinned: np.ndarray) -> NeuronSlots:
    """Empty slots; the first are for the neurons `pinned` (int32 rows) and stay so."""
    slots = NeuronSlots(
        slot_of=np.full(num_neurons, -1, np.int32),
        row_of=np.full(num_slots, -1, np.int32),
        held=np.zeros(num_slots, np.int32),
        asked=np.zeros(num_slots, np.uint8),
        credit=np.zeros(num_slots, np.uint8),
        used=np.zeros(num_slots, np.int64),
        state=np.zeros(5, np.int64),
    )
    slots.slot_of[pinned] = np.arange(pinned.size, dtype=np.int32)
    slots.row_of[: pinned.size] = pinned
    slots.state[HAND] = slots.state[NUM_PINNED] = pinned.size
    return slots


@njit(nogil=True, cache=True)
def forget_slots(slots):
    """Keep no neuron; none may be on its way."""
    for slot in range(slots.row_of.shape[0]):
        if slots.row_of[slot] >= 0:
            slots.slot_of[slots.row_of[slot]] = -1
            slots.row_of[slot] = -1
    slots.held[:] = 0
    slots.asked[:] = 0


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
def slot_for(slots, row):
    """The slot of neuron `row`, which is given one if it has none.

    Of neurons that are not pinned fewer may be wanted and read at once than there are other slots.
    """
    state, slot = slots.state, np.int64(slots.slot_of[row])
    if slot >= 0:
        if slots.used[slot] != state[EPOCH]:
            slots.used[slot] = state[EPOCH]
            slots.credit[slot] = min(MOST_CREDIT, slots.credit[slot] + np.uint8(1))
        return slot
    while True:
        slot = state[HAND]
        state[HAND] = slot + 1 if slot + 1 < slots.row_of.shape[0] else state[NUM_PINNED]
        before = slots.row_of[slot]
        if before < 0:
            break
        if slots.used[slot] == state[EPOCH] or _is_coming(slots, slot):
            continue
        if slots.credit[slot] == 0:
            slots.slot_of[before] = -1
            break
        slots.credit[slot] -= np.uint8(1)
    slots.row_of[slot], slots.slot_of[row] = row, slot
    slots.asked[slot], slots.credit[slot] = np.uint8(0), np.uint8(0)
    atomic_store(slots.held, slot, np.int32(0))
    slots.used[slot] = state[EPOCH]
    return slot
