"""A layer's feed-forward network of neurons that may have to be read first.

The same as `numba_kernels.serve.layer_ffn`, to the last bit: the same kernels go through the same
neurons, only that a row is looked up in a slot. Gates that are not in memory are asked for first.
One token is multiplied with those that are there, then with the others as they come. Once it is
known who fires, up and down rows are asked for; each thread multiplies with the up rows that are
there, then with the others as they come, and adds down rows in ascending order at the end.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate_up, passes
from hotcold.numba_kernels.decode.batch_ffn import contribution, keep_some_kernel, thread_lists
from hotcold.numba_kernels.decode.ffn import by_neuron, keep_fired_kernel, up_down_kernel
from hotcold.numba_kernels.decode.vectors import quantize_activations
from hotcold.numba_kernels.ir.vector_ir import dot_ahead
from hotcold.numba_kernels.serve.doorbell import atomic_load
from hotcold.numba_kernels.serve.layer_ffn import (
    add_up,
    own_candidates,
    part_of,
    work_stealing_gates,
)
from hotcold.numba_kernels.serve.mailbox import barrier_wait
from hotcold.numba_kernels.storage.arriving_gates import ask_gates, values_here, values_late
from hotcold.numba_kernels.storage.neuron_slots import begin_request, forget_slots, has_all
from hotcold.numba_kernels.storage.offloaded_neurons import (
    FORGETS,
    MAX_BYTES,
    MAX_GAP,
    WAITS_FIRST,
    ask_ahead,
    ask_marked,
    await_rows,
    await_some,
    compute_ahead,
    want_up_downs,
)
from hotcold.numba_kernels.storage.read_ahead import layer_ahead, learn, note_begun, score_ahead
from hotcold.numba_kernels.storage.read_queue import FAILED, HERE, num_come, settle, take_back


@njit(nogil=True, cache=True)
def _begin(stored, first, last):
    """Before a request of the neurons first..last-1; what was read ahead goes on."""
    begin_request(stored.gates, last - first)
    begin_request(stored.up_downs, last - first)
    if stored.queue.failure[0]:
        settle(stored.queue, stored.gates.asked, stored.up_downs.asked)
        stored.queue.failure[0] = 0
    if stored.options[FORGETS]:
        settle(stored.queue, stored.gates.asked, stored.up_downs.asked)
        forget_slots(stored.up_downs)
        if not has_all(stored.gates):
            forget_slots(stored.gates)


@njit(nogil=True, cache=True)
def _end_ahead(stored):
    """Before anything is looked up: what was read ahead and not begun is not wanted any more."""
    take_back(stored.queue, stored.gates.asked, stored.up_downs.asked)
    note_begun(stored.ahead, stored.gates, stored.up_downs)


@njit(nogil=True, cache=True)
def _request_up_down(stored, first, scratch, num_threads):
    """Request up and down of all that fired, in `stored.up_down_slots`; by one thread alone."""
    if has_all(stored.gates):
        _end_ahead(stored)
    for thread in range(num_threads):
        ids, count = scratch.fired_ids[thread], scratch.counts[thread]
        want_up_downs(stored, first, ids, count, stored.up_down_slots[thread], stored.missing)
    ask_marked(stored, stored.options[MAX_BYTES], stored.options[MAX_GAP])


@njit(nogil=True, cache=True)
def _scale_arriving(stored, thread, first, ids, up, bias, slots, num_fired, x, function, h):
    """h[i] *= up[n] . x[0] + bias[n], n = slots[i], in the order in which rows come.

    Of neurons first + ids[i]. False where one could not be read; when all of them have come.
    """
    to_come, held = stored.to_come[thread], stored.up_downs.held
    num_to_come = num_fired
    for i in range(num_fired):
        to_come[i] = i
    while num_to_come:
        seen, left = num_come(stored.queue), 0
        for k in range(num_to_come):
            i = int(to_come[k])
            found = atomic_load(held, first + np.int64(ids[i]))
            if found == FAILED:
                return False
            if found != HERE:
                to_come[left] = i
                left += 1
            elif up.shape[0]:
                following = to_come[min(k + 1, num_to_come - 1)]
                factor = dot_ahead(up, slots[i], slots[following], x, 0)
                if bias.shape[0]:
                    factor += bias[slots[i]]
                h[i] *= activate_up(function, factor)
        if left == num_to_come:
            await_some(stored, thread, seen)
        num_to_come = left
    return True


@njit(nogil=True, cache=True)
def _keep_large(down_norms, slots, num_fired, h, least):
    """Keep those that contribute more than `least`, in their order; their number."""
    kept = 0
    for i in range(num_fired):
        if passes(contribution(h[i], down_norms, np.int64(slots[i])), least):
            slots[kept], h[kept] = slots[i], h[i]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def _up_down(
    stored, thread, first, ids, num_fired, fired_masks, gates, vectors, function, least, sums, lists
):
    """Add what this thread's neurons contribute; how many fired, or -1 where reads failed."""
    arrays, slots = stored.arrays, stored.up_down_slots[thread]
    is_one = sums.shape[0] == 1
    if (not is_one or stored.options[WAITS_FIRST]) and not await_rows(
        stored, thread, stored.up_downs, first, ids, num_fired
    ):
        return -1
    if not is_one:
        return up_down_kernel(
            arrays.up, arrays.up_bias, arrays.down, arrays.down_norms, slots, fired_masks,
            num_fired, gates, vectors, function, least, sums, lists,
        )  # fmt: skip
    up, bias = arrays.up, arrays.up_bias
    if not _scale_arriving(
        stored, thread, first, ids, up, bias, slots, num_fired, vectors, function, gates
    ):
        return -1
    if arrays.up.shape[0] and least >= 0:
        num_fired = _keep_large(arrays.down_norms, slots, num_fired, gates, least)
    return up_down_kernel(
        arrays.up[:0], arrays.up_bias, arrays.down, arrays.down_norms, slots, fired_masks,
        num_fired, gates, vectors, function, least, sums, lists,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _await_gates(stored, first, num_neurons, is_listed, ids):
    """Several tokens' gates are waited for before the first product, by one thread for all."""
    count = ids.shape[0] if is_listed else num_neurons
    stored.failed[0] = not await_rows(stored, 0, stored.gates, first, ids, count)


@njit(nogil=True, cache=True)
def stored_layer_ffn(
    thread, num_threads, cells, service, layer, is_listed, ids, token_masks, thresholds, x, stored,
    scratch, function, out,
):  # fmt: skip
    """`numba_kernels.serve.layer_ffn.layer_ffn` of stored neurons; False where reads failed.

    Then `stored.queue.failure` says how, `out` is of no use, and nothing is held that did not come.
    """
    arrays = stored.arrays
    first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
    num_neurons, num_tokens = last - first, x.shape[0]
    gates_stay, is_one = has_all(stored.gates), num_tokens == 1
    awaits_gates = not gates_stay and (not is_one or stored.options[WAITS_FIRST] != 0)
    stored.failed[thread] = 0
    if thread == 0:
        _begin(stored, first, last)
        if not gates_stay:
            _end_ahead(stored)
            ask_gates(stored, first, num_neurons, is_listed, ids, thresholds.gate < 0)
            if awaits_gates:
                _await_gates(stored, first, num_neurons, is_listed, ids)
    if not gates_stay:
        barrier_wait(cells, service, num_threads)
        # Else thread 0 may say already that a gate did not come, before another looks here.
        if awaits_gates and stored.failed[0]:
            return False
    following = layer_ahead(stored.ahead, layer, num_tokens)
    begin, end = own_candidates(thread, num_threads, num_neurons, is_listed, ids)
    sums = scratch.sums[thread, :num_tokens]
    sums[:] = 0
    gates = scratch.gates[thread]
    fired_ids, fired_masks = scratch.fired_ids[thread], scratch.fired_masks[thread]
    lists = thread_lists(scratch.lists, thread, num_tokens)
    vectors = quantize_activations(arrays.gate, x, scratch.inputs, thread)
    if gates_stay or not is_one:
        gate, gate_bias, places = arrays.gate, arrays.gate_bias, ids
        if gates_stay:
            gate, gate_bias = gate[first:last], part_of(gate_bias, first, last)
        else:
            places = stored.gate_slots[: ids.shape[0] if is_listed else num_neurons]
        work_stealing_gates(
            thread, num_threads, num_neurons, gate, gate_bias, is_listed, ids, places, token_masks,
            vectors, function, num_tokens, lists, scratch,
        )  # fmt: skip
    else:
        values_here(stored, vectors, function, scratch.values)
    if following >= 0:  # while gates, or what was read ahead, still arrive
        score_ahead(stored.ahead, following, thread, num_threads, x)
    if not gates_stay and is_one:
        stored.failed[thread] = not values_late(
            stored, thread, first, is_listed, ids, vectors, function, scratch.values
        )
    barrier_wait(cells, service, num_threads)
    if stored.failed.any():
        return False
    if is_one:
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
    barrier_wait(cells, service, num_threads)
    if thread == 0:
        scratch.counters[:] = 0  # for the next request
        _request_up_down(stored, first, scratch, num_threads)
        learn(stored.ahead, layer, stored.gates, stored.up_downs)
    if following >= 0:
        compute_ahead(stored, following, thread, num_threads, vectors, function, num_tokens)
    barrier_wait(cells, service, num_threads)
    if thread == 0 and following >= 0:
        ask_ahead(stored, following)
    num_fired = _up_down(
        stored, thread, first, fired_ids, num_fired, fired_masks, gates, vectors, function,
        thresholds.product, sums, lists,
    )  # fmt: skip
    stored.failed[thread] = num_fired < 0
    slots = stored.up_down_slots[thread]
    for i in range(num_fired):  # with drelu fewer than fired before
        fired_ids[i] = stored.up_downs.row_of[slots[i]] - first
    scratch.counts[thread] = max(0, num_fired)
    barrier_wait(cells, service, num_threads)
    if stored.failed.any():
        return False
    add_up(thread, num_threads, arrays.down, out, scratch.sums, arrays.down_bias[layer])
    return True
