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
from hotcold.numba_kernels.ffn import in_memory
from hotcold.numba_kernels.ffn.in_memory import GATES, layer_span, share_products, with_matrices
from hotcold.numba_kernels.ir.vector_ir import dot_ahead
from hotcold.numba_kernels.loops.doorbell import atomic_load
from hotcold.numba_kernels.loops.mailbox import (
    BYTES_READ,
    PARTS_AHEAD,
    PARTS_LOOKED_UP,
    PARTS_MISSED,
    PARTS_USEFUL,
    READ_WAIT_NS,
    barrier_wait,
)
from hotcold.numba_kernels.storage import MAX_GAP
from hotcold.numba_kernels.storage.offloaded_neurons import (
    await_rows,
    locate_up_downs,
    rescore_ahead,
    submit_ahead,
    submit_marked,
)
from hotcold.numba_kernels.storage.pending_gates import loaded_values, pending_values, submit_gates
from hotcold.numba_kernels.storage.read_ahead import (
    NUM_AHEAD,
    NUM_USEFUL,
    adapt,
    next_layer_ahead,
    note_started,
    score_ahead,
)
from hotcold.numba_kernels.storage.read_queue import (
    FAILED,
    LOADED,
    cancel_reads,
    drop_reads,
    num_completed,
)
from hotcold.numba_kernels.storage.slots import (
    NUM_LOOKUPS,
    NUM_MISSES,
    await_timed,
    await_unit,
    begin_epoch,
    has_all,
)


@njit(nogil=True, cache=True, inline="always")
def layer_rows(source, layer):
    """`FfnArrays` of one layer, with all slots' rows."""
    arrays = source.arrays
    return with_matrices(arrays, layer, arrays.gate, arrays.up, arrays.down)


@njit(nogil=True, cache=True)
def _begin_request(shard, first, last):
    """Start a request of neurons first..last-1; reads ahead stay in flight."""
    begin_epoch(shard.gates, last - first)
    begin_epoch(shard.up_downs, last - first)
    if shard.queue.failure[0]:
        drop_reads(shard.queue, shard.gates.requested, shard.up_downs.requested)


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
            row = np.int64(shard.gates.unit_of[shard.gate_slots[i]])
            if not await_unit(shard.gates, shard.queue, row, shard.waited_ns, 0):
                return False
    return True


@njit(nogil=True, cache=True, inline="always")
def begin(source, share, scratch):
    """Request the gates that are missing; several tokens wait for all of them.

    Returns False where a read failed; then `source.queue.failure` says why.
    """
    first, last = layer_span(source.arrays, share.layer)
    gates_stay, thread = has_all(source.gates), share.thread
    awaits_gates = share.x.shape[0] > 1
    source.failed[thread] = 0
    if thread == 0:
        _begin_request(source, first, last)
        if not gates_stay:
            _cancel_ahead(source)
            submit_gates(
                source, first, share.selection, share.spans, share.thresholds.gate < 0
            )  # fmt: skip
            if awaits_gates:
                source.failed[0] = not _await_gates(source, share.spans)
    if gates_stay:
        return True
    barrier_wait(share.cells, share.service, share.num_threads)
    # Without `awaits_gates` thread 0 may have set its flag already, for a pending gate.
    return not (awaits_gates and source.failed[0])


@njit(nogil=True, cache=True, inline="always")
def _layer_ahead(shard, share):
    """The layer to read ahead, or -1."""
    return next_layer_ahead(shard.ahead, share.layer, share.x.shape[0])


@njit(nogil=True, cache=True, inline="always")
def compute_gates(source, share, scratch):
    """Gates of all candidates, and the next layer's scores while reads are pending.

    No up products: they wait for reads.
    """
    thread, x, rows, num_tokens = share.thread, share.vectors, share.rows, share.x.shape[0]
    gates_stay, following = has_all(source.gates), _layer_ahead(source, share)
    counters, values = scratch.counters[GATES], scratch.values
    if gates_stay:
        first, last = layer_span(source.arrays, share.layer)
        share_products(
            counters, share, rows.gate[first:last], rows.gate_bias, share.selection.ids, True,
            values,
        )  # fmt: skip
    elif num_tokens > 1:
        share_products(counters, share, rows.gate, rows.gate_bias, source.gate_slots, False, values)
    else:
        loaded_values(source, x, share.function, values)
    if following >= 0:
        score_ahead(source.ahead, following, thread, share.num_threads, share.x)
    if not gates_stay and num_tokens == 1:
        source.failed[thread] = not pending_values(source, thread, x, share.function, values)
    return False


@njit(nogil=True, cache=True, inline="always")
def is_well(source, share, scratch):
    """Whether no thread's read has failed."""
    return not source.failed.any()


@njit(nogil=True, cache=True)
def _submit_up_downs(shard, first, scratch, num_threads):
    """Submit reads of all fired neurons' up and down rows; called by one thread alone."""
    if has_all(shard.gates):
        _cancel_ahead(shard)
    for thread in range(num_threads):
        begin, count = scratch.firsts[thread], scratch.counts[thread]
        ids, slots = scratch.fired_ids[begin:], shard.up_down_slots[begin:]
        locate_up_downs(shard, first, ids, count, slots)
    submit_marked(shard, MAX_GAP)


@njit(nogil=True, cache=True, inline="always")
def places(source, fired_ids, first):
    """Slots of up and down rows of the thread's neurons that fired."""
    return source.up_down_slots[first:]


@njit(nogil=True, cache=True, inline="always")
def find_fired(source, share, scratch):
    """Request up and down rows of all that fired; then what the next layer will probably need."""
    thread, num_threads, following = share.thread, share.num_threads, _layer_ahead(source, share)
    barrier_wait(share.cells, share.service, num_threads)
    if thread == 0:
        first, _ = layer_span(source.arrays, share.layer)
        _submit_up_downs(source, first, scratch, num_threads)
        adapt(source.ahead, share.layer, source.gates, source.up_downs)
    if following >= 0:
        rescore_ahead(
            source, following, thread, num_threads, share.vectors, share.function, share.x.shape[0]
        )
    barrier_wait(share.cells, share.service, num_threads)
    if thread == 0 and following >= 0:
        submit_ahead(source, following)


@njit(nogil=True, cache=True)
def _scale_pending(
    shard, rows, thread, first, ids, places, pending, num_fired, x, function, h
):  # fmt: skip
    """`in_memory.scale` of one token, neuron by neuron as up and down rows are loaded.

    Returns True when all are loaded, False where a read failed.
    """
    loaded, up, bias, num_pending = shard.up_downs.loaded, rows.up, rows.up_bias, num_fired
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
            await_timed(shard.queue, seen, shard.waited_ns, thread)
        num_pending = left
    return True


@njit(nogil=True, cache=True, inline="always")
def scale(source, share, scratch):
    """`in_memory.scale` once rows are loaded: all for several tokens, one by one for one."""
    thread, num_fired, is_one = share.thread, scratch.counts[share.thread], share.x.shape[0] == 1
    first, _ = layer_span(source.arrays, share.layer)
    is_loaded = True
    if not is_one:
        is_loaded = await_rows(source, thread, source.up_downs, first, share.fired_ids, num_fired)
    if is_loaded and is_one:
        pending = source.pending[scratch.firsts[thread] :]
        is_loaded = _scale_pending(
            source, share.rows, thread, first, share.fired_ids, share.places, pending, num_fired,
            share.vectors, share.function, share.flat_gates,
        )  # fmt: skip
    elif is_loaded:
        in_memory.scale(source, share, scratch)
    if not is_loaded:
        source.failed[thread], scratch.counts[thread] = 1, 0


@njit(nogil=True, cache=True, inline="always")
def note_reads(source, reply):
    """The reply says what was read and awaited so far."""
    gates, up_downs = source.gates.state, source.up_downs.state
    reply[BYTES_READ] = source.queue.counts[:, 0].sum()
    reply[READ_WAIT_NS] = source.waited_ns.max()
    reply[PARTS_LOOKED_UP] = gates[NUM_LOOKUPS] + up_downs[NUM_LOOKUPS]
    reply[PARTS_MISSED] = gates[NUM_MISSES] + up_downs[NUM_MISSES]
    reply[PARTS_AHEAD] = source.ahead.counts[NUM_AHEAD]
    reply[PARTS_USEFUL] = source.ahead.counts[NUM_USEFUL]
