"""A cache of one part of neurons, gate rows or up and down rows: slots, lookups, eviction.

Each neuron has a frequency of use, at first from the profile, then a decaying mean. A miss evicts
the least frequently used neuron of the next few slots, but none that this request uses and none
with a pending read. So frequently used neurons survive any scan.

A layer looks up a thousand neurons while weights stream through the processor's caches. So what a
lookup reads is indexed by neuron, in order; it only writes to slots.
Source: docs/storage.md compares eviction policies
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.serve.doorbell import atomic_load, atomic_store
from hotcold.numba_kernels.storage.read_queue import FAILED, LOADED, NOT_LOADED

DECAY = 1 / 64  # weight of one token in the mean frequency of use
EVICTION_CANDIDATES = 16  # slots compared by one eviction

HAND, EPOCH, NUM_LOOKUPS, NUM_MISSES = range(4)  # words of `state`
_LARGE = 1e18  # a weight at which all are rescaled


class NeuronSlots(NamedTuple):
    """N neurons of all layers, and S slots that hold a part of one neuron each.

    slot_of (N,) int32: -1 without a slot; loaded (N,) int32: NOT_LOADED, LOADED or FAILED, written
    by reading threads; requested (N,) uint8: whether a read was requested;
    weights (N,) float32: frequencies of use, in units of weight[0]
    row_of (S,) int32: -1 where empty; used (S,) int64: epoch of the last use; slot_weights (S,)
    float32: the weights of the slots' neurons
    state (4,) int64: the clock hand, the epoch (a request of a layer), lookups and misses so far
    weight (1,) float64: of a neuron used by every token; it grows instead of all others decaying
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
    """Empty slots; rates (N,): each neuron's frequency of use, as far as it is known."""
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
    """Whether each neuron has a slot of its own, the one of its number: nothing is evicted."""
    return slots.row_of.shape[0] == slots.slot_of.shape[0]


@njit(nogil=True, cache=True)
def evict(slots, slot):
    """Empty the slot; it may have no pending read."""
    row = np.int64(slots.row_of[slot])
    if row >= 0:
        slots.slot_of[row] = -1
        slots.requested[row] = np.uint8(0)
        atomic_store(slots.loaded, row, NOT_LOADED)
    slots.row_of[slot] = -1


@njit(nogil=True, cache=True)
def evict_all(slots):
    """Empty all slots; no read may be pending."""
    for slot in range(slots.row_of.shape[0]):
        evict(slots, slot)


@njit(nogil=True, cache=True)
def begin_request(slots, num_neurons):
    """Start an epoch, a request for a layer of `num_neurons`: earlier uses decay.

    By 1 - DECAY over all layers, so that weights are means over about 1 / DECAY tokens.
    """
    slots.state[EPOCH] += 1
    slots.weight[0] *= (1 - DECAY) ** (-num_neurons / slots.slot_of.shape[0])
    if slots.weight[0] > _LARGE:
        smaller = np.float32(1 / slots.weight[0])
        for row in range(slots.weights.shape[0]):
            slots.weights[row] *= smaller
        for slot in range(slots.slot_weights.shape[0]):
            slots.slot_weights[slot] *= smaller
        slots.weight[0] = 1.0


@njit(nogil=True, cache=True)
def look_up(slots, first, ids, count, places, missing):
    """Look up neurons first + ids[:count], or first..first + count - 1 where `ids` is empty.

    Counts a use of each. places[i] = the slot of neuron i if it is loaded or its read is pending;
    missing[:n] are the others' indices i. Returns n.
    """
    slot_of, loaded, requested = slots.slot_of, slots.loaded, slots.requested
    weights, used, slot_weights = slots.weights, slots.used, slots.slot_weights
    state = slots.state
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
    """1 where the neuron's part is loaded, 0 where its read is pending, -1 where it failed."""
    loaded = atomic_load(slots.loaded, np.int64(row))
    return -1 if loaded == FAILED else np.int64(loaded)


@njit(nogil=True, cache=True)
def is_loaded(slots, row):
    """Whether the neuron's part is in memory."""
    return atomic_load(slots.loaded, np.int64(row)) == LOADED


@njit(nogil=True, cache=True)
def was_used(slots, row):
    """Whether the neuron was used in this epoch."""
    slot = slots.slot_of[row]
    return slot >= 0 and slots.used[slot] == slots.state[EPOCH]


@njit(nogil=True, cache=True)
def _is_pending(slots, row):
    """Whether the neuron's read is pending."""
    return slots.requested[row] != 0 and atomic_load(slots.loaded, np.int64(row)) == NOT_LOADED


@njit(nogil=True, cache=True)
def assign_slot(slots, row, slot):
    """Assign the slot to neuron `row`, which had none; nothing is loaded yet."""
    evict(slots, slot)
    slots.row_of[slot], slots.slot_of[row] = row, slot


@njit(nogil=True, cache=True)
def claim(slots, row):
    """The slot of neuron `row`, assigned if it had none, and whether its part has to be read.

    The part counts as requested from now on; after a failed read it is requested again. Fewer
    neurons may be in use or pending at once than there are slots.
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
    """Of the next slots the first empty one, else the one with the least frequently used neuron."""
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
