"""A layer's feed-forward network of neurons that may have to be read first.

The same as `numba_kernels.serve.layer_ffn`, to the last bit: the same kernels go through the same
neurons in the same order, only that a row is looked up in a slot. What is missing is read between
barriers: for gates before the first product, up and down rows once it is known who fires.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from numba_kernels.decode.batch_ffn import (
    block_size,
    gate_products_kernel,
    keep_some_kernel,
    thread_lists,
)
from numba_kernels.decode.ffn import (
    by_neuron,
    gate_values_kernel,
    keep_fired_kernel,
    up_down_kernel,
)
from numba_kernels.decode.vectors import prepared
from numba_kernels.serve.doorbell import now_ns
from numba_kernels.serve.layer_ffn import FfnArrays, add_up, own_candidates, part_of
from numba_kernels.serve.mailbox import meet
from numba_kernels.serve.work_stealing import block_rows, next_block
from numba_kernels.storage.neuron_file import GATE, REST, NeuronFile, Wanted
from numba_kernels.storage.neuron_slots import (
    EPOCH,
    NUM_MISSED,
    NUM_WANTED,
    NeuronSlots,
    slot_for,
)
from numba_kernels.storage.read_queue import ReadQueue, read_all

# words of `StoredNeurons.options`
HAS_GATES, READS_WHOLE, MOST_BYTES, MOST_GAP = range(4)
NUM_OPTIONS = 4
WAITED_NS = 0  # word of `waits`
SLOTS, LAYER, GATES = range(3)  # targets of reads: slots, a whole layer, gates that stay


class StoredNeurons(NamedTuple):
    """A shard of neurons in a file, some of them in slots.

    arrays: up and down rows and their biases lie in slots; so do gates, unless HAS_GATES: then all
    of them are there, in the shard's order. gate_bias, up_bias (N,) or (0,): of all neurons
    marks (bundles of a layer,) int32, zero: rows + 1 by their places in the file, while they are
    gathered; mark_parts the same uint8
    gate_slots (N of a layer,), rest_slots (threads, N of a layer) int32: where candidates' gates,
    and what fired in each thread, are
    options (4,) int64: whether gates stay, whether a bundle is read whole, and of spans
    waits (1,) int64: nanoseconds that threads waited for reads
    """

    arrays: FfnArrays
    gate_bias: np.ndarray
    up_bias: np.ndarray
    file: NeuronFile
    slots: NeuronSlots
    queue: ReadQueue
    wanted: Wanted
    marks: np.ndarray
    mark_parts: np.ndarray
    gate_slots: np.ndarray
    rest_slots: np.ndarray
    options: np.ndarray
    waits: np.ndarray


@njit(nogil=True, cache=True)
def _want(stored, row, parts):
    """The neuron's slot; what it lacks of `parts` is marked to be read."""
    slots = stored.slots
    slot = slot_for(slots, row)
    missing = np.uint8(parts) & ~slots.held[slot]
    slots.state[NUM_WANTED] += 1
    if missing:
        slots.state[NUM_MISSED] += 1
        place = stored.file.places[row]
        stored.marks[place], stored.mark_parts[place] = row + 1, missing
        if stored.gate_bias.shape[0] and not stored.options[HAS_GATES]:
            stored.arrays.gate_bias[slot] = stored.gate_bias[row]
        if stored.up_bias.shape[0]:
            stored.arrays.up_bias[slot] = stored.up_bias[row]
    return slot


@njit(nogil=True, cache=True)
def _read_marked(stored):
    """Read what `_want` marked, wait for it, and note what is held now."""
    wanted, slots, marks = stored.wanted, stored.slots, stored.marks
    count = 0
    for place in range(marks.shape[0]):
        if marks[place]:
            row = marks[place] - 1
            wanted.rows[count], wanted.parts[count] = row, stored.mark_parts[place]
            wanted.targets[count] = slots.slot_of[row]
            marks[place] = 0
            count += 1
    if count == 0:
        return
    options, started = stored.options, now_ns()
    came = read_all(
        stored.queue, stored.file, wanted, count, options[MOST_BYTES], options[MOST_GAP], SLOTS
    )
    stored.waits[WAITED_NS] += now_ns() - started
    for i in range(count if came else 0):
        slots.held[wanted.targets[i]] |= wanted.parts[i]


@njit(nogil=True, cache=True)
def _read_gates(stored, first, num_neurons, is_listed, ids, keeps_all):
    """Bring the candidates' gates into slots, `stored.gate_slots`; by one thread alone."""
    parts = GATE
    if keeps_all or (is_listed and stored.options[READS_WHOLE]):
        parts = GATE | REST
    for i in range(ids.shape[0] if is_listed else num_neurons):
        row = first + (ids[i] if is_listed else i)
        stored.gate_slots[i] = _want(stored, row, parts)
    _read_marked(stored)


@njit(nogil=True, cache=True)
def _read_rest(stored, first, scratch, num_threads):
    """Bring up and down of all that fired into slots, `stored.rest_slots`; by one thread alone."""
    for thread in range(num_threads):
        fired_ids = scratch.fired_ids[thread]
        for i in range(scratch.counts[thread]):
            stored.rest_slots[thread, i] = _want(stored, first + fired_ids[i], REST)
    _read_marked(stored)


@njit(nogil=True, cache=True)
def _work_stealing_gates(
    thread, num_threads, num_neurons, gate, bias, is_listed, ids, places, token_masks, x, function,
    num_tokens, lists, scratch,
):  # fmt: skip
    """scratch.values of the candidates in the blocks that this thread takes.

    As in `layer_ffn`, candidate i's gate being row places[i].
    """
    counters, values = scratch.counters, scratch.values
    products = by_neuron(values, num_tokens)
    size = block_rows(gate) if num_tokens == 1 else block_size(gate, num_tokens)
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        first, last = own_candidates(part, num_threads, num_neurons, is_listed, ids)
        begin = first + next_block(counters, part) * size
        while begin < last:
            end = min(begin + size, last)
            if num_tokens == 1:
                gate_values_kernel(
                    gate, bias, places, x, function, begin, end, last, values[begin:end]
                )
            else:
                gate_products_kernel(
                    gate, places, token_masks, x, begin, end, last, products[begin:end], lists
                )
            begin = first + next_block(counters, part) * size


@njit(nogil=True, cache=True)
def stored_layer_ffn(
    thread, num_threads, cells, service, layer, is_listed, ids, token_masks, thresholds, x, stored,
    scratch, function, out,
):  # fmt: skip
    """`numba_kernels.serve.layer_ffn.layer_ffn` of stored neurons; False where reads failed.

    Then `stored.queue.failure` says how, `out` is of no use, and nothing is held that did not come.
    """
    arrays, failure = stored.arrays, stored.queue.failure
    first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
    num_neurons, num_tokens = last - first, x.shape[0]
    has_gates = stored.options[HAS_GATES] != 0
    if thread == 0:
        stored.slots.state[EPOCH] += 1
        failure[0] = 0
        if not has_gates:
            _read_gates(stored, first, num_neurons, is_listed, ids, thresholds.gate < 0)
    if not has_gates:
        meet(cells, service, num_threads)
        if failure[0] != 0:
            return False
    gate, gate_bias = arrays.gate, arrays.gate_bias
    if has_gates:
        gate, gate_bias = gate[first:last], part_of(gate_bias, first, last)
    places = ids if has_gates else stored.gate_slots[: ids.shape[0] if is_listed else num_neurons]
    begin, end = own_candidates(thread, num_threads, num_neurons, is_listed, ids)
    sums = scratch.sums[thread, :num_tokens]
    sums[:] = 0
    gates = scratch.gates[thread]
    fired_ids, fired_masks = scratch.fired_ids[thread], scratch.fired_masks[thread]
    lists = thread_lists(scratch.lists, thread, num_tokens)
    vectors = prepared(gate, x, scratch.inputs, thread)
    _work_stealing_gates(
        thread, num_threads, num_neurons, gate, gate_bias, is_listed, ids, places, token_masks,
        vectors, function, num_tokens, lists, scratch,
    )  # fmt: skip
    meet(cells, service, num_threads)
    if num_tokens == 1:
        values = scratch.values[begin:end]
        num_fired = keep_fired_kernel(
            ids, token_masks, thresholds.gate, begin, end, values, fired_ids, fired_masks, gates
        )
    else:
        products = by_neuron(scratch.values, num_tokens)[begin:]
        num_fired = keep_some_kernel(
            part_of(stored.gate_bias, first, last), ids, token_masks, function, thresholds.gate,
            begin, end, products, fired_ids, fired_masks, by_neuron(gates, num_tokens),
        )  # fmt: skip
    scratch.counts[thread] = num_fired
    scratch.up_counts[thread] = num_fired
    meet(cells, service, num_threads)
    if thread == 0:
        scratch.counters[:] = 0  # for the next request
        _read_rest(stored, first, scratch, num_threads)
    meet(cells, service, num_threads)
    if failure[0] != 0:
        return False
    slots = stored.rest_slots[thread]
    num_fired = up_down_kernel(
        arrays.up, arrays.up_bias, arrays.down, arrays.down_norms, slots, fired_masks, num_fired,
        gates, vectors, function, thresholds.product, sums, lists,
    )  # fmt: skip
    for i in range(num_fired):  # with drelu fewer than fired before
        fired_ids[i] = stored.slots.row_of[slots[i]] - first
    scratch.counts[thread] = num_fired
    meet(cells, service, num_threads)
    add_up(thread, num_threads, arrays.down, out, scratch.sums, arrays.down_bias[layer])
    return True
