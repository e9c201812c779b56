"""A layer's feed-forward network over offloaded neurons, some of which have to be read first.

Bit-equal to `numba_kernels.serve.layer_ffn`: the same kernels compute the same neurons in the same
order, with rows looked up in slots. Reads of missing gates are submitted first; one token's loaded
gates are computed meanwhile, the others as their reads complete. Then reads of the fired neurons'
up and down rows are submitted. Each thread multiplies with up rows as they are loaded, and adds
down rows in ascending order at the end.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate_up
from hotcold.numba_kernels.decode.batch_ffn import keep_some_kernel, thread_lists
from hotcold.numba_kernels.decode.ffn import (
    by_neuron,
    drop_small,
    keep_fired_kernel,
    up_down_kernel,
)
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
from hotcold.numba_kernels.storage.neuron_slots import begin_request, evict_all, has_all
from hotcold.numba_kernels.storage.offloaded_neurons import (
    EVICTS_ALL,
    MAX_BYTES,
    MAX_GAP,
    WAITS_FIRST,
    await_rows,
    await_some,
    locate_up_downs,
    rescore_ahead,
    submit_ahead,
    submit_marked,
)
from hotcold.numba_kernels.storage.pending_gates import loaded_values, pending_values, submit_gates
from hotcold.numba_kernels.storage.read_ahead import (
    adapt,
    next_layer_ahead,
    note_started,
    score_ahead,
)
from hotcold.numba_kernels.storage.read_queue import (
    FAILED,
    LOADED,
    cancel_reads,
    drain,
    num_completed,
)


@njit(nogil=True, cache=True)
def _begin(shard, first, last):
    """Start a request of neurons first..last-1; reads ahead stay in flight."""
    begin_request(shard.gates, last - first)
    begin_request(shard.up_downs, last - first)
    if shard.queue.failure[0]:
        drain(shard.queue, shard.gates.requested, shard.up_downs.requested)
        shard.queue.failure[0] = 0
    if shard.options[EVICTS_ALL]:
        drain(shard.queue, shard.gates.requested, shard.up_downs.requested)
        evict_all(shard.up_downs)
        if not has_all(shard.gates):
            evict_all(shard.gates)


@njit(nogil=True, cache=True)
def _cancel_ahead(shard):
    """Cancel reads ahead that have not started, before the layer's own lookups."""
    cancel_reads(shard.queue, shard.gates.requested, shard.up_downs.requested)
    note_started(shard.ahead, shard.gates, shard.up_downs)


@njit(nogil=True, cache=True)
def _submit_up_downs(shard, first, scratch, num_threads):
    """Submit reads of all fired neurons' up and down rows; called by one thread alone."""
    if has_all(shard.gates):
        _cancel_ahead(shard)
    for thread in range(num_threads):
        ids, count = scratch.fired_ids[thread], scratch.counts[thread]
        locate_up_downs(shard, first, ids, count, shard.up_down_slots[thread], shard.missing)
    submit_marked(shard, shard.options[MAX_BYTES], shard.options[MAX_GAP])


@njit(nogil=True, cache=True)
def _scale_pending(shard, thread, first, ids, up, bias, slots, num_fired, x, function, h):
    """h[i] *= up[n] . x[0] + bias[n], n = slots[i], of neurons first + ids[i] as they are loaded.

    Returns True when all are loaded, False where a read failed.
    """
    pending, loaded = shard.pending[thread], shard.up_downs.loaded
    num_pending = num_fired
    for i in range(num_fired):
        pending[i] = i
    while num_pending:
        seen, left = num_completed(shard.queue), 0
        for k in range(num_pending):
            i = int(pending[k])
            found = atomic_load(loaded, first + np.int64(ids[i]))
            if found == FAILED:
                return False
            if found != LOADED:
                pending[left] = i
                left += 1
            elif up.shape[0]:
                following = pending[min(k + 1, num_pending - 1)]
                factor = dot_ahead(up, slots[i], slots[following], x, 0)
                if bias.shape[0]:
                    factor += bias[slots[i]]
                h[i] *= activate_up(function, factor)
        if left == num_pending:
            await_some(shard, thread, seen)
        num_pending = left
    return True


@njit(nogil=True, cache=True)
def _up_down(
    shard, thread, first, ids, num_fired, fired_masks, gates, vectors, function, threshold, sums,
    lists,
):  # fmt: skip
    """Add this thread's neurons to its sums; returns how many fired, or -1 where a read failed."""
    arrays, slots = shard.arrays, shard.up_down_slots[thread]
    is_one = sums.shape[0] == 1
    if (not is_one or shard.options[WAITS_FIRST]) and not await_rows(
        shard, thread, shard.up_downs, first, ids, num_fired
    ):
        return -1
    if not is_one:
        return up_down_kernel(
            arrays.up, arrays.up_bias, arrays.down, arrays.down_norms, slots, fired_masks,
            num_fired, gates, vectors, function, threshold, sums, lists,
        )  # fmt: skip
    up, bias = arrays.up, arrays.up_bias
    if not _scale_pending(
        shard, thread, first, ids, up, bias, slots, num_fired, vectors, function, gates
    ):
        return -1
    if arrays.up.shape[0] and threshold >= 0:
        num_fired = drop_small(slots, num_fired, gates, arrays.down_norms, threshold)
    return up_down_kernel(
        arrays.up[:0], arrays.up_bias, arrays.down, arrays.down_norms, slots, fired_masks,
        num_fired, gates, vectors, function, threshold, sums, lists,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _await_gates(shard, first, num_neurons, is_listed, ids):
    """Wait for all gates of several tokens; called by one thread for all."""
    count = ids.shape[0] if is_listed else num_neurons
    shard.failed[0] = not await_rows(shard, 0, shard.gates, first, ids, count)


@njit(nogil=True, cache=True)
def offloaded_layer_ffn(
    thread, num_threads, cells, service, layer, is_listed, ids, token_masks, thresholds, x, shard,
    scratch, function, out,
):  # fmt: skip
    """`numba_kernels.serve.layer_ffn.layer_ffn` over offloaded neurons; False where a read failed.

    Then `shard.queue.failure` says why, and `out` is undefined.
    """
    arrays = shard.arrays
    first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
    num_neurons, num_tokens = last - first, x.shape[0]
    gates_stay, is_one = has_all(shard.gates), num_tokens == 1
    awaits_gates = not gates_stay and (not is_one or shard.options[WAITS_FIRST] != 0)
    shard.failed[thread] = 0
    if thread == 0:
        _begin(shard, first, last)
        if not gates_stay:
            _cancel_ahead(shard)
            submit_gates(shard, first, num_neurons, is_listed, ids, thresholds.gate < 0)
            if awaits_gates:
                _await_gates(shard, first, num_neurons, is_listed, ids)
    if not gates_stay:
        barrier_wait(cells, service, num_threads)
        # Without `awaits_gates` thread 0 may have set its flag already, for a pending gate.
        if awaits_gates and shard.failed[0]:
            return False
    following = next_layer_ahead(shard.ahead, layer, num_tokens)
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
            places = shard.gate_slots[: ids.shape[0] if is_listed else num_neurons]
        work_stealing_gates(
            thread, num_threads, num_neurons, gate, gate_bias, is_listed, ids, places, token_masks,
            vectors, function, num_tokens, lists, scratch,
        )  # fmt: skip
    else:
        loaded_values(shard, vectors, function, scratch.values)
    if following >= 0:  # while reads are pending
        score_ahead(shard.ahead, following, thread, num_threads, x)
    if not gates_stay and is_one:
        shard.failed[thread] = not pending_values(
            shard, thread, first, is_listed, ids, vectors, function, scratch.values
        )
    barrier_wait(cells, service, num_threads)
    if shard.failed.any():
        return False
    if is_one:
        values = scratch.values[begin:end]
        num_fired = keep_fired_kernel(
            ids, token_masks, thresholds.gate, begin, end, values, fired_ids, fired_masks, gates
        )
    else:
        products = by_neuron(scratch.values, num_tokens)[begin:]
        num_fired = keep_some_kernel(
            part_of(shard.gate_bias, first, last), ids, token_masks, function, thresholds.gate,
            begin, end, products, fired_ids, fired_masks, by_neuron(gates, num_tokens),
        )  # fmt: skip
    scratch.counts[thread] = num_fired
    scratch.up_counts[thread] = num_fired
    barrier_wait(cells, service, num_threads)
    if thread == 0:
        scratch.counters[:] = 0  # for the next request
        _submit_up_downs(shard, first, scratch, num_threads)
        adapt(shard.ahead, layer, shard.gates, shard.up_downs)
    if following >= 0:
        rescore_ahead(shard, following, thread, num_threads, vectors, function, num_tokens)
    barrier_wait(cells, service, num_threads)
    if thread == 0 and following >= 0:
        submit_ahead(shard, following)
    num_fired = _up_down(
        shard, thread, first, fired_ids, num_fired, fired_masks, gates, vectors, function,
        thresholds.product, sums, lists,
    )  # fmt: skip
    shard.failed[thread] = num_fired < 0
    slots = shard.up_down_slots[thread]
    for i in range(num_fired):  # fewer than before where the product threshold dropped some
        fired_ids[i] = shard.up_downs.row_of[slots[i]] - first
    scratch.counts[thread] = max(0, num_fired)
    barrier_wait(cells, service, num_threads)
    if shard.failed.any():
        return False
    add_up(thread, num_threads, arrays.down, out, scratch.sums, arrays.down_bias[layer])
    return True
