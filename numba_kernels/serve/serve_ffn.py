"""One thread of a CPU service: its share of every FFN request, without Python in between."""

from typing import NamedTuple

import numpy as np
from numba import njit

from numba_kernels.decode.batch_ffn import (
    TokenLists,
    block_size,
    gate_products_kernel,
    keep_some_kernel,
    thread_lists,
)
from numba_kernels.decode.ffn import (
    NO_IDS,
    NO_MASKS,
    by_neuron,
    gate_values_kernel,
    keep_fired_kernel,
    up_down_kernel,
)
from numba_kernels.decode.rows import add_in_order, split_range
from numba_kernels.decode.vectors import QuantizedVectors, prepared
from numba_kernels.formats import CHUNK
from numba_kernels.serve.doorbell import barrier, now_ns
from numba_kernels.serve.mailbox import (
    ALL_FIRED,
    ALL_GATES,
    BARRIER_COUNT,
    BARRIER_GENERATION,
    FFN,
    LAST_FIRED,
    LAST_GATES,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    PING,
    SKIP_SILENT,
    WATCHED,
    cell,
    finish_request,
    next_request,
)
from numba_kernels.serve.work_stealing import block_rows, next_block

_GATES = 0
NUM_COUNTERS = 1


class FfnArrays(NamedTuple):
    """A shard of cold neurons, all layers stacked: layer l has rows offsets[l]:offsets[l + 1].

    offsets (L + 1,) int64; gate, up, down (N, d) weights, up (0, d) in a two-matrix FFN;
    gate_bias, up_bias (N,) or (0,), down_bias (L, d) or (L, 0) float32
    """

    offsets: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray


class FfnScratch(NamedTuple):
    """Work space: sums (threads, T, d), fired_ids (threads, N) int32, fired_masks the same uint32,
    gates (threads, T * N), values (T * N,), counts (threads,) int64, the tokens' lists, the inputs
    quantized, for quantized weights, and counters of the blocks taken (NUM_COUNTERS, threads * 16);
    T is the most tokens of one request, N of one layer.

    buckets (all N,) uint8: which bucket each row of `FfnArrays` is counted in; bucket_sizes
    (L, buckets) uint32
    """

    sums: np.ndarray
    fired_ids: np.ndarray
    fired_masks: np.ndarray
    gates: np.ndarray
    values: np.ndarray
    counts: np.ndarray
    lists: TokenLists
    inputs: QuantizedVectors
    counters: np.ndarray
    buckets: np.ndarray
    bucket_sizes: np.ndarray


@njit(nogil=True, cache=True)
def _slice(bias, first, last):
    return bias[first:last] if bias.shape[0] else bias


@njit(nogil=True, cache=True)
def _first_from(ids, row):
    """Index of the first of ascending `ids` that is at least `row`."""
    low, high = 0, ids.shape[0]
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def _candidates(thread, num_threads, num_neurons, ids):
    """First and last candidate of a thread: those among its share of the layer's rows.

    Cut by row and not by the length of the list: a token's sums then are the same whatever other
    tokens want.
    """
    first, last = split_range(num_neurons, thread, num_threads, 4)
    if not ids.shape[0]:
        return first, last
    return _first_from(ids, first), _first_from(ids, last)


@njit(nogil=True, cache=True)
def _work_stealing_gates(
    thread,
    num_threads,
    num_neurons,
    gate,
    bias,
    ids,
    token_masks,
    x,
    code,
    num_tokens,
    lists,
    scratch,
):
    """scratch.values of the candidates in the blocks that this thread takes.

    One token's fn(gate . x + bias); several tokens' gate . x, (N, T).
    """
    counters, values = scratch.counters[_GATES], scratch.values
    products = by_neuron(values, num_tokens)
    size = block_rows(gate) if num_tokens == 1 else block_size(gate, num_tokens)
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        first, last = _candidates(part, num_threads, num_neurons, ids)
        begin = first + next_block(counters, part) * size
        while begin < last:
            end = min(begin + size, last)
            if num_tokens == 1:
                gate_values_kernel(gate, bias, ids, x, code, begin, end, last, values[begin:end])
            else:
                gate_products_kernel(
                    gate, ids, token_masks, x, begin, end, last, products[begin:end], lists
                )
            begin = first + next_block(counters, part) * size


@njit(nogil=True, cache=True)
def _meet(cells, service, num_threads):
    barrier(cells, cell(service, BARRIER_COUNT), cell(service, BARRIER_GENERATION), num_threads)


@njit(nogil=True, cache=True)
def ffn_request(thread, num_threads, service, wires, arrays, scratch, code):
    """Answer the FFN request that is in the mailbox: this thread's share; checks nothing.

    Threads steal blocks of gates from each other, and meet at a barrier; then each thread takes
    what fired among its candidates and sums into rows of its own; after a barrier each adds up one
    range of columns, always in thread order, so that a result never depends on which was faster.
    """
    request = wires.requests[service]
    layer, num_tokens, num_ids = request[LAYER], request[NUM_TOKENS], request[NUM_IDS]
    first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
    gate, down = arrays.gate[first:last], arrays.down[first:last]
    up = arrays.up[first:last] if arrays.up.shape[0] else arrays.up
    ids = wires.active_ids[service, :num_ids] if num_ids > 0 else NO_IDS
    token_masks = NO_MASKS
    if num_ids > 0 and num_tokens > 1:
        token_masks = wires.active_masks[service, :num_ids]
    begin, end = _candidates(thread, num_threads, last - first, ids)
    if num_ids == 0:
        end = begin
    sums = scratch.sums[thread, :num_tokens]
    sums[:] = 0
    gates = scratch.gates[thread]
    fired_ids, fired_masks = scratch.fired_ids[thread], scratch.fired_masks[thread]
    lists = thread_lists(scratch.lists, thread, num_tokens)
    x = prepared(gate, wires.ffn_input[:num_tokens], scratch.inputs, thread)
    gate_bias, keep_all = _slice(arrays.gate_bias, first, last), request[SKIP_SILENT] == 0
    if num_ids != 0:
        _work_stealing_gates(
            thread, num_threads, last - first, gate, gate_bias, ids, token_masks, x, code,
            num_tokens, lists, scratch,
        )  # fmt: skip
    _meet(wires.cells, service, num_threads)
    if num_tokens == 1:
        values = scratch.values[begin:end]
        num_fired = keep_fired_kernel(
            ids, token_masks, keep_all, begin, end, values, fired_ids, fired_masks, gates
        )
    else:
        products = by_neuron(scratch.values, num_tokens)[begin:]
        num_fired = keep_some_kernel(
            gate_bias, ids, token_masks, code, keep_all, begin, end, products, fired_ids,
            fired_masks, by_neuron(gates, num_tokens), 0,
        )  # fmt: skip
    up_bias = _slice(arrays.up_bias, first, last)
    up_down_kernel(up, up_bias, down, fired_ids, fired_masks, num_fired, gates, x, sums, lists)
    scratch.counts[thread] = num_fired
    _meet(wires.cells, service, num_threads)
    partial = wires.partials[service, :num_tokens]
    _reduce(thread, num_threads, down, partial, scratch.sums, arrays.down_bias[layer])
    if thread == 0:
        wires.replies[service, NUM_COMPUTED] = scratch.counts.sum()
        if request[WATCHED]:
            _count(service, layer, num_ids, ids, scratch.buckets[first:last], wires, scratch)


@njit(nogil=True, cache=True)
def _count(service, layer, num_ids, ids, buckets, wires, scratch):
    """Count in the arena which neurons of the layer this request has computed.

    One thread does it for all, so that no count needs an atomic addition.
    """
    counts = wires.neuron_counts[service, layer]
    for bucket in range(counts.shape[0]):
        every = scratch.bucket_sizes[layer, bucket]
        counts[bucket, LAST_GATES] = every if num_ids < 0 else np.uint32(0)
        counts[bucket, LAST_FIRED] = np.uint32(0)
    for n in ids:
        counts[buckets[n], LAST_GATES] += np.uint32(1)
    for thread in range(scratch.counts.shape[0]):
        for n in scratch.fired_ids[thread, : scratch.counts[thread]]:
            counts[buckets[n], LAST_FIRED] += np.uint32(1)
    for bucket in range(counts.shape[0]):
        counts[bucket, ALL_FIRED] += counts[bucket, LAST_FIRED]
        counts[bucket, ALL_GATES] += counts[bucket, LAST_GATES]
    wires.counted_steps[service, layer] += np.uint32(1)


@njit(nogil=True, cache=True)
def _reduce(thread, num_threads, down, partial, sums, down_bias):
    begin, end = split_range(partial.shape[1], thread, num_threads, CHUNK)
    for t in range(partial.shape[0]):
        partial[t, begin:end] = 0
        if down_bias.shape[0]:
            partial[t, begin:end] = down_bias[begin:end]
        total = sums[0, t, begin:end]
        for other in range(1, num_threads):
            part = sums[other, t, begin:end]
            for i in range(total.shape[0]):
                total[i] += part[i]
        add_in_order(down, sums[0, t], partial[t], begin, end)


@njit(nogil=True, cache=True)
def serve_ffn(thread, num_threads, service, seen, wires, arrays, scratch, code):
    """Answer requests from `seen` on until one comes that is Python's; returns its number.

    Python's are STOP, and an FFN of more tokens than `scratch` holds. Every thread returns at a
    Python request; the caller lets one of them answer it.
    """
    while True:
        number = next_request(wires.cells, service, seen)
        started = now_ns()
        operation = wires.requests[service, OPERATION]
        if operation == FFN and wires.requests[service, NUM_TOKENS] <= scratch.sums.shape[1]:
            ffn_request(thread, num_threads, service, wires, arrays, scratch, code)
        elif operation != PING:
            return number
        finish_request(
            wires.cells,
            wires.replies,
            scratch.counters,
            service,
            number,
            num_threads,
            started,
        )
        seen = number
