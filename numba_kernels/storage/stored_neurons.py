"""A shard of neurons in a file, some of them in slots: what is wanted, asked for, and has come."""

from typing import NamedTuple

import numpy as np

from numba_kernels.compiler import njit
from numba_kernels.decode.activations import activate
from numba_kernels.ir.vector_ir import dot_lone_row
from numba_kernels.serve.doorbell import now_ns
from numba_kernels.serve.layer_ffn import FfnArrays
from numba_kernels.storage.neuron_slots import (
    NUM_MISSED,
    NUM_WANTED,
    NeuronSlots,
    has_come,
    is_here,
    lacks,
    slot_for,
)
from numba_kernels.storage.read_ahead import ReadAhead, ahead_part, likeliest
from numba_kernels.storage.reads.neuron_file import GATE, REST, NeuronFile
from numba_kernels.storage.reads.read_queue import (
    NOW,
    NUM_BATCHES,
    ReadQueue,
    ask_for,
    await_batch,
    await_more,
    num_come,
    num_left,
)

# words of `StoredNeurons.options`
READS_WHOLE, MOST_BYTES, MOST_GAP, FORGETS, WAITS_FIRST = range(5)
NUM_OPTIONS = 5
# cells of `StoredNeurons.counters`
HERE_TAKEN, LATE_TAKEN, NUM_HERE, NUM_LATE = range(4)
NUM_COUNTERS = 4
_ALONE = -1  # as the most bytes between neighbours of one read


class StoredNeurons(NamedTuple):
    """A shard of neurons in a file, some of them in slots.

    arrays: gate rows and their biases lie in slots of `gates`, up and down rows and theirs in slots
    of `rests`. gate_bias, up_bias, down_norms (N,) or (0,): of all
    marks (bundles of a layer,) int32, zero: rows + 1 by their places in the file, while they are
    gathered; mark_parts the same uint8
    gate_slots (N of a layer,): where candidates' gates are; late (N of a layer,): which of them
    have to come, then the others; rest_slots, to_come (threads, N of a layer) int32: where what
    fired in each thread is, and which of that has not come
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
    rests: NeuronSlots
    queue: ReadQueue
    ahead: ReadAhead
    marks: np.ndarray
    mark_parts: np.ndarray
    gate_slots: np.ndarray
    late: np.ndarray
    rest_slots: np.ndarray
    to_come: np.ndarray
    options: np.ndarray
    counters: np.ndarray
    waits: np.ndarray
    failed: np.ndarray


@njit(nogil=True, cache=True)
def gate_lacking(stored, row):
    """The slot of a neuron's gate, and whether that has to be asked for; its bias is there."""
    slot = slot_for(stored.gates, row)
    missing = lacks(stored.gates, row)
    if missing and stored.gate_bias.shape[0]:
        stored.arrays.gate_bias[slot] = stored.gate_bias[row]
    return slot, missing


@njit(nogil=True, cache=True)
def rest_lacking(stored, row):
    """The slot of its up and down rows, and whether these have to be asked for."""
    slot = slot_for(stored.rests, row)
    missing = lacks(stored.rests, row)
    if missing:
        if stored.up_bias.shape[0]:
            stored.arrays.up_bias[slot] = stored.up_bias[row]
        if stored.down_norms.shape[0]:
            stored.arrays.down_norms[slot] = stored.down_norms[row]
    return slot, missing


@njit(nogil=True, cache=True)
def mark(stored, row, part):
    """Have a part read with the next `ask_marked`."""
    place = stored.file.places[row]
    stored.marks[place] = row + 1
    stored.mark_parts[place] |= np.uint8(part)


@njit(nogil=True, cache=True)
def want_gate(stored, row):
    """The slot of a neuron's gate; it is marked for `ask_marked` where it has to be asked for."""
    slot, missing = gate_lacking(stored, row)
    state = stored.gates.state
    state[NUM_WANTED] += 1
    state[NUM_MISSED] += not is_here(stored.gates, row)
    if missing:
        mark(stored, row, GATE)
    return slot


@njit(nogil=True, cache=True)
def want_rest(stored, row):
    """The same of its up and down rows."""
    slot, missing = rest_lacking(stored, row)
    state = stored.rests.state
    state[NUM_WANTED] += 1
    state[NUM_MISSED] += not is_here(stored.rests, row)
    if missing:
        mark(stored, row, REST)
    return slot


@njit(nogil=True, cache=True)
def ask_marked(stored, most_bytes, most_gap):
    """Ask for what was marked, in the file's order, in reads of `cut_spans`."""
    queue, marks = stored.queue, stored.marks
    await_batch(queue, NOW)
    rows, parts = queue.rows[NOW], queue.parts[NOW]
    count = 0
    for place in range(marks.shape[0]):
        if marks[place]:
            rows[count], parts[count] = marks[place] - 1, stored.mark_parts[place]
            marks[place], stored.mark_parts[place] = 0, 0
            count += 1
    ask_for(queue, stored.file, NOW, count, most_bytes, most_gap)


@njit(nogil=True, cache=True)
def compute_ahead(stored, layer, thread, num_threads, x, function, num_tokens):
    """Scores of neurons whose gates are in memory: fewer are then read in vain.

    For this thread's part of `score_ahead`; the greatest activation of any token, where up and down
    rows are not in memory. Another thread may be giving away slots: whom it meets is a guess the
    worse.
    """
    gates, scores, bias = stored.gates, stored.ahead.scores, stored.gate_bias
    first, last = stored.arrays.offsets[layer], stored.arrays.offsets[layer + 1]
    begin, end = ahead_part(last - first, thread, num_threads)
    for n in range(begin, end):
        row = first + n
        if scores[n] <= 0 or stored.rests.asked[row] or not is_here(gates, row):
            continue
        shift = bias[row] if bias.shape[0] else np.float32(0)
        score = np.float32(0)
        slot = max(0, np.int64(gates.slot_of[row]))
        for t in range(num_tokens):
            product = dot_lone_row(stored.arrays.gate, slot, x, t)
            score = max(score, activate(function, product + shift))
        scores[n] = score


@njit(nogil=True, cache=True)
def ask_ahead(stored, layer):
    """Ask for what the layer will probably need, after all that was asked for before.

    Up and down rows of neurons whose gates are in memory, as these say; then gates that a predictor
    chooses, with the rest where bundles are read whole.
    """
    queue, options, ahead = stored.queue, stored.options, stored.ahead
    batch = NOW + 1
    while batch < NUM_BATCHES and num_left(queue, batch):
        batch += 1
    if batch == NUM_BATCHES:  # the disk is slow; what it reads ahead still is enough
        return
    first = stored.arrays.offsets[layer]
    rows, parts = queue.rows[batch], queue.parts[batch]
    count = 0
    for row in likeliest(ahead, layer, first, stored.gates, stored.rests):
        part = 0
        if stored.gates.asked[row]:
            part |= REST if rest_lacking(stored, np.int64(row))[1] else 0
        else:
            part |= GATE if gate_lacking(stored, np.int64(row))[1] else 0
            if options[READS_WHOLE]:
                part |= REST if rest_lacking(stored, np.int64(row))[1] else 0
        if part:
            rows[count], parts[count] = row, part
            ahead.rows[count], ahead.parts[count] = row, part
            count += 1
    ahead.state[0], ahead.state[1] = layer, count
    ask_for(queue, stored.file, batch, count, options[MOST_BYTES], _ALONE)


@njit(nogil=True, cache=True)
def await_some(stored, thread, seen):
    """Wait until something came since `num_come` was `seen`."""
    started = now_ns()
    await_more(stored.queue, seen)
    stored.waits[thread] += now_ns() - started


@njit(nogil=True, cache=True)
def await_row(stored, thread, slots, row):
    """Wait for a neuron's part; False where it could not be read."""
    while True:
        seen = num_come(stored.queue)
        found = has_come(slots, row)
        if found:
            return found > 0
        await_some(stored, thread, seen)


@njit(nogil=True, cache=True)
def await_rows(stored, thread, slots, first, ids, count):
    """The same of neurons first + ids[:count], or of `count` from `first` on without `ids`."""
    for i in range(count):
        row = first + (np.int64(ids[i]) if ids.shape[0] else i)
        if not await_row(stored, thread, slots, row):
            return False
    return True
