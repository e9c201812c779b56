"""A cache of units on storage: slots in memory, lookups, eviction, waits.

A unit is what is evicted at once: one part of a neuron, its gate row or its up and down rows, or a
service's part of one block of one layer: of an expert, a shared expert or a dense layer's FFN. It
is read as one bundle of the file or as several.

Each unit has a frequency of use, at first from the profile, then a decaying mean. A miss evicts
the least frequently used unit of the next few slots, but none that this request uses and none with
a pending read. So frequently used units survive any scan. Units that every token uses stay: they
have rows of their own and no slot.

A layer looks up a thousand neurons while weights stream through the processor's caches. So what a
lookup reads is indexed by unit, in order; it only writes to slots.
Source: docs/storage.md compares rules of eviction
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.loops.doorbell import atomic_load, atomic_store, now_ns
from hotcold.numba_kernels.storage.neuron_file import GATE, UP_DOWN
from hotcold.numba_kernels.storage.read_queue import (
    FAILED,
    LOADED,
    NOT_LOADED,
    await_more,
    num_completed,
)

# Weight of one token in the mean frequency of use.
NEURON_DECAY, EXPERT_DECAY = 1 / 64, 1 / 16
CANDIDATES = 16  # slots of neurons compared by one eviction

HAND, EPOCH = range(2)  # words of `state`
NO_SLOT, STAYS = -1, -2  # in `slot_of`
_LARGE = 1e18  # a weight at which all are rescaled


class Slots(NamedTuple):
    """E units of all layers, N bundles, and S slots that hold a unit each.

    firsts (E + 1,) int64: unit e has bundles firsts[e]:firsts[e + 1]; (0,) where each has its own
    slot_of (E,) int32: NO_SLOT without one, STAYS where it needs none; row_of (E,) int32: the first
    of its rows in memory, of units of a row the same array; weights (E,) float32: frequencies of
    use, in units of weight[0]
    loaded (N,) int32: NOT_LOADED, LOADED or FAILED, written by reading threads; requested (N,)
    uint8: whether a read was requested
    unit_of (S,) int32: -1 where empty; used (S,) int64: epoch of the last use; slot_weights (S,)
    float32: the weights of the slots' units
    state (2,) int64: the clock hand, the epoch (a request of a layer)
    weight (1,) float64: of a unit used by every token; it grows instead of all others decaying
    part: which part of its bundles a unit is, as bits; slot s has `rows_a_slot` rows from
    first_row + s * rows_a_slot on
    decay: of the weights, by one token; candidates: slots compared by one eviction
    """

    firsts: np.ndarray
    slot_of: np.ndarray
    row_of: np.ndarray
    weights: np.ndarray
    loaded: np.ndarray
    requested: np.ndarray
    unit_of: np.ndarray
    used: np.ndarray
    slot_weights: np.ndarray
    state: np.ndarray
    weight: np.ndarray
    part: int
    first_row: int
    rows_a_slot: int
    decay: float
    candidates: int


def neuron_slots(rates: np.ndarray, num_slots: int, part: int = UP_DOWN) -> Slots:
    """Empty slots of one part of neurons; rates (E,): as far as they are known."""
    slots = _new_slots(rates, np.empty(0, np.int64), rates.size, num_slots)
    return slots._replace(
        row_of=slots.slot_of, part=part, decay=NEURON_DECAY, candidates=CANDIDATES
    )


def expert_slots(
    firsts: np.ndarray, rates: np.ndarray, sizes: np.ndarray, stays: np.ndarray, num_slots: int
) -> Slots:
    """Empty slots of units with bundles `firsts` and `sizes` rows each; some stay: (E,) bool.

    The rows of those come first, then those of slots, each as large as the largest other unit.
    """
    slots = _new_slots(rates, firsts.astype(np.int64), int(firsts[-1]), num_slots)
    slots.slot_of[stays] = STAYS
    ends = np.cumsum(sizes * stays)
    slots.row_of[stays] = (ends - sizes)[stays]
    first_row, most = int(ends[-1]), int(sizes[~stays].max(initial=0))
    return slots._replace(first_row=first_row, rows_a_slot=most)


def _new_slots(rates: np.ndarray, firsts: np.ndarray, num_bundles: int, num_slots: int) -> Slots:
    return Slots(
        firsts=firsts,
        slot_of=np.full(rates.size, NO_SLOT, np.int32),
        row_of=np.zeros(rates.size, np.int32),
        weights=rates.astype(np.float32),
        loaded=np.zeros(num_bundles, np.int32),
        requested=np.zeros(num_bundles, np.uint8),
        unit_of=np.full(num_slots, -1, np.int32),
        used=np.zeros(num_slots, np.int64),
        slot_weights=np.zeros(num_slots, np.float32),
        state=np.zeros(2, np.int64),
        weight=np.ones(1, np.float64),
        part=GATE | UP_DOWN,
        first_row=0,
        rows_a_slot=1,
        decay=EXPERT_DECAY,
        candidates=num_slots,
    )


def fill_slots(slots: Slots, units: np.ndarray) -> None:
    """Give `units` the first slots, which are empty; nothing is requested yet."""
    slots.slot_of[units] = own = np.arange(units.size, dtype=np.int32)
    slots.row_of[units] = slots.first_row + own * slots.rows_a_slot
    slots.unit_of[: units.size] = units
    slots.slot_weights[: units.size] = slots.weights[units]


@njit(nogil=True, cache=True)
def has_all(slots):
    """Whether each unit has a slot of its own, the one of its number: nothing is evicted."""
    return slots.unit_of.shape[0] == slots.slot_of.shape[0]


@njit(nogil=True, cache=True)
def bundles_of(slots, unit):
    """A unit's bundles, as a range."""
    own = np.int64(unit)
    if slots.firsts.shape[0] == 0:
        return range(own, own + 1)
    return range(slots.firsts[own], slots.firsts[own + 1])


@njit(nogil=True, cache=True)
def evict(slots, slot):
    """Empty the slot; it may have no pending read."""
    unit = np.int64(slots.unit_of[slot])
    if unit >= 0:
        slots.slot_of[unit] = NO_SLOT
        for bundle in bundles_of(slots, unit):
            slots.requested[bundle] = np.uint8(0)
            atomic_store(slots.loaded, bundle, NOT_LOADED)
    slots.unit_of[slot] = -1


@njit(nogil=True, cache=True)
def begin_epoch(slots, num_units):
    """Start an epoch, a request for a layer of `num_units`: earlier uses decay.

    By `decay` over all layers, so that weights are means over about 1 / decay tokens.
    """
    slots.state[EPOCH] += 1
    slots.weight[0] *= (1 - slots.decay) ** (-num_units / slots.slot_of.shape[0])
    if slots.weight[0] > _LARGE:
        smaller = np.float32(1 / slots.weight[0])
        for unit in range(slots.weights.shape[0]):
            slots.weights[unit] *= smaller
        for slot in range(slots.slot_weights.shape[0]):
            slots.slot_weights[slot] *= smaller
        slots.weight[0] = 1.0


@njit(nogil=True, cache=True, inline="always")
def unit_at(first, ids, i):
    """Unit i of those from `first` on, or of first + ids."""
    return first + (np.int64(ids[i]) if ids.shape[0] else i)


@njit(nogil=True, cache=True)
def look_up(slots, first, ids, count, places, order):
    """Look up `count` units (`unit_at`), which this request must not evict; counts a use of each.

    places[i] = the slot of unit i, or below 0. order[:n] are indices i of units that are not
    loaded, order[n:count] the others'. Returns n.
    """
    slot_of, weights, used, slot_weights = (
        slots.slot_of, slots.weights, slots.used, slots.slot_weights,
    )  # fmt: skip
    epoch, more = slots.state[EPOCH], np.float32(slots.decay * slots.weight[0])
    num_missing, num_loaded = 0, 0
    for i in range(count):
        unit = unit_at(first, ids, i)
        slot = np.int64(slot_of[unit])
        weights[unit] += more
        if slot >= 0:
            used[slot], slot_weights[slot] = epoch, weights[unit]
        places[i] = slot
        if load_state(slots, unit) > 0:
            num_loaded += 1
            order[count - num_loaded] = i
        else:
            order[num_missing] = i
            num_missing += 1
    return num_missing


@njit(nogil=True, cache=True)
def keep(slots, unit):
    """This request must not evict the unit; no use is counted."""
    slot = slots.slot_of[unit]
    if slot >= 0:
        slots.used[slot], slots.slot_weights[slot] = slots.state[EPOCH], slots.weights[unit]


@njit(nogil=True, cache=True)
def load_state(slots, unit):
    """1 where the unit is loaded, 0 where some of it is not, -1 where a read failed."""
    state = np.int64(1)
    for bundle in bundles_of(slots, unit):
        found = atomic_load(slots.loaded, bundle)
        if found == FAILED:
            return np.int64(-1)
        if found != LOADED:
            state = np.int64(0)
    return state


@njit(nogil=True, cache=True)
def await_unit(slots, queue, unit, waited_ns, thread):
    """Wait until the unit is loaded, timed in waited_ns[thread]; False where a read failed."""
    while True:
        seen = num_completed(queue)
        found = load_state(slots, unit)
        if found:
            return found > 0
        await_timed(queue, seen, waited_ns, thread)


@njit(nogil=True, cache=True)
def await_timed(queue, seen, waited_ns, thread):
    """`await_more`, timed in waited_ns[thread]."""
    started = now_ns()
    await_more(queue, seen)
    waited_ns[thread] += now_ns() - started


@njit(nogil=True, cache=True)
def was_used(slots, unit):
    """Whether the unit was used in this epoch."""
    slot = slots.slot_of[unit]
    return slot >= 0 and slots.used[slot] == slots.state[EPOCH]


@njit(nogil=True, cache=True)
def is_requested(slots, unit):
    """Whether reads of all of the unit were requested."""
    found = True
    for bundle in bundles_of(slots, unit):
        found = found and slots.requested[bundle] != 0
    return found


@njit(nogil=True, cache=True)
def _is_pending(slots, unit):
    """Whether a read of the unit is pending."""
    for bundle in bundles_of(slots, unit):
        if slots.requested[bundle] and atomic_load(slots.loaded, bundle) == NOT_LOADED:
            return True
    return False


@njit(nogil=True, cache=True)
def assign_slot(slots, unit, slot):
    """Assign the slot to a unit that has none; nothing is loaded yet."""
    evict(slots, slot)
    slots.unit_of[slot], slots.slot_of[unit] = unit, slot
    slots.row_of[unit] = slots.first_row + slot * slots.rows_a_slot


@njit(nogil=True, cache=True)
def give_slot(slots, unit):
    """The slot of a unit that does not stay, assigned if it had none; -1 where none is free.

    This request does not evict it.
    """
    slot = np.int64(slots.slot_of[unit])
    if slot < 0:
        slot = _choose_slot(slots)
        if slot < 0:
            return slot
        assign_slot(slots, unit, slot)
    keep(slots, unit)
    return slot


@njit(nogil=True, cache=True)
def request(slots, bundle):
    """Whether a bundle has to be read: it counts as requested from now on.

    After a failed read it is requested again.
    """
    own = np.int64(bundle)
    if atomic_load(slots.loaded, own) == FAILED:
        atomic_store(slots.loaded, own, NOT_LOADED)
        slots.requested[own] = np.uint8(0)
    is_missing = slots.requested[own] == 0
    slots.requested[own] = np.uint8(1)
    return is_missing


@njit(nogil=True, cache=True)
def _choose_slot(slots):
    """Of the next slots the first empty one, else the one with the least frequently used unit.

    As many as `candidates`, or more until one can be evicted; -1 where none of all can.
    """
    state, found, least, num_seen = slots.state, np.int64(-1), np.float32(0), 0
    num_slots = slots.unit_of.shape[0]
    while num_seen < num_slots and (found < 0 or num_seen < slots.candidates):
        slot = state[HAND]
        state[HAND] = slot + 1 if slot + 1 < num_slots else 0
        num_seen += 1
        unit, weight = np.int64(slots.unit_of[slot]), slots.slot_weights[slot]
        if unit < 0:
            return slot
        if slots.used[slot] == state[EPOCH] or (found >= 0 and weight >= least):
            continue
        if not _is_pending(slots, unit):
            found, least = slot, weight
    return found
