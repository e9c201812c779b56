"""A shard of neurons in a bundle file, some of them in memory: lookups, reads, waits."""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate
from hotcold.numba_kernels.ffn_arrays import FfnArrays
from hotcold.numba_kernels.ir.vector_ir import dot_lone_row
from hotcold.numba_kernels.loops.doorbell import atomic_load
from hotcold.numba_kernels.storage.neuron_file import GATE, UP_DOWN, NeuronFile
from hotcold.numba_kernels.storage.read_ahead import ReadAhead, ahead_part, likeliest
from hotcold.numba_kernels.storage.read_queue import (
    LOADED,
    NOW,
    NUM_BATCHES,
    ReadQueue,
    await_batch,
    free_batch,
    submit_reads,
)
from hotcold.numba_kernels.storage.slots import EPOCH, Slots, await_unit, claim, look_up

# cells of `OffloadedNeurons.counters`
LOADED_TAKEN, PENDING_TAKEN, NUM_LOADED, NUM_PENDING = range(4)
NUM_COUNTERS = 4
_ALONE = -1  # as max_gap: no two neurons share a read


class OffloadedNeurons(NamedTuple):
    """A shard of N neurons in a bundle file, some of them in slots; M is N of the largest layer.

    arrays: biases and norms of all neurons, but rows by slot: gate rows by slots of `gates`, up and
    down rows by slots of `up_downs`
    marks (bundles of a layer,) int32, zero: row + 1 of each neuron to read, by place in the file,
    until they are submitted; mark_parts the same, uint8
    gate_slots (M,) int32: slots of candidates' gates; gate_order (M,) int32: candidates with
    pending gates, then the others; up_down_slots, pending (M,) int32: slots of what fired, those of
    a thread together as in `FfnScratch`, and which of that is not loaded
    missing (M,) int32: work space
    reads_whole (1,) bool: a bundle is read at once where a predictor wants its gate
    counters (4 cells of 16,) int32: gates taken by threads, and how many there are of each kind
    waited_ns, failed (threads,) int64: each thread's wait for reads so far, and whether a read that
    it needed in this request failed
    """

    arrays: FfnArrays
    file: NeuronFile
    gates: Slots
    up_downs: Slots
    queue: ReadQueue
    ahead: ReadAhead
    marks: np.ndarray
    mark_parts: np.ndarray
    gate_slots: np.ndarray
    gate_order: np.ndarray
    up_down_slots: np.ndarray
    pending: np.ndarray
    missing: np.ndarray
    reads_whole: np.ndarray
    counters: np.ndarray
    waited_ns: np.ndarray
    failed: np.ndarray


# A call that takes `shard` costs a microsecond of reference counts: none may be made per neuron.


@njit(nogil=True, cache=True)
def _locate(shard, slots, part, first, ids, count, places):
    """places[i] = the slot of neuron first + ids[i], or first + i where `ids` is empty.

    What is neither loaded nor pending is marked for `submit_marked`.
    """
    marks, parts, in_file, missing = shard.marks, shard.mark_parts, shard.file.places, shard.missing
    for k in range(look_up(slots, first, ids, count, places, missing)):
        i = np.int64(missing[k])
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        places[i], is_missing = claim(slots, row)
        if is_missing:
            marks[in_file[row]], parts[in_file[row]] = row + 1, part


@njit(nogil=True, cache=True)
def locate_gates(shard, first, ids, count, places):
    """places[i] = the gate slot of neuron first + ids[i], or first + i where `ids` is empty.

    Gates that are neither loaded nor pending are marked for `submit_marked`.
    """
    _locate(shard, shard.gates, GATE, first, ids, count, places)


@njit(nogil=True, cache=True)
def locate_up_downs(shard, first, ids, count, places):
    """`locate_gates` of up and down rows."""
    _locate(shard, shard.up_downs, UP_DOWN, first, ids, count, places)


@njit(nogil=True, cache=True)
def claim_beside_gates(shard, first, ids, count):
    """After `locate_gates`: mark up and down rows too, of neurons whose gates are marked.

    Those already in memory are pinned for this request. No use is counted: which neurons fire is
    not known yet.
    """
    up_downs, marks, parts = shard.up_downs, shard.marks, shard.mark_parts
    in_file = shard.file.places
    for i in range(count):
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        if up_downs.requested[row]:
            up_downs.used[up_downs.slot_of[row]] = up_downs.state[EPOCH]
        if marks[in_file[row]] and claim(up_downs, row)[1]:
            parts[in_file[row]] = GATE | UP_DOWN


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
def rescore_ahead(shard, layer, thread, num_threads, x, function, num_tokens):
    """Replace predicted scores by computed ones where gates are loaded and up and down rows not.

    A score is the largest activation of any token; this thread's part of `score_ahead`. Another
    thread may evict a slot meanwhile, which only makes that score a worse guess.
    """
    gates, scores, arrays = shard.gates, shard.ahead.scores, shard.arrays
    gate, bias = arrays.gate, arrays.gate_bias
    loaded, slot_of, up_downs_requested = gates.loaded, gates.slot_of, shard.up_downs.requested
    first, last = arrays.starts[layer, 0], arrays.starts[layer, arrays.starts.shape[1] - 1]
    begin, end = ahead_part(last - first, thread, num_threads)
    for n in range(begin, end):
        row = first + n
        if scores[n] <= 0 or up_downs_requested[row] or atomic_load(loaded, row) != LOADED:
            continue
        shift = bias[row] if bias.shape[0] else np.float32(0)
        score = np.float32(0)
        slot = max(0, np.int64(slot_of[row]))
        for t in range(num_tokens):
            product = dot_lone_row(gate, slot, x, t)
            score = max(score, activate(function, product + shift))
        scores[n] = score


@njit(nogil=True, cache=True, _nrt=True)
def submit_ahead(shard, layer):
    """Submit reads of what the layer will probably need, behind all reads submitted before.

    Up and down rows of neurons whose loaded gates fire; then gates that the predictor chooses, with
    up and down rows where bundles are read whole.
    """
    queue, ahead = shard.queue, shard.ahead
    batch = free_batch(queue)
    if batch == NUM_BATCHES:
        return
    first, reads_whole = shard.arrays.starts[layer, 0], shard.reads_whole[0]
    gates, up_downs = shard.gates, shard.up_downs
    rows, parts = queue.rows[batch], queue.parts[batch]
    count = 0
    for row in likeliest(ahead, layer, first, gates, up_downs):
        part, has_gate = 0, gates.requested[row] != 0
        if not has_gate and claim(gates, np.int64(row))[1]:
            part = GATE
        if (has_gate or reads_whole) and claim(up_downs, np.int64(row))[1]:
            part |= UP_DOWN
        if part:
            rows[count], parts[count] = row, part
            ahead.rows[count], ahead.parts[count] = row, part
            count += 1
    ahead.state[0], ahead.state[1] = layer, count
    submit_reads(queue, shard.file, batch, count, _ALONE)


@njit(nogil=True, cache=True)
def await_rows(shard, thread, slots, first, ids, count):
    """`await_unit` of neurons first + ids[:count], or of `count` from `first` on without `ids`."""
    for i in range(count):
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        if not await_unit(slots, shard.queue, row, shard.waited_ns, thread):
            return False
    return True
