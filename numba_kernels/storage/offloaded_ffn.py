"""Offloaded neurons, some of which have to be read first: their steps of `layer_ffn`.

Bit-equal to neurons in memory: the same kernels compute the same neurons in the same order, with
rows looked up in slots. Reads of missing gates are submitted first; one token's loaded gates are
computed meanwhile, the others as their reads complete. Then reads of the fired neurons' up and down
rows are submitted. Each thread multiplies with up rows as they are loaded, and adds down rows in
ascending order at the end.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate_up
from hotcold.numba_kernels.decode.candidates import FIRST, LAST
from hotcold.numba_kernels.ir.vector_ir import dot_ahead
from hotcold.numba_kernels.serve import ffn_rows
from hotcold.numba_kernels.serve.doorbell import atomic_load
from hotcold.numba_kernels.serve.ffn_rows import (
    GATES,
    FfnArrays,
    part_of,
    work_stealing_products,
)
from hotcold.numba_kernels.serve.mailbox import (
    BYTES_READ,
    PARTS_LOOKED_UP,
    PARTS_MISSED,
    READ_WAIT_NS,
    barrier_wait,
)
from hotcold.numba_kernels.storage.neuron_slots import (
    NUM_LOOKUPS,
    NUM_MISSES,
    begin_request,
    evict_all,
    has_all,
)
from hotcold.numba_kernels.storage.offloaded_neurons import (
    EVICTS_ALL,
    MAX_BYTES,
    MAX_GAP,
    WAITS_FIRST,
    await_row,
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
def _layer_span(shard, layer):
    """First and last row of a layer."""
    starts = shard.arrays.starts[layer]
    return starts[0], starts[starts.shape[0] - 1]


@njit(nogil=True, cache=True)
def layer_rows(shard, layer):
    """`FfnArrays` of one layer's biases and norms, and all slots' rows."""
    arrays = shard.arrays
    first, last = _layer_span(shard, layer)
    return FfnArrays(
        arrays.starts,
        arrays.gate,
        arrays.up,
        arrays.down,
        part_of(arrays.gate_bias, first, last),
        part_of(arrays.up_bias, first, last),
        arrays.down_bias,
        part_of(arrays.down_norms, first, last),
    )


@njit(nogil=True, cache=True)
def _begin_request(shard, first, last):
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
def _await_gates(shard, spans):
    """Wait for all candidates' gates; False where a read failed."""
    for span in spans:
        for i in range(span[FIRST], span[LAST]):
            row = np.int64(shard.gates.row_of[shard.gate_slots[i]])
            if not await_row(shard, 0, shard.gates, row):
                return False
    return True


@njit(nogil=True, cache=True)
def begin(shard, share, scratch):
    """Request the gates that are missing; several tokens wait for all of them.

    Returns False where a read failed; then `shard.queue.failure` says why.
    """
    first, last = _layer_span(shard, share.layer)
    gates_stay, thread = has_all(shard.gates), share.thread
    awaits_gates = share.x.shape[0] > 1 or shard.options[WAITS_FIRST] != 0
    shard.failed[thread] = 0
    if thread == 0:
        _begin_request(shard, first, last)
        if not gates_stay:
            _cancel_ahead(shard)
            submit_gates(
                shard, first, share.selection, share.spans, share.thresholds.gate < 0
            )  # fmt: skip
            if awaits_gates:
                shard.failed[0] = not _await_gates(shard, share.spans)
    if gates_stay:
        return True
    barrier_wait(share.cells, share.service, share.num_threads)
    # Without `awaits_gates` thread 0 may have set its flag already, for a pending gate.
    return not (awaits_gates and shard.failed[0])


@njit(nogil=True, cache=True)
def _layer_ahead(shard, share):
    """The layer to read ahead, or -1."""
    return next_layer_ahead(shard.ahead, share.layer, share.x.shape[0])


@njit(nogil=True, cache=True)
def compute_gates(shard, share, scratch):
    """Gates of all candidates, and the next layer's scores while reads are pending.

    No up products: they wait for reads.
    """
    thread, x, rows, num_tokens = share.thread, share.vectors, share.rows, share.x.shape[0]
    gates_stay, following = has_all(shard.gates), _layer_ahead(shard, share)
    counters, values = scratch.counters[GATES], scratch.values
    if gates_stay:
        first, last = _layer_span(shard, share.layer)
        work_stealing_products(
            counters, share, rows.gate[first:last], rows.gate_bias, share.selection.ids, True,
            values,
        )  # fmt: skip
    elif num_tokens > 1:
        work_stealing_products(
            counters, share, rows.gate, rows.gate_bias, shard.gate_slots, False, values
        )
    else:
        loaded_values(shard, x, share.function, values)
    if following >= 0:
        score_ahead(shard.ahead, following, thread, share.num_threads, share.x)
    if not gates_stay and num_tokens == 1:
        shard.failed[thread] = not pending_values(shard, thread, x, share.function, values)
    return False


@njit(nogil=True, cache=True)
def is_well(shard, share, scratch):
    """Whether no thread's read has failed."""
    return not shard.failed.any()


@njit(nogil=True, cache=True)
def _submit_up_downs(shard, first, scratch, num_threads):
    """Submit reads of all fired neurons' up and down rows; called by one thread alone."""
    if has_all(shard.gates):
        _cancel_ahead(shard)
    for thread in range(num_threads):
        begin, count = scratch.firsts[thread], scratch.counts[thread]
        ids, slots = scratch.fired_ids[begin:], shard.up_down_slots[begin:]
        locate_up_downs(shard, first, ids, count, slots)
    submit_marked(shard, shard.options[MAX_BYTES], shard.options[MAX_GAP])


@njit(nogil=True, cache=True)
def find_fired(shard, share, scratch):
    """Request up and down rows of all that fired; then what the next layer will probably need."""
    thread, num_threads, following = share.thread, share.num_threads, _layer_ahead(shard, share)
    barrier_wait(share.cells, share.service, num_threads)
    if thread == 0:
        first, _ = _layer_span(shard, share.layer)
        _submit_up_downs(shard, first, scratch, num_threads)
        adapt(shard.ahead, share.layer, shard.gates, shard.up_downs)
    if following >= 0:
        rescore_ahead(
            shard, following, thread, num_threads, share.vectors, share.function, share.x.shape[0]
        )
    barrier_wait(share.cells, share.service, num_threads)
    if thread == 0 and following >= 0:
        submit_ahead(shard, following)
    return shard.up_down_slots[scratch.firsts[thread] :]


@njit(nogil=True, cache=True)
def _scale_pending(shard, share, first, pending, places, num_fired):
    """`ffn_rows.scale` of one token, neuron by neuron as up and down rows are loaded.

    Returns True when all are loaded, False where a read failed.
    """
    loaded, ids, h, x = shard.up_downs.loaded, share.fired_ids, share.gates, share.vectors
    up, bias, function = share.rows.up, share.rows.up_bias, share.function
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
                factor = dot_ahead(up, places[i], places[following], x, 0)
                if bias.shape[0]:
                    factor += bias[ids[i]]
                h[i] *= activate_up(function, factor)
        if left == num_pending:
            await_some(shard, share.thread, seen)
        num_pending = left
    return True


@njit(nogil=True, cache=True)
def scale(shard, share, scratch, places):
    """`ffn_rows.scale` once rows are loaded: all for several tokens, one by one for one."""
    thread, num_fired, is_one = share.thread, scratch.counts[share.thread], share.x.shape[0] == 1
    first, _ = _layer_span(shard, share.layer)
    is_loaded = True
    if not is_one or shard.options[WAITS_FIRST]:
        is_loaded = await_rows(shard, thread, shard.up_downs, first, share.fired_ids, num_fired)
    if is_loaded and is_one:
        pending = shard.pending[scratch.firsts[thread] :]
        is_loaded = _scale_pending(shard, share, first, pending, places, num_fired)
    elif is_loaded:
        ffn_rows.scale(shard, share, scratch, places)
    if not is_loaded:
        shard.failed[thread], scratch.counts[thread] = 1, 0


@njit(nogil=True, cache=True)
def note_reads(shard, reply):
    """The reply says what was read and awaited so far."""
    gates, up_downs = shard.gates.state, shard.up_downs.state
    reply[BYTES_READ] = shard.queue.counts[:, 0].sum()
    reply[READ_WAIT_NS] = shard.waited_ns.max()
    reply[PARTS_LOOKED_UP] = gates[NUM_LOOKUPS] + up_downs[NUM_LOOKUPS]
    reply[PARTS_MISSED] = gates[NUM_MISSES] + up_downs[NUM_MISSES]
