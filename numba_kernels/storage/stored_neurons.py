"""A shard of neurons in a file, some of them in slots: what is wanted, asked for, and has come."""

from typing import NamedTuple

import numpy as np

from numba_kernels.compiler import njit
from numba_kernels.decode.activations import activate
from numba_kernels.ir.vector_ir import dot_lone_row
from numba_kernels.serve.doorbell import atomic_load, now_ns
from numba_kernels.serve.layer_ffn import FfnArrays
from numba_kernels.storage.neuron_slots import (
    NUM_MISSED,
    NUM_WANTED,
    NeuronSlots,
    lacking,
    slot_for,
)
from numba_kernels.storage.read_ahead import ReadAhead, ahead_part, best_rows
from numba_kernels.storage.reads.neuron_file import GATE, REST, NeuronFile
from numba_kernels.storage.reads.read_queue import (
    FAILED,
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
HAS_GATES, READS_WHOLE, MOST_BYTES, MOST_GAP, FORGETS, WAITS_FIRST = range(6)
NUM_OPTIONS = 6
SLOTS, GATES = range(2)  # targets of reads: slots, gates that stay
_ALONE = -1  # as the most bytes between neighbours of one read


class StoredNeurons(NamedTuple):
    """A shard of neurons in a file, some of them in slots.

    arrays: up and down rows and their biases lie in slots; so do gates, unless HAS_GATES: then all
    of them are there, in the shard's order. gate_bias, up_bias, down_norms (N,) or (0,): of all
    marks (bundles of a layer,) int32, zero: rows + 1 by their places in the file, while they are
    gathered; mark_parts the same uint8
    gate_slots (N of a layer,), rest_slots, to_come (threads, N of a layer) int32: where candidates'
    gates, and what fired in each thread, are; which of the latter have not come
    options (6,) int64: whether gates stay, whether a bundle is read whole, of spans, and what
    benchmarks leave out
    waits, failed (threads,) int64: nanoseconds that each thread waited for reads so far, and
    whether what it needed in this request could not be read
    """

    arrays: FfnArrays
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_norms: np.ndarray
    file: NeuronFile
    slots: NeuronSlots
    queue: ReadQueue
    ahead: ReadAhead
    marks: np.ndarray
    mark_parts: np.ndarray
    gate_slots: np.ndarray
    rest_slots: np.ndarray
    to_come: np.ndarray
    options: np.ndarray
    waits: np.ndarray
    failed: np.ndarray


@njit(nogil=True, cache=True)
def slot_lacking(stored, row, parts):
    """The neuron's slot, and what has to be asked for; its biases are there."""
    slot = slot_for(stored.slots, row)
    missing = lacking(stored.slots, slot, parts)
    if missing:
        if stored.gate_bias.shape[0] and not stored.options[HAS_GATES]:
            stored.arrays.gate_bias[slot] = stored.gate_bias[row]
        if stored.up_bias.shape[0]:
            stored.arrays.up_bias[slot] = stored.up_bias[row]
        if stored.down_norms.shape[0]:
            stored.arrays.down_norms[slot] = stored.down_norms[row]
    return slot, missing


@njit(nogil=True, cache=True)
def want(stored, row, parts):
    """The neuron's slot; what has to be asked for of `parts` is marked for `ask_marked`."""
    slot, missing = slot_lacking(stored, row, parts)
    state = stored.slots.state
    state[NUM_WANTED] += 1
    state[NUM_MISSED] += np.int32(parts) & ~atomic_load(stored.slots.held, slot) != 0
    if missing:
        place = stored.file.places[row]
        stored.marks[place], stored.mark_parts[place] = row + 1, missing
    return slot


@njit(nogil=True, cache=True)
def ask_marked(stored, most_bytes, most_gap):
    """Ask for what was marked, in the file's order, in reads of `cut_spans`."""
    queue, marks = stored.queue, stored.marks
    await_batch(queue, NOW)
    rows, parts, targets = queue.rows[NOW], queue.parts[NOW], queue.targets[NOW]
    count = 0
    for place in range(marks.shape[0]):
        if marks[place]:
            rows[count], parts[count] = marks[place] - 1, stored.mark_parts[place]
            targets[count] = stored.slots.slot_of[rows[count]]
            marks[place] = 0
            count += 1
    ask_for(queue, stored.file, NOW, count, most_bytes, most_gap, SLOTS)


@njit(nogil=True, cache=True)
def compute_ahead(stored, layer, thread, num_threads, x, function, num_tokens):
    """Scores of neurons that would be read, by their gates: fewer are then read in vain.

    For this thread's part of `score_ahead`, from gates that stay in memory; the greatest activation
    of any token. Another thread may be giving away slots: whom it meets is a guess the worse.
    """
    slots, scores, bias = stored.slots, stored.ahead.scores, stored.gate_bias
    first, last = stored.arrays.offsets[layer], stored.arrays.offsets[layer + 1]
    begin, end = ahead_part(last - first, thread, num_threads)
    for n in range(begin, end):
        slot = slots.slot_of[first + n]
        if scores[n] > 0 and (slot < 0 or not slots.asked[slot] & REST):
            shift = bias[first + n] if bias.shape[0] else np.float32(0)
            score = np.float32(0)
            for t in range(num_tokens):
                product = dot_lone_row(stored.arrays.gate, first + n, x, t)
                score = max(score, activate(function, product + shift))
            scores[n] = score


@njit(nogil=True, cache=True)
def ask_ahead(stored, layer):
    """Ask for what the layer will probably need, after all that was asked for before."""
    queue, options, ahead = stored.queue, stored.options, stored.ahead
    batch = NOW + 1
    while batch < NUM_BATCHES and num_left(queue, batch):
        batch += 1
    if batch == NUM_BATCHES:  # the disk is slow; what it reads ahead still is enough
        return
    whole = GATE | REST if options[READS_WHOLE] else GATE
    wanted_parts = REST if options[HAS_GATES] else whole
    first = stored.arrays.offsets[layer]
    rows, parts, targets = queue.rows[batch], queue.parts[batch], queue.targets[batch]
    count = 0
    for row in best_rows(ahead, layer, first, stored.slots, wanted_parts):
        slot, missing = slot_lacking(stored, np.int64(row), wanted_parts)
        if missing:
            rows[count], parts[count], targets[count] = row, missing, slot
            count += 1
    ask_for(queue, stored.file, batch, count, options[MOST_BYTES], _ALONE, SLOTS)


@njit(nogil=True, cache=True)
def has_come(stored, slot, parts):
    """1 where the slot has the parts, 0 where they are to come, -1 where a read failed."""
    held = np.int64(atomic_load(stored.slots.held, slot))
    if held & FAILED:
        return -1
    return 1 if held & parts == parts else 0


@njit(nogil=True, cache=True)
def await_some(stored, thread, seen):
    """Wait until something came since `num_come` was `seen`."""
    started = now_ns()
    await_more(stored.queue, seen)
    stored.waits[thread] += now_ns() - started


@njit(nogil=True, cache=True)
def await_rows(stored, thread, slots, count, parts):
    """Wait for parts of slots[:count]; False where one could not be read."""
    for i in range(count):
        while True:
            seen = num_come(stored.queue)
            found = has_come(stored, np.int64(slots[i]), parts)
            if found < 0:
                return False
            if found:
                break
            await_some(stored, thread, seen)
    return True
