"""A shard of neurons in a file, some of them in slots: what is wanted, asked for, and has come."""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate
from hotcold.numba_kernels.ir.vector_ir import dot_lone_row
from hotcold.numba_kernels.serve.doorbell import atomic_load, now_ns
from hotcold.numba_kernels.serve.layer_ffn import FfnArrays
from hotcold.numba_kernels.storage.neuron_file import GATE, REST, NeuronFile
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
_ALONE = -1  # as the most bytes between neighbours of one read


class OffloadedNeurons(NamedTuple):
    """A shard of neurons in a file, some of them in slots.

    arrays: gate rows and their biases lie in slots of `gates`, up and down rows and theirs in slots
    of `up_downs`. gate_bias, up_bias, down_norms (N,) or (0,): of all
    marks (bundles of a layer,) int32, zero: rows + 1 by their places in the file, while they are
    gathered; mark_parts the same uint8
    gate_slots (N of a layer,): where candidates' gates are; late (N of a layer,): which of them
    have to come, then the others; up_down_slots, to_come (threads, N of a layer) int32: where what
    fired in each thread is, and which of that has not come; missing (N of a layer,) int32
    options (5,) int64: whether a bundle is read whole, of spans, and what benchmarks leave out
    counters (4 cells of 16,) int32: of which gates threads take the next, and how many there are
    waits, failed (threads,) int64: nanoseconds that each thread waited for reads so far, and
    whether what it needed in this request could not be read
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


# A call that takes `shard` costs a microsecond, as all its arrays are counted: none for a neuron.


@njit(nogil=True, cache=True)
def claim_gate(gates, gate_bias, slot_bias, row):
    """`claim` of a gate; its bias is in its slot's then."""
    slot, is_missing = claim(gates, row)
    if is_missing and slot_bias.shape[0]:
        slot_bias[slot] = gate_bias[row]
    return slot, is_missing


@njit(nogil=True, cache=True)
def claim_up_down(up_downs, up_bias, slot_bias, norms, slot_norms, row):
    """`claim` of up and down rows; the bias, and the length of the down row, are there then."""
    slot, is_missing = claim(up_downs, row)
    if is_missing:
        if slot_bias.shape[0]:
            slot_bias[slot] = up_bias[row]
        if slot_norms.shape[0]:
            slot_norms[slot] = norms[row]
    return slot, is_missing


@njit(nogil=True, cache=True)
def locate_gates(shard, first, ids, count, places, missing):
    """places[i] = the slot of the gate of neuron first + ids[i], or first + i without `ids`.

    What is not in memory is marked for `submit_marked`. `missing` is work space.
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
    """The same of up and down rows."""
    up_downs, marks, parts = shard.up_downs, shard.marks, shard.mark_parts
    bias, slot_bias, in_file = shard.up_bias, shard.arrays.up_bias, shard.file.places
    norms, slot_norms = shard.down_norms, shard.arrays.down_norms
    for k in range(look_up(up_downs, first, ids, count, places, missing)):
        i = np.int64(missing[k])
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        places[i], is_missing = claim_up_down(up_downs, bias, slot_bias, norms, slot_norms, row)
        if is_missing:
            marks[in_file[row]], parts[in_file[row]] = row + 1, REST


@njit(nogil=True, cache=True)
def claim_beside_gates(shard, first, ids, count):
    """After `locate_gates`: up and down rows are read beside each gate that is, if they are not here.

    Where they are they stay. They are not counted as wanted: who fires is not known yet.
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
            parts[in_file[row]] = GATE | REST


@njit(nogil=True, cache=True)
def submit_marked(shard, max_bytes, max_gap):
    """Ask for what was marked, in the file's order, in reads of `cut_spans`."""
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
    """Scores of neurons whose gates are in memory: fewer are then read in vain.

    For this thread's part of `score_ahead`; the greatest activation of any token, where up and down
    rows are not in memory. Another thread may be giving away slots: whom it meets is a guess the
    worse.
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
    """Ask for what the layer will probably need, after all that was asked for before.

    Up and down rows of neurons whose gates are in memory, as these say; then gates that a predictor
    chooses, with the rest where bundles are read whole.
    """
    queue, options, ahead = shard.queue, shard.options, shard.ahead
    batch = NOW + 1
    while batch < NUM_BATCHES and num_pending(queue, batch):
        batch += 1
    if batch == NUM_BATCHES:  # the disk is slow; what it reads ahead still is enough
        return
    first, arrays, reads_whole = shard.arrays.offsets[layer], shard.arrays, options[READS_WHOLE]
    gates, up_downs, rows, parts = (
        shard.gates,
        shard.up_downs,
        queue.rows[batch],
        queue.parts[batch],
    )
    gate_bias, up_bias, norms = shard.gate_bias, shard.up_bias, shard.down_norms
    count = 0
    for row in likeliest(ahead, layer, first, gates, up_downs):
        part, has_gate = 0, gates.requested[row] != 0
        if not has_gate and claim_gate(gates, gate_bias, arrays.gate_bias, np.int64(row))[1]:
            part = GATE
        if (has_gate or reads_whole) and claim_up_down(
            up_downs, up_bias, arrays.up_bias, norms, arrays.down_norms, np.int64(row)
        )[1]:
            part |= REST
        if part:
            rows[count], parts[count] = row, part
            ahead.rows[count], ahead.parts[count] = row, part
            count += 1
    ahead.state[0], ahead.state[1] = layer, count
    submit_reads(queue, shard.file, batch, count, options[MAX_BYTES], _ALONE)


@njit(nogil=True, cache=True)
def await_some(shard, thread, seen):
    """Wait until something came since `num_completed` was `seen`."""
    started = now_ns()
    await_more(shard.queue, seen)
    shard.waited_ns[thread] += now_ns() - started


@njit(nogil=True, cache=True)
def await_row(shard, thread, slots, row):
    """Wait for a neuron's part; False where it could not be read."""
    while True:
        seen = num_completed(shard.queue)
        found = load_state(slots, row)
        if found:
            return found > 0
        await_some(shard, thread, seen)


@njit(nogil=True, cache=True)
def await_rows(shard, thread, slots, first, ids, count):
    """The same of neurons first + ids[:count], or of `count` from `first` on without `ids`."""
    for i in range(count):
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        if not await_row(shard, thread, slots, row):
            return False
    return True
