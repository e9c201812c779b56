"""Offloaded experts, which are read whole where they are not in memory: their steps of `layer_ffn`.

Bit-equal to neurons in memory: the same steps go over the same neurons in the same order; only the
rows of a block stand in a slot. Gates, and ups where all are kept, of experts that are in memory
are computed while the others are read, then those of the others as they come.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.candidates import BLOCK, FIRED_END, OFFSET, ROW
from hotcold.numba_kernels.ffn.in_memory import gates_and_ups, has_rows
from hotcold.numba_kernels.loops.mailbox import barrier_wait
from hotcold.numba_kernels.storage.offloaded_units import NUM_PENDING, num_blocks, request_experts
from hotcold.numba_kernels.storage.read_ahead import note_guesses, read_guessed
from hotcold.numba_kernels.storage.routed_ahead import release_lock, take_lock
from hotcold.numba_kernels.storage.slots import await_unit


@njit(nogil=True, cache=True, _nrt=True)
def _request(source, layer, spans, num_tokens):
    """Thread 0's part of `begin`: lookups and reads, then reads ahead."""
    blocks = np.empty(spans.shape[0], np.int64)
    for k in range(blocks.shape[0]):
        blocks[k] = spans[k, BLOCK]
    take_lock(source.lock)
    request_experts(source, layer, blocks)
    note_guesses(source, layer, blocks)
    read_guessed(source, layer + 1, num_tokens)
    release_lock(source.lock)
    for k in range(source.counts[NUM_PENDING]):
        source.counters[k] = 0


@njit(nogil=True, cache=True, inline="always")
def begin(source, share, scratch):
    """Request the experts that are missing."""
    if share.thread == 0:
        _request(source, share.layer, share.spans, share.x.shape[0])
    barrier_wait(share.cells, share.service, share.num_threads)
    row_of = source.gates.row_of[share.layer * num_blocks(source) :]
    for span in share.spans:
        span[OFFSET] = row_of[span[BLOCK]] - span[ROW]
    return True


@njit(nogil=True, cache=True, inline="always")
def compute_gates(source, share, scratch):
    """Gates of all candidates, and up products where all are kept: experts in memory first."""
    return _gates_in_order(source, share, scratch)


@njit(nogil=True, cache=True, _nrt=True)
def _gates_in_order(source, share, scratch):
    num_pending = source.counts[NUM_PENDING]
    spans = share.spans[source.order[: share.spans.shape[0]]]
    is_listed, first = share.selection.is_listed, share.layer * num_blocks(source)
    has_ups = share.thresholds.gate < 0 and not is_listed and has_rows(share.rows.up)
    gates_and_ups(scratch.counters, share, spans[num_pending:], has_ups, scratch)
    is_loaded = True
    for k in range(num_pending):
        is_loaded = is_loaded and await_unit(
            source.gates, source.queue, first + spans[k, BLOCK], source.waited_ns, share.thread
        )
        if is_loaded:
            gates_and_ups(source.counters[k], share, spans[k : k + 1], has_ups, scratch)
    if not is_loaded:
        source.failed[share.thread] = 1
    return has_ups


@njit(nogil=True, cache=True, inline="always")
def find_fired(source, share, scratch):
    """Note rows in memory of what fired."""
    begin = np.int64(0)
    for span in share.spans:
        for i in range(begin, span[FIRED_END]):
            share.places[i] = share.fired_ids[i] + span[OFFSET]
        begin = span[FIRED_END]
