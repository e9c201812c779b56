"""Which neurons' rows are in memory: slots, and which neuron leaves when another needs its slot.

A cache of one part of neurons: gate rows, or up and down rows. Of each neuron it is known how often
it is wanted: by the profile at first, then by a mean that forgets. Of the next few slots the one
leaves whose neuron is wanted least. What a layer needs now never goes, nor what is being read. So
those that are wanted often stay, whatever passes through.

A layer looks up a thousand neurons while weights stream through the processor's caches. So all that
is asked of a neuron in memory lies by neurons, in their order; slots are only written to then.
Source: docs/storage.md has what was compared
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.serve.doorbell import atomic_load, atomic_store
from hotcold.numba_kernels.storage.read_queue import FAILED, LOADED, NOT_LOADED

DECAY = 1 / 64  # what one token more counts in how often a neuron is wanted
EVICTION_CANDIDATES = 16  # slots, of which the neuron that is wanted least leaves

HAND, EPOCH, NUM_LOOKUPS, NUM_MISSES = range(4)  # words of `state`
_LARGE = 1e18  # of a weight: then all are written in smaller units


class NeuronSlots(NamedTuple):
    """N neurons of all layers, S slots for a part of one each.

    slot_of (N,) int32, -1: not in memory; held (N,) int32: whether the part is in that slot, which
    reading threads write, NOTHING, HERE or FAILED; asked (N,) uint8: whether it was asked for;
    weights (N,) float32: how often it is wanted, in units of weight[0]
    row_of (S,) int32, -1: empty; used (S,) int64: in which layer of which request last;
    slot_weights (S,) float32: the weights of their neurons
    state (4,) int64: the slot to look at next, this request's number, neurons wanted and missed
    weight (1,) float64: of what is wanted always, which grows instead of all others shrinking
    """

    slot_of: np.ndarray
    loaded: np.ndarray
    requested: np.ndarray
    weights: np.ndarray
    row_of: np.ndarray
    used: np.ndarray
    slot_weights: np.ndarray
    state: np.ndarray
    weight: np.ndarray


def new_slots(rates: np.ndarray, num_slots: int) -> NeuronSlots:
    """Empty slots; rates (N,): how often each neuron is wanted, as far as that is known."""
    return NeuronSlots(
        slot_of=np.full(rates.size, -1, np.int32),
        loaded=np.zeros(rates.size, np.int32),
        requested=np.zeros(rates.size, np.uint8),
        weights=rates.astype(np.float32),
        row_of=np.full(num_slots, -1, np.int32),
        used=np.zeros(num_slots, np.int64),
        slot_weights=np.zeros(num_slots, np.float32),
        state=np.zeros(4, np.int64),
        weight=np.ones(1, np.float64),
    )


@njit(nogil=True, cache=True)
def has_all(slots):
    """Whether each neuron has a slot of its own, which then is its number: all stay in memory."""
    return slots.row_of.shape[0] == slots.slot_of.shape[0]


@njit(nogil=True, cache=True)
def evict(slots, slot):
    """Keep nothing in the slot; nothing of it may be on its way."""
    row = np.int64(slots.row_of[slot])
    if row >= 0:
        slots.slot_of[row] = -1
        slots.requested[row] = np.uint8(0)
        atomic_store(slots.loaded, row, NOT_LOADED)
    slots.row_of[slot] = -1


@njit(nogil=True, cache=True)
def evict_all(slots):
    """Keep no neuron; none may be on its way."""
    for slot in range(slots.row_of.shape[0]):
        evict(slots, slot)


@njit(nogil=True, cache=True)
def begin_request(slots, num_neurons):
    """Before a request for a layer of so many neurons: what was wanted before counts less.

    After all layers by 1 - MEMORY: weights follow a mean over some 1 / MEMORY tokens.
    """
    slots.state[EPOCH] += 1
    slots.weight[0] *= (1 - DECAY) ** (-num_neurons / slots.slot_of.shape[0])
    if slots.weight[0] > _LARGE:
        smaller = np.float32(1 / slots.weight[0])
        slots.weights[:] *= smaller
        slots.slot_weights[:] *= smaller
        slots.weight[0] = 1.0


@njit(nogil=True, cache=True)
def look_up(slots, first, ids, count, places, missing):
    """Count neurons first + ids[:count] as wanted, or `count` from `first` on without `ids`.

    places[i] = the slot of each that has been asked for, be it there or still to come. missing[:n]
    are the numbers i of the others; returns n.
    """
    slot_of, loaded, requested, weights = (
        slots.slot_of,
        slots.loaded,
        slots.requested,
        slots.weights,
    )
    used, slot_weights, state = slots.used, slots.slot_weights, slots.state
    epoch, more = state[EPOCH], np.float32(DECAY * slots.weight[0])
    num_missing, num_pending, is_listed = 0, 0, ids.shape[0] > 0
    for i in range(count):
        row = first + (np.int64(ids[i]) if is_listed else i)
        weights[row] += more
        if requested[row] and loaded[row] != FAILED:
            slot = slot_of[row]
            used[slot], slot_weights[slot], places[i] = epoch, weights[row], slot
            num_pending += loaded[row] != LOADED
        else:
            missing[num_missing] = i
            num_missing += 1
    state[NUM_LOOKUPS] += count
    state[NUM_MISSES] += num_missing + num_pending
    return num_missing


@njit(nogil=True, cache=True)
def load_state(slots, row):
    """1 where the neuron's part is in its slot, 0 where it is to come, -1 where a read failed."""
    loaded = atomic_load(slots.loaded, np.int64(row))
    return -1 if loaded == FAILED else np.int64(loaded)


@njit(nogil=True, cache=True)
def is_loaded(slots, row):
    """Whether the part is in memory."""
    return atomic_load(slots.loaded, np.int64(row)) == LOADED


@njit(nogil=True, cache=True)
def was_used(slots, row):
    """Whether the neuron was wanted in this request."""
    slot = slots.slot_of[row]
    return slot >= 0 and slots.used[slot] == slots.state[EPOCH]


@njit(nogil=True, cache=True)
def _is_pending(slots, row):
    """Whether the part is being read."""
    return slots.requested[row] != 0 and atomic_load(slots.loaded, np.int64(row)) == NOT_LOADED


@njit(nogil=True, cache=True)
def assign_slot(slots, row, slot):
    """Neuron `row`, which is in no slot, has this one from now on, and nothing of it is there."""
    evict(slots, slot)
    slots.row_of[slot], slots.slot_of[row] = row, slot


@njit(nogil=True, cache=True)
def claim(slots, row):
    """The slot of neuron `row`, which is given one if it has none, and whether to ask for its part.

    It counts as asked for from now on; after a read that failed it is asked for again. Fewer may be
    wanted and read at once than there are slots.
    """
    slot = np.int64(slots.slot_of[row])
    if slot < 0:
        slot = _choose_victim(slots)
        assign_slot(slots, row, slot)
    elif atomic_load(slots.loaded, np.int64(row)) == FAILED:
        atomic_store(slots.loaded, np.int64(row), NOT_LOADED)
        slots.requested[row] = np.uint8(0)
    slots.used[slot], slots.slot_weights[slot] = slots.state[EPOCH], slots.weights[row]
    is_missing = slots.requested[row] == 0
    slots.requested[row] = np.uint8(1)
    return slot, is_missing


@njit(nogil=True, cache=True)
def _choose_victim(slots):
    """Of the next slots the first that is empty, else the one whose neuron is wanted least."""
    state, found, least, num_seen = slots.state, -1, np.float32(0), 0
    while found < 0 or num_seen < EVICTION_CANDIDATES:
        slot = state[HAND]
        state[HAND] = slot + 1 if slot + 1 < slots.row_of.shape[0] else 0
        num_seen += 1
        row, weight = slots.row_of[slot], slots.slot_weights[slot]
        if row < 0:
            return slot
        if slots.used[slot] == state[EPOCH] or (found >= 0 and weight >= least):
            continue
        if not _is_pending(slots, row):
            found, least = slot, weight
    return found
