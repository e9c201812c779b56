"""Offloaded neurons, some of which have to be read first: their steps of `layer_ffn`.

Bit-equal to neurons in memory: the same kernels compute the same neurons in the same order, with
rows looked up in slots. Reads of missing gates are submitted first; one token's loaded gates are
computed meanwhile, the others as their reads complete. Then reads of the fired neurons' up and down
rows are submitted. Each thread multiplies with up rows as they are loaded, and adds down rows in
ascending order at the end.

`layer_rows`, `is_well`, `places` and `note_reads` are of offloaded experts too.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate_up
from hotcold.numba_kernels.decode.vectors import copy_numbers
from hotcold.numba_kernels.ffn import in_memory
from hotcold.numba_kernels.ffn.in_memory import GATES, layer_span, share_products, with_matrices
from hotcold.numba_kernels.ir.vector_ir import dot_ahead
from hotcold.numba_kernels.loops.doorbell import atomic_load
from hotcold.numba_kernels.loops.mailbox import (
    BYTES_READ,
    PARTS_GUESSABLE,
    PARTS_LOOKED_UP,
    PARTS_MISSED,
    PARTS_USEFUL,
    READ_WAIT_NS,
    barrier_wait,
)
from hotcold.numba_kernels.storage import MAX_GAP
from hotcold.numba_kernels.storage.offloaded_units import (
    NUM_LOOKUPS,
    NUM_MISSES,
    await_units,
    begin_request,
    cancel_ahead,
    claim,
    locate,
    request_units,
    submit_marked,
)
from hotcold.numba_kernels.storage.pending_gates import loaded_values, pending_values
from hotcold.numba_kernels.storage.read_ahead import (
    adapt,
    next_layer_ahead,
    read_likeliest,
    rescore_ahead,
    score_ahead,
)
from hotcold.numba_kernels.storage.read_queue import FAILED, LOADED, num_completed
from hotcold.numba_kernels.storage.slots import await_timed, has_all, keep, unit_at


@njit(nogil=True, cache=True, inline="always")
def layer_rows(source, layer):
    """`FfnArrays` of one layer, with all rows in memory."""
    arrays = source.arrays
    return with_matrices(arrays, layer, arrays.gate, arrays.up, arrays.down)


@njit(nogil=True, cache=True)
def _request_gates(shard, first, last, selection, keeps_all):
    """Submit reads of the candidates' gates that are not in memory; by one thread alone.

    Up and down rows are read with them where all are needed (`keeps_all`), or where one read of a
    whole bundle is faster. No use of those is counted: which neurons fire is not known yet.
    """
    ids, up_downs, order = selection.ids, shard.up_downs, shard.order
    count = ids.shape[0] if selection.is_listed else last - first
    num_missing = request_units(shard, first, ids, count)
    if keeps_all or (selection.is_listed and shard.reads_whole[0]):
        for i in range(count):
            keep(up_downs, unit_at(first, ids, i))
        for k in range(num_missing):
            claim(shard, up_downs, unit_at(first, ids, np.int64(order[k])))
    if num_missing:
        submit_marked(shard, MAX_GAP)
    shard.counters[:] = 0
    return count


@njit(nogil=True, cache=True, inline="always")
def begin(source, share, scratch):
    """Request the gates that are missing; several tokens wait for all of them.

    Returns False where a read failed; then `source.queue.failure` says why.
    """
    first, last = layer_span(source.arrays, share.layer)
    gates_stay, awaits_gates = has_all(source.gates), share.x.shape[0] > 1
    if share.thread == 0:
        begin_request(source, last - first)
        if not gates_stay:
            cancel_ahead(source)
            count = _request_gates(
                source, first, last, share.selection, share.thresholds.gate < 0
            )  # fmt: skip
            if awaits_gates:
                source.failed[0] = not await_units(
                    source, 0, source.gates, first, share.selection.ids, count
                )  # fmt: skip
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
            counters, share, share.spans, rows.gate[first:last], rows.gate_bias,
            share.selection.ids, True, values,
        )  # fmt: skip
    elif num_tokens > 1:
        share_products(
            counters, share, share.spans, rows.gate, rows.gate_bias, source.slots, False, values
        )
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
        cancel_ahead(shard)
    num_missing = 0
    for thread in range(num_threads):
        begin, count = scratch.firsts[thread], scratch.counts[thread]
        num_missing += locate(
            shard, shard.up_downs, first, scratch.fired_ids[begin:], count, shard.places[begin:],
            shard.order[begin:],
        )  # fmt: skip
    if num_missing:
        submit_marked(shard, MAX_GAP)


@njit(nogil=True, cache=True, inline="always")
def places(source, fired_ids, first):
    """Rows in memory of the thread's neurons that fired."""
    return source.places[first:]


@njit(nogil=True, cache=True, inline="always")
def find_fired(source, share, scratch):
    """Request up and down rows of all that fired; then what the next layer will probably need."""
    thread, num_threads, following = share.thread, share.num_threads, _layer_ahead(source, share)
    barrier_wait(share.cells, share.service, num_threads)
    if thread == 0:
        first, _ = layer_span(source.arrays, share.layer)
        _submit_up_downs(source, first, scratch, num_threads)
        adapt(source, share.layer)
    if following >= 0:
        rescore_ahead(
            source, following, thread, num_threads, share.vectors, share.function, share.x.shape[0]
        )
    barrier_wait(share.cells, share.service, num_threads)
    if thread == 0 and following >= 0:
        first, last = layer_span(source.arrays, following)
        read_likeliest(source, following, first, last)


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
        is_loaded = await_units(source, thread, source.up_downs, first, share.fired_ids, num_fired)
    if is_loaded and is_one:
        is_loaded = _scale_pending(
            source, share.rows, thread, first, share.fired_ids, share.places,
            source.order[scratch.firsts[thread] :], num_fired, share.vectors, share.function,
            share.flat_gates,
        )  # fmt: skip
    elif is_loaded:
        in_memory.scale(source, share, scratch)
    if not is_loaded:
        source.failed[thread], scratch.counts[thread] = 1, 0


@njit(nogil=True, cache=True, inline="always")
def note_reads(source, reply):
    """The reply says what was read and awaited so far."""
    reply[BYTES_READ] = source.queue.counts[:, 0].sum()
    reply[READ_WAIT_NS] = source.waited_ns.max()
    reply[PARTS_LOOKED_UP] = source.counts[NUM_LOOKUPS]
    reply[PARTS_MISSED] = source.counts[NUM_MISSES]
    copy_numbers(source.ahead.counts, reply[PARTS_GUESSABLE : PARTS_USEFUL + 1])
