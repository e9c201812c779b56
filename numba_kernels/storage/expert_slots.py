"""A cache of whole experts: slots of rows in memory, lookups, eviction.

A unit is a service's part of one block of one layer: of an expert, a shared expert or a dense
layer's FFN. Units that every token uses have rows of their own for good; all others share slots of
one size. A miss evicts the unit that was used least, by a mean over the last tokens that begins
with the profile's frequencies; none that this request uses, and none with a pending read.
Source: docs/storage.md compares rules of eviction
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.serve.doorbell import atomic_load, atomic_store
from hotcold.numba_kernels.storage.read_queue import FAILED, LOADED, NOT_LOADED

DECAY = 1 / 16  # weight of one token in the mean frequency of use
EPOCH, NUM_LOOKUPS, NUM_MISSES = range(3)  # words of `state`
_LARGE = 1e18  # a weight at which all are rescaled
_FREE = np.float32(-1)  # as weight of a slot: it is empty


class ExpertSlots(NamedTuple):
    """E units, S slots, N bundles.

    firsts (E + 1,) int64: unit e has bundles firsts[e]:firsts[e + 1]
    row_of (E,) int64: a unit's first row in memory, -1 while it has none
    slot_of (E,) int32: its slot, -1 for none, also where it has rows of its own
    weights (E,) float32: frequencies of use, in units of weight[0]
    unit_of (S,) int32: -1 where empty; slot_rows (S,) int64: a slot's first row; used (S,) int64:
    epoch of the last use; slot_weights (S,) float32: the weights of the slots' units
    bundle_rows (N,) int32: row_of of each bundle's unit, as `RowBytes` has it
    loaded (N,) int32, requested (N,) uint8: of bundles, as in `NeuronSlots`
    state (3,) int64: the epoch (a request of a layer), lookups and misses of units so far
    misses (E,) uint32: of each unit so far; may be in shared memory
    weight (1,) float64: of a unit used by every token; it grows instead of all others decaying
    """

    firsts: np.ndarray
    row_of: np.ndarray
    slot_of: np.ndarray
    weights: np.ndarray
    unit_of: np.ndarray
    slot_rows: np.ndarray
    used: np.ndarray
    slot_weights: np.ndarray
    bundle_rows: np.ndarray
    loaded: np.ndarray
    requested: np.ndarray
    state: np.ndarray
    misses: np.ndarray
    weight: np.ndarray


def new_expert_slots(
    firsts: np.ndarray, rates: np.ndarray, own_rows: np.ndarray, slot_rows: np.ndarray
) -> ExpertSlots:
    """Empty slots.

    rates (E,): each unit's frequency of use; own_rows (E,): the first row of a unit that has rows
    of its own, else -1; slot_rows (S,): the first row of each slot
    """
    num_bundles = int(firsts[-1])
    rows = np.repeat(own_rows, np.diff(firsts))
    return ExpertSlots(
        firsts=firsts.astype(np.int64),
        row_of=own_rows.astype(np.int64),
        slot_of=np.full(rates.size, -1, np.int32),
        weights=rates.astype(np.float32),
        unit_of=np.full(slot_rows.size, -1, np.int32),
        slot_rows=slot_rows.astype(np.int64),
        used=np.zeros(slot_rows.size, np.int64),
        slot_weights=np.full(slot_rows.size, _FREE, np.float32),
        bundle_rows=rows.astype(np.int32),
        loaded=np.zeros(num_bundles, np.int32),
        requested=np.zeros(num_bundles, np.uint8),
        state=np.zeros(3, np.int64),
        misses=np.zeros(rates.size, np.uint32),
        weight=np.ones(1, np.float64),
    )


@njit(nogil=True, cache=True)
def begin_epoch(slots, num_layers):
    """Start a request of one of `num_layers` layers: earlier uses decay, by DECAY over all."""
    slots.state[EPOCH] += 1
    slots.weight[0] *= (1 - DECAY) ** (-1 / num_layers)
    if slots.weight[0] > _LARGE:
        smaller = np.float32(1 / slots.weight[0])
        for unit in range(slots.weights.shape[0]):
            slots.weights[unit] *= smaller
        for slot in range(slots.slot_weights.shape[0]):
            if slots.unit_of[slot] >= 0:
                slots.slot_weights[slot] *= smaller
        slots.weight[0] = 1.0


@njit(nogil=True, cache=True)
def unit_state(slots, unit):
    """1 where all of the unit is loaded, 0 where some is not, -1 where a read failed."""
    state = np.int64(1)
    for bundle in range(slots.firsts[unit], slots.firsts[unit + 1]):
        found = atomic_load(slots.loaded, bundle)
        if found == FAILED:
            return np.int64(-1)
        if found != LOADED:
            state = np.int64(0)
    return state


@njit(nogil=True, cache=True)
def use(slots, unit):
    """Count a use of the unit, which this request must not evict; whether it is loaded."""
    state, slot = slots.state, slots.slot_of[unit]
    slots.weights[unit] += np.float32(DECAY * slots.weight[0])
    if slot >= 0:
        slots.used[slot], slots.slot_weights[slot] = state[EPOCH], slots.weights[unit]
    is_loaded = slots.row_of[unit] >= 0 and unit_state(slots, unit) > 0
    state[NUM_LOOKUPS] += 1
    state[NUM_MISSES] += not is_loaded
    slots.misses[unit] += np.uint32(not is_loaded)
    return is_loaded


@njit(nogil=True, cache=True)
def keep(slots, unit):
    """This request must not evict the unit; no use is counted."""
    slot = slots.slot_of[unit]
    if slot >= 0:
        slots.used[slot] = slots.state[EPOCH]


@njit(nogil=True, cache=True)
def _is_pending(slots, unit):
    """Whether a read of the unit is pending."""
    for bundle in range(slots.firsts[unit], slots.firsts[unit + 1]):
        if slots.requested[bundle] and atomic_load(slots.loaded, bundle) == NOT_LOADED:
            return True
    return False


@njit(nogil=True, cache=True)
def evict_unit(slots, slot):
    """Empty the slot; it may have no pending read."""
    unit = np.int64(slots.unit_of[slot])
    if unit >= 0:
        slots.slot_of[unit], slots.row_of[unit] = -1, -1
        for bundle in range(slots.firsts[unit], slots.firsts[unit + 1]):
            slots.requested[bundle] = np.uint8(0)
            atomic_store(slots.loaded, bundle, NOT_LOADED)
    slots.unit_of[slot], slots.slot_weights[slot], slots.used[slot] = -1, _FREE, 0


@njit(nogil=True, cache=True)
def evict_units(slots):
    """Empty all slots; no read may be pending."""
    for slot in range(slots.unit_of.shape[0]):
        evict_unit(slots, slot)


@njit(nogil=True, cache=True)
def _choose_slot(slots, most):
    """The slot whose unit was used least, and less than `most`; -1 where there is none."""
    weights, used, epoch = slots.slot_weights, slots.used, slots.state[EPOCH]
    found, least = -1, np.float32(most)
    for slot in range(weights.shape[0]):
        if weights[slot] < least and used[slot] != epoch:
            unit = np.int64(slots.unit_of[slot])
            if unit < 0:
                return slot
            if not _is_pending(slots, unit):
                found, least = slot, weights[slot]
    return found


@njit(nogil=True, cache=True)
def claim_unit(slots, unit, most):
    """Give the unit rows, if it has none, instead of one used less than `most`.

    Returns whether it has rows. This request does not evict it.
    """
    if slots.row_of[unit] < 0:
        slot = _choose_slot(slots, most)
        if slot < 0:
            return False
        evict_unit(slots, slot)
        slots.unit_of[slot], slots.slot_of[unit] = unit, slot
        slots.row_of[unit] = slots.slot_rows[slot]
        slots.slot_weights[slot] = slots.weights[unit]
        for bundle in range(slots.firsts[unit], slots.firsts[unit + 1]):
            slots.bundle_rows[bundle] = slots.row_of[unit]
    keep(slots, unit)
    return True


@njit(nogil=True, cache=True)
def list_missing(slots, unit, bundles, count):
    """Append the unit's bundles that have to be read, now requested; returns the new count.

    A bundle whose read has failed is requested again.
    """
    for bundle in range(slots.firsts[unit], slots.firsts[unit + 1]):
        if atomic_load(slots.loaded, bundle) == FAILED:
            atomic_store(slots.loaded, bundle, NOT_LOADED)
            slots.requested[bundle] = np.uint8(0)
        if not slots.requested[bundle]:
            slots.requested[bundle] = np.uint8(1)
            bundles[count] = bundle
            count += 1
    return count
