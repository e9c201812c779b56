"""Offloaded experts, which are read whole where they are not in memory: their steps of `layer_ffn`.

Bit-equal to neurons in memory: the same steps go over the same neurons in the same order; only the
rows of a block stand in a slot. Until down rows are added, spans and the numbers of neurons that
fired are those of rows in memory. Gates, and ups where all are kept, of experts that are in memory
are computed while the others are read, then those of the others as they come.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.candidates import BLOCK, END_ROW, FIRST, LAST, ROW
from hotcold.numba_kernels.decode.vectors import copy_numbers
from hotcold.numba_kernels.ffn import in_memory, transposed
from hotcold.numba_kernels.ffn.in_memory import GATES, UPS, take_products
from hotcold.numba_kernels.loops.mailbox import (
    BYTES_READ,
    PARTS_GUESSABLE,
    PARTS_LOOKED_UP,
    PARTS_MISSED,
    PARTS_USEFUL,
    READ_WAIT_NS,
    barrier_wait,
)
from hotcold.numba_kernels.storage.offloaded_experts import (
    begin_experts,
    blocks_of,
    note_guesses,
    read_guessed,
    request_experts,
)
from hotcold.numba_kernels.storage.routed_ahead import release_lock, take_lock
from hotcold.numba_kernels.storage.slots import NUM_LOOKUPS, NUM_MISSES, await_unit


@njit(nogil=True, cache=True, inline="always")
def layer_rows(source, layer):
    """`FfnArrays` with all rows in memory."""
    return source.arrays


@njit(nogil=True, cache=True)
def _first_unit(source, layer):
    return layer * (source.arrays.starts.shape[1] - 1)


@njit(nogil=True, cache=True, _nrt=True)
def _request(source, layer, spans, num_tokens):
    """Thread 0's part of `begin`: lookups and reads, then reads ahead."""
    source.failed[:] = 0
    take_lock(source.lock)
    blocks = blocks_of(spans, np.empty(spans.shape[0], np.int64))
    note_guesses(source, layer, blocks)
    begin_experts(source)
    request_experts(source, layer, blocks)
    read_guessed(source, layer + 1, num_tokens)
    release_lock(source.lock)
    for i in range(source.num_loaded[0], blocks.shape[0]):
        source.counters[i] = 0


@njit(nogil=True, cache=True)
def _to_memory(spans, row_of):
    """Let spans be those of rows in memory; row_of: of the layer's units."""
    for span in spans:
        size = span[END_ROW] - span[ROW]
        span[ROW] = row_of[span[BLOCK]]
        span[END_ROW] = span[ROW] + size


@njit(nogil=True, cache=True)
def _place_listed(spans, ids, row_of, rows):
    """rows[i] = where neuron ids[i] of the spans is in memory; row_of: of the layer's units."""
    for span in spans:
        shift = row_of[span[BLOCK]] - span[ROW]
        for i in range(span[FIRST], span[LAST]):
            rows[i] = ids[i] + shift


@njit(nogil=True, cache=True)
def _place_spans(source, layer, selection, spans):
    """`_to_memory`, or where ids are listed, which stay those of the layer, their rows."""
    row_of = source.row_of[_first_unit(source, layer) :]
    if selection.is_listed:  # all threads write the same
        _place_listed(spans, selection.ids, row_of, source.listed)
    else:
        _to_memory(spans, row_of)


@njit(nogil=True, cache=True, inline="always")
def begin(source, share, scratch):
    """Request the experts that are missing."""
    if share.thread == 0:
        _request(source, share.layer, share.spans, share.x.shape[0])
    barrier_wait(share.cells, share.service, share.num_threads)
    _place_spans(source, share.layer, share.selection, share.spans)
    return True


@njit(nogil=True, cache=True, inline="always")
def _products(source, share, scratch, gates, ups, spans, has_ups, listed):
    """Gates of the spans' candidates, and up products with `has_ups`, by work stealing."""
    rows, selection = share.rows, share.selection
    take_products(
        gates, share.thread, share.num_threads, share.x.shape[0], share.x.shape[1], selection,
        spans, share.stripes, rows.gate, rows.gate_bias, listed, share.vectors, share.function,
        True, scratch.values, share.lists,
    )  # fmt: skip
    if has_ups:
        take_products(
            ups, share.thread, share.num_threads, share.x.shape[0], share.x.shape[1], selection,
            spans, share.stripes, rows.up, rows.up_bias, listed, share.vectors, share.function,
            False, scratch.ups, share.lists,
        )  # fmt: skip


@njit(nogil=True, cache=True, inline="always")
def compute_gates(source, share, scratch):
    """Gates of all candidates, and up products where all are kept: experts in memory first."""
    return _gates_in_order(source, share, scratch)


@njit(nogil=True, cache=True, _nrt=True)
def _gates_in_order(source, share, scratch):
    spans, num_loaded = share.spans[source.order[: share.spans.shape[0]]], source.num_loaded[0]
    selection = share.selection
    has_ups = share.thresholds.gate < 0 and not selection.is_listed and share.rows.up.shape[0] > 0
    listed = source.listed[: selection.ids.shape[0]]
    _products(
        source, share, scratch, scratch.counters[GATES], scratch.counters[UPS], spans[:num_loaded],
        has_ups, listed,
    )  # fmt: skip
    first, is_loaded = _first_unit(source, share.layer), True
    for i in range(num_loaded, spans.shape[0]):
        is_loaded = is_loaded and await_unit(
            source.slots, source.queue, first + spans[i, BLOCK], source.waited_ns, share.thread
        )
        if is_loaded:
            _products(
                source, share, scratch, source.counters[i, 0], source.counters[i, 1],
                spans[i : i + 1], has_ups, listed,
            )  # fmt: skip
    if not is_loaded:
        source.failed[share.thread] = 1
    return has_ups


@njit(nogil=True, cache=True, inline="always")
def is_well(source, share, scratch):
    """Whether no thread's read has failed."""
    return not source.failed.any()


@njit(nogil=True, cache=True, inline="always")
def places(source, fired_ids, first):
    """Rows in memory of the thread's neurons that fired."""
    return source.places[first:]


@njit(nogil=True, cache=True)
def _note_rows(source, layer, selection, spans, fired_ids, count, places):
    """Rows in memory of the neurons that fired, whose numbers they are unless ids are listed."""
    if not selection.is_listed:
        copy_numbers(fired_ids[:count], places[:count])
        return
    row_of, i = source.row_of[_first_unit(source, layer) :], 0
    for span in spans:
        shift = row_of[span[BLOCK]] - span[ROW]
        while i < count and fired_ids[i] < span[END_ROW]:
            places[i] = fired_ids[i] + shift
            i += 1


@njit(nogil=True, cache=True, inline="always")
def find_fired(source, share, scratch):
    """Note rows in memory of what fired."""
    _note_rows(
        source, share.layer, share.selection, share.spans, share.fired_ids,
        scratch.counts[share.thread], share.places,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _to_layer(starts, spans, fired_ids, rows):
    """Undo `_to_memory`, of spans and of the neurons that fired, whose rows in memory are given."""
    i = 0
    for span in spans:
        first, size = starts[span[BLOCK]] - starts[0], span[END_ROW] - span[ROW]
        while i < fired_ids.shape[0] and span[ROW] <= rows[i] < span[END_ROW]:
            fired_ids[i] = rows[i] - span[ROW] + first
            i += 1
        span[ROW], span[END_ROW] = first, first + size


@njit(nogil=True, cache=True, inline="always")
def _back_to_layer(source, share, scratch):
    """Let spans and neurons be those of the layer again."""
    count, starts = scratch.counts[share.thread], source.arrays.starts[share.layer]
    if not share.selection.is_listed:
        _to_layer(starts, share.spans, share.fired_ids[:count], share.places[:count])


@njit(nogil=True, cache=True, inline="always")
def add(source, share, scratch):
    """As in memory."""
    _back_to_layer(source, share, scratch)
    in_memory.add(source, share, scratch)


@njit(nogil=True, cache=True, inline="always")
def add_transposed(source, share, scratch):
    """As in memory, where down is a row an output."""
    _back_to_layer(source, share, scratch)
    transposed.add_to_columns(source.arrays, share, scratch)


@njit(nogil=True, cache=True, inline="always")
def add_up_transposed(source, share, scratch):
    """As in memory, where down is a row an output."""
    transposed.add_columns(source.arrays, share, scratch)


@njit(nogil=True, cache=True, inline="always")
def note_reads(source, reply):
    """The reply says what was read and awaited so far."""
    state = source.slots.state
    reply[BYTES_READ] = source.queue.counts[:, 0].sum()
    reply[READ_WAIT_NS] = source.waited_ns.max()
    reply[PARTS_LOOKED_UP] = state[NUM_LOOKUPS]
    reply[PARTS_MISSED] = state[NUM_MISSES]
    copy_numbers(source.ahead_counts, reply[PARTS_GUESSABLE : PARTS_USEFUL + 1])
