"""A shard of units in a bundle file, some of them in memory: lookups, reads, waits.

A unit is a neuron, whose gate row is cached apart from its up and down rows, or what the shard has
of an expert, which is cached and read whole.
"""

from typing import Any, NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.loops.predict_team import SignPredictors
from hotcold.numba_kernels.storage import MAX_GAP
from hotcold.numba_kernels.storage.neuron_file import GATE, UP_DOWN, NeuronFile
from hotcold.numba_kernels.storage.output_rows import OutputRows, place_unit
from hotcold.numba_kernels.storage.read_queue import (
    NOW,
    ReadQueue,
    await_batch,
    cancel_reads,
    drain,
    drop_reads,
    submit_reads,
)
from hotcold.numba_kernels.storage.slots import (
    Slots,
    await_unit,
    begin_epoch,
    bundles_of,
    give_slot,
    is_requested,
    look_up,
    request,
    unit_at,
)

# words of `OffloadedNeurons.counts`: of the last request, units that are not loaded and all; of
# all requests, lookups and misses
NUM_PENDING, NUM_UNITS, NUM_LOOKUPS, NUM_MISSES = range(4)


class ReadAhead(NamedTuple):
    """What of the next layer is read ahead, by predictors of neurons or a router's guess.

    predictors: of this service's neurons; without layers where none choose
    guessed (G, B) float32: of `SharedBuffers`; G is 0 where no router guesses
    scores (units of a layer,) float32: above 0 where the next layer probably needs one; planes
    (threads, 3, words) uint64
    most (L,) int64: how many of a layer's units to read, from `least` to `limit`; max_gap: of two
    that share a read, below 0 none do
    units (limit,) int64, parts (limit,) uint8: submitted last; state (2,) int64: for which layer,
    and how many; counts (4,) int64: as words PARTS_GUESSABLE to PARTS_USEFUL of a reply
    """

    predictors: SignPredictors
    guessed: np.ndarray
    scores: np.ndarray
    planes: np.ndarray
    most: np.ndarray
    least: int
    limit: int
    max_gap: int
    units: np.ndarray
    parts: np.ndarray
    state: np.ndarray
    counts: np.ndarray


class OffloadedNeurons(NamedTuple):
    """A shard of E units in a bundle file, some of them in slots; M of the largest layer.

    Of experts a layer has B units, unit l * B + b is block b's, and both caches are one.

    arrays: `FfnArrays` with biases and norms of all neurons, but matrices by rows in memory; or
    `TransposedArrays`, and outputs, where their matrices are
    marks (bundles of a layer,) int32, zero: bundle + 1 of each to read, by place in the file, until
    they are submitted; mark_parts the same, uint8
    slots, order (M,) int32: slots of what a request looked up, and its indices as of `look_up`
    places (M,) int32: rows in memory of what fired, those of a thread together as in `FfnScratch`
    reads_whole (1,) bool: a unit is read at once where its gate is wanted
    counters (B, 2, threads * 16) int32: blocks of work taken, of each expert that is awaited; of
    neurons B is 1, and the kinds are loaded gates and those that are awaited
    misses (E,) uint32: of each expert so far; may be in shared memory
    lock: of `routed_ahead`, for slots and queue
    counts (4,) int64: the words above; waited_ns, failed (threads,) int64: each thread's wait for
    reads so far, and whether a read that it needed in this request failed
    """

    arrays: Any
    outputs: OutputRows
    file: NeuronFile
    gates: Slots
    up_downs: Slots
    queue: ReadQueue
    ahead: ReadAhead
    marks: np.ndarray
    mark_parts: np.ndarray
    slots: np.ndarray
    order: np.ndarray
    places: np.ndarray
    reads_whole: np.ndarray
    counters: np.ndarray
    misses: np.ndarray
    lock: np.ndarray
    counts: np.ndarray
    waited_ns: np.ndarray
    failed: np.ndarray


class OffloadedExperts(OffloadedNeurons):
    """The same of experts: by its type compiled code has their steps."""


@njit(nogil=True, cache=True)
def begin_request(shard, num_units):
    """Start a request of a layer of `num_units`; reads ahead stay in flight."""
    shard.failed[:] = 0
    begin_epoch(shard.gates, num_units)
    if shard.gates.part != GATE | UP_DOWN:
        begin_epoch(shard.up_downs, num_units)
    if shard.queue.failure[0]:
        drop_reads(shard.queue)


@njit(nogil=True, cache=True)
def cancel_ahead(shard):
    """Cancel reads ahead that have not started, before the layer's own lookups.

    Of what was submitted `ahead` keeps the units whose reads go on.
    """
    gates, up_downs, ahead = shard.gates, shard.up_downs, shard.ahead
    cancel_reads(shard.queue)
    kept = 0
    for i in range(ahead.state[1]):
        unit, part = ahead.units[i], ahead.parts[i]
        if is_requested(gates if part & GATE else up_downs, unit):
            ahead.units[kept], ahead.parts[kept] = unit, part
            kept += 1
    ahead.state[1] = kept


@njit(nogil=True, cache=True)
def give_rows(shard, slots, unit):
    """`give_slot`, whose rows are the unit's from now on."""
    had = slots.slot_of[unit] >= 0
    slot = give_slot(slots, unit)
    if slot >= 0 and not had and shard.outputs.places.shape[0]:
        place_unit(shard.outputs, unit, shard.outputs.begins[slot])
    return slot


@njit(nogil=True, cache=True)
def claim(shard, slots, unit):
    """Mark what has to be read of a unit for `submit_marked`; returns its slot.

    A request may use as many units as there are slots: what is read ahead then leaves its own.
    """
    slot = give_rows(shard, slots, unit)
    while slot < 0:
        drain(shard.queue)
        slot = give_rows(shard, slots, unit)
    for bundle in bundles_of(slots, unit):
        if request(slots, bundle):
            place = shard.file.places[bundle]
            shard.marks[place] = bundle + 1
            shard.mark_parts[place] |= slots.part & shard.file.parts[bundle]
    return slot


@njit(nogil=True, cache=True)
def locate(shard, slots, first, ids, count, places, order):
    """`look_up`, where all have slots: what is neither loaded nor pending is marked.

    Returns how many are not loaded.
    """
    num_missing = look_up(slots, first, ids, count, places, order)
    for k in range(num_missing):
        i = np.int64(order[k])
        places[i] = claim(shard, slots, unit_at(first, ids, i))
    shard.counts[NUM_LOOKUPS] += count
    shard.counts[NUM_MISSES] += num_missing
    return num_missing


@njit(nogil=True, cache=True)
def request_units(shard, first, ids, count):
    """`locate` of a request's gates, or whole units, in `slots`, `order` and `counts`."""
    num_missing = locate(shard, shard.gates, first, ids, count, shard.slots, shard.order)
    shard.counts[NUM_PENDING], shard.counts[NUM_UNITS] = num_missing, count
    return num_missing


@njit(nogil=True, cache=True)
def request_experts(shard, layer, blocks):
    """Submit reads of those of a layer's `blocks`, ascending, that are not in memory."""
    begin_request(shard, num_blocks(shard))
    cancel_ahead(shard)
    first, order = layer * num_blocks(shard), shard.order
    num_missing = request_units(shard, first, blocks, blocks.shape[0])
    for k in range(num_missing):
        shard.misses[first + blocks[order[k]]] += np.uint32(1)
    if num_missing:
        submit_marked(shard, MAX_GAP)


@njit(nogil=True, cache=True)
def num_blocks(shard):
    """Blocks of a layer."""
    return shard.arrays.starts.shape[1] - 1


@njit(nogil=True, cache=True)
def submit_marked(shard, max_gap):
    """Submit reads of what was marked, in the file's order, cut by `cut_spans`."""
    queue, marks = shard.queue, shard.marks
    await_batch(queue, NOW)
    rows, parts = queue.rows[NOW], queue.parts[NOW]
    count = 0
    for place in range(marks.shape[0]):
        if marks[place]:
            rows[count], parts[count] = marks[place] - 1, shard.mark_parts[place]
            marks[place], shard.mark_parts[place] = 0, 0
            count += 1
    submit_reads(queue, shard.file, NOW, count, max_gap)


@njit(nogil=True, cache=True)
def await_units(shard, thread, slots, first, ids, count):
    """Wait until `count` units (`unit_at`) are loaded; False where a read failed."""
    for i in range(count):
        unit = unit_at(first, ids, i)
        if not await_unit(slots, shard.queue, unit, shard.waited_ns, thread):
            return False
    return True
