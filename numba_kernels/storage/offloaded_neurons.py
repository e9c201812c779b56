"""A shard of neurons in a bundle file, some of them in memory: lookups, reads, waits."""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate
from hotcold.numba_kernels.ir.vector_ir import dot_lone_row
from hotcold.numba_kernels.serve.doorbell import atomic_load, now_ns
from hotcold.numba_kernels.serve.layer_ffn import FfnArrays
from hotcold.numba_kernels.storage.neuron_file import GATE, UP_DOWN, NeuronFile
from hotcold.numba_kernels.storage.neuron_slots import (
    EPOCH,
    NeuronSlots,
    claim,
    load_state,
    look_up,
)
from hotcold.numba_kernels.storage.read_ahead import ReadAhead, ahead_part, likeliest
from hotcold.numba_kernels.storage.read_queue import (
    LOADED,
    NOW,
    NUM_BATCHES,
    ReadQueue,
    await_batch,
    await_more,
    num_completed,
    num_pending,
    submit_reads,
)

# words of `OffloadedNeurons.options`
READS_WHOLE, MAX_BYTES, MAX_GAP, EVICTS_ALL, WAITS_FIRST = range(5)
NUM_OPTIONS = 5
# cells of `OffloadedNeurons.counters`
LOADED_TAKEN, PENDING_TAKEN, NUM_LOADED, NUM_PENDING = range(4)
NUM_COUNTERS = 4
_ALONE = -1  # as max_gap: no two neurons share a read


class OffloadedNeurons(NamedTuple):
    """A shard of N neurons in a bundle file, some of them in slots; M is N of the largest layer.

    arrays: rows and biases by slot: gate rows by slots of `gates`, up and down rows by slots of
    `up_downs`; gate_bias, up_bias, down_norms (N,) or (0,): of all neurons
    marks (bundles of a layer,) int32, zero: row + 1 of each neuron to read, by place in the file,
    until they are submitted; mark_parts the same, uint8
    gate_slots (M,) int32: slots of candidates' gates; gate_order (M,) int32: candidates with
    pending gates, then the others; up_down_slots, pending (threads, M) int32: slots of what fired
    in each thread, and which of that is not loaded; missing (M,) int32: work space
    options (5,) int64: the words above; the last two are for benchmarks
    counters (4 cells of 16,) int32: gates taken by threads, and how many there are of each kind
    waited_ns, failed (threads,) int64: each thread's wait for reads so far, and whether a read that
    it needed in this request failed
    """

    arrays: FfnArrays
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_norms: np.ndarray
    file: NeuronFile
    gates: NeuronSlots
    up_downs: NeuronSlots
    queue: ReadQueue
    ahead: ReadAhead
    marks: np.ndarray
    mark_parts: np.ndarray
    gate_slots: np.ndarray
    gate_order: np.ndarray
    up_down_slots: np.ndarray
    pending: np.ndarray
    missing: np.ndarray
    options: np.ndarray
    counters: np.ndarray
    waited_ns: np.ndarray
    failed: np.ndarray


# A call that takes `shard` costs a microsecond of reference counts: none may be made per neuron.


@njit(nogil=True, cache=True)
def claim_gate(gates, gate_bias, slot_bias, row):
    """`claim` of a gate row, with its bias copied to the slot."""
    slot, is_missing = claim(gates, row)
    if is_missing and slot_bias.shape[0]:
        slot_bias[slot] = gate_bias[row]
    return slot, is_missing


@njit(nogil=True, cache=True)
def claim_up_down(up_downs, up_bias, slot_bias, norms, slot_norms, row):
    """`claim` of up and down rows, with up's bias and down's norm copied to the slot."""
    slot, is_missing = claim(up_downs, row)
    if is_missing:
        if slot_bias.shape[0]:
            slot_bias[slot] = up_bias[row]
        if slot_norms.shape[0]:
            slot_norms[slot] = norms[row]
    return slot, is_missing


@njit(nogil=True, cache=True)
def locate_gates(shard, first, ids, count, places, missing):
    """places[i] = the gate slot of neuron first + ids[i], or first + i where `ids` is empty.

    Gates that are neither loaded nor pending are marked for `submit_marked`.
    """
    gates, marks, parts = shard.gates, shard.marks, shard.mark_parts
    bias, slot_bias, in_file = shard.gate_bias, shard.arrays.gate_bias, shard.file.places
    for k in range(look_up(gates, first, ids, count, places, missing)):
        i = np.int64(missing[k])
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        places[i], is_missing = claim_gate(gates, bias, slot_bias, row)
        if is_missing:
            marks[in_file[row]], parts[in_file[row]] = row + 1, GATE


@njit(nogil=True, cache=True)
def locate_up_downs(shard, first, ids, count, places, missing):
    """`locate_gates` of up and down rows."""
    up_downs, marks, parts = shard.up_downs, shard.marks, shard.mark_parts
    bias, slot_bias, in_file = shard.up_bias, shard.arrays.up_bias, shard.file.places
    norms, slot_norms = shard.down_norms, shard.arrays.down_norms
    for k in range(look_up(up_downs, first, ids, count, places, missing)):
        i = np.int64(missing[k])
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        places[i], is_missing = claim_up_down(up_downs, bias, slot_bias, norms, slot_norms, row)
        if is_missing:
            marks[in_file[row]], parts[in_file[row]] = row + 1, UP_DOWN


@njit(nogil=True, cache=True)
def claim_beside_gates(shard, first, ids, count):
    """After `locate_gates`: mark up and down rows too, of neurons whose gates are marked.

    Those already in memory are pinned for this request. No use is counted: which neurons fire is
    not known yet.
    """
    up_downs, marks, parts = shard.up_downs, shard.marks, shard.mark_parts
    bias, slot_bias, in_file = shard.up_bias, shard.arrays.up_bias, shard.file.places
    norms, slot_norms = shard.down_norms, shard.arrays.down_norms
    for i in range(count):
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        if up_downs.requested[row]:
            up_downs.used[up_downs.slot_of[row]] = up_downs.state[EPOCH]
        if (
            marks[in_file[row]]
            and claim_up_down(up_downs, bias, slot_bias, norms, slot_norms, row)[1]
        ):
            parts[in_file[row]] = GATE | UP_DOWN


@njit(nogil=True, cache=True)
def submit_marked(shard, max_bytes, max_gap):
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
    submit_reads(queue, shard.file, NOW, count, max_bytes, max_gap)


@njit(nogil=True, cache=True)
def rescore_ahead(shard, layer, thread, num_threads, x, function, num_tokens):
    """Replace predicted scores by computed ones where gates are loaded and up and down rows not.

    A score is the largest activation of any token; this thread's part of `score_ahead`. Another
    thread may evict a slot meanwhile, which only makes that score a worse guess.
    """
    gates, scores, bias, gate = (
        shard.gates,
        shard.ahead.scores,
        shard.gate_bias,
        shard.arrays.gate,
    )
    loaded, slot_of, up_downs_requested = gates.loaded, gates.slot_of, shard.up_downs.requested
    first, last = shard.arrays.offsets[layer], shard.arrays.offsets[layer + 1]
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


@njit(nogil=True, cache=True)
def submit_ahead(shard, layer):
    """Submit reads of what the layer will probably need, behind all reads submitted before.

    Up and down rows of neurons whose loaded gates fire; then gates that the predictor chooses, with
    up and down rows where bundles are read whole.
    """
    queue, options, ahead = shard.queue, shard.options, shard.ahead
    batch = NOW + 1
    while batch < NUM_BATCHES and num_pending(queue, batch):
        batch += 1
    if batch == NUM_BATCHES:  # the disk lags behind; what is pending is enough
        return
    first, arrays, reads_whole = shard.arrays.offsets[layer], shard.arrays, options[READS_WHOLE]
    gates, up_downs = shard.gates, shard.up_downs
    rows, parts = queue.rows[batch], queue.parts[batch]
    gate_bias, up_bias, norms = shard.gate_bias, shard.up_bias, shard.down_norms
    count = 0
    for row in likeliest(ahead, layer, first, gates, up_downs):
        part, has_gate = 0, gates.requested[row] != 0
        if not has_gate and claim_gate(gates, gate_bias, arrays.gate_bias, np.int64(row))[1]:
            part = GATE
        if (has_gate or reads_whole) and claim_up_down(
            up_downs, up_bias, arrays.up_bias, norms, arrays.down_norms, np.int64(row)
        )[1]:
            part |= UP_DOWN
        if part:
            rows[count], parts[count] = row, part
            ahead.rows[count], ahead.parts[count] = row, part
            count += 1
    ahead.state[0], ahead.state[1] = layer, count
    submit_reads(queue, shard.file, batch, count, options[MAX_BYTES], _ALONE)


@njit(nogil=True, cache=True)
def await_some(shard, thread, seen):
    """`await_more`, timed."""
    started = now_ns()
    await_more(shard.queue, seen)
    shard.waited_ns[thread] += now_ns() - started


@njit(nogil=True, cache=True)
def await_row(shard, thread, slots, row):
    """Wait until a neuron's part is loaded; False where its read failed."""
    while True:
        seen = num_completed(shard.queue)
        found = load_state(slots, row)
        if found:
            return found > 0
        await_some(shard, thread, seen)


@njit(nogil=True, cache=True)
def await_rows(shard, thread, slots, first, ids, count):
    """`await_row` of neurons first + ids[:count], or of `count` from `first` on without `ids`."""
    for i in range(count):
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        if not await_row(shard, thread, slots, row):
            return False
    return True
