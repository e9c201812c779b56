"""A layer's sparse feed-forward network, by all threads of a service.

A neuron that does not fire costs its gate row. A gate's dot product does not depend on the thread
that computes it, so gates are shared by work stealing. Sums depend on their order: each thread sums
its own neurons, and the threads' sums are added in order.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.batch_ffn import (
    TokenLists,
    block_size,
    empty_lists,
    gate_up_products_kernel,
    keep_some_kernel,
    thread_lists,
)
from hotcold.numba_kernels.decode.ffn import (
    by_neuron,
    gate_values_kernel,
    keep_fired_kernel,
    up_down_kernel,
)
from hotcold.numba_kernels.decode.rows import add_in_order, split_range
from hotcold.numba_kernels.decode.vectors import (
    QuantizedVectors,
    empty_vectors,
    quantize_activations,
)
from hotcold.numba_kernels.formats import CHUNK, whole_chunks
from hotcold.numba_kernels.serve.mailbox import barrier_wait
from hotcold.numba_kernels.serve.work_stealing import block_rows, new_block_counters, next_block

MAX_TOKENS = 32  # of a request: bits of a mask
NO_NORMS = np.empty(0, np.float32)


class FfnArrays(NamedTuple):
    """A shard of cold neurons, all layers stacked: layer l has rows offsets[l]:offsets[l + 1].

    offsets (L + 1,) int64; gate, up, down (N, d) weights, up (0, d) in a two-matrix FFN;
    gate_bias, up_bias (N,) or (0,), down_bias (L, d) or (L, 0) float32;
    down_norms (N,) or (0,) float32: norms of the down rows, for product thresholds
    """

    offsets: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray
    down_norms: np.ndarray = NO_NORMS


class FfnScratch(NamedTuple):
    """Work space for requests of up to T tokens and N candidates.

    sums (threads, T, d in whole chunks), gates (threads, T * N), values (T * N,) float32;
    fired_ids (threads, N) int32, fired_masks the same, uint32; counts, up_counts (threads,) int64:
    neurons that fired, and up rows read; lists: each token's neurons; inputs: quantized
    activations; counters of blocks taken
    """

    sums: np.ndarray
    fired_ids: np.ndarray
    fired_masks: np.ndarray
    gates: np.ndarray
    values: np.ndarray
    counts: np.ndarray
    up_counts: np.ndarray
    lists: TokenLists
    inputs: QuantizedVectors
    counters: np.ndarray


def new_scratch(num_threads: int, num_tokens: int, num_candidates: int, width: int) -> FfnScratch:
    """Work space for requests of up to `num_tokens` tokens and `num_candidates` neurons."""
    return FfnScratch(
        sums=np.zeros((num_threads, num_tokens, whole_chunks(width)), np.float32),
        fired_ids=np.zeros((num_threads, num_candidates), np.int32),
        fired_masks=np.zeros((num_threads, num_candidates), np.uint32),
        gates=np.zeros((num_threads, num_tokens * num_candidates), np.float32),
        values=np.zeros(num_tokens * num_candidates, np.float32),
        counts=np.zeros(num_threads, np.int64),
        up_counts=np.zeros(num_threads, np.int64),
        lists=empty_lists(num_threads, num_tokens),
        inputs=empty_vectors(num_threads, num_tokens, width),
        counters=new_block_counters(1, num_threads)[0],
    )


@njit(nogil=True, cache=True)
def part_of(bias, first, last):
    """bias[first:last], or the empty bias."""
    return bias[first:last] if bias.shape[0] else bias


@njit(nogil=True, cache=True)
def _first_from(ids, row):
    """Index of the first of ascending `ids` that is at least `row`: a binary search."""
    low, high = 0, ids.shape[0]
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def own_candidates(thread, num_threads, num_neurons, is_listed, ids):
    """First and last candidate of a thread, those in its part of the layer's rows.

    Cut by row, not by the length of the list: so a token's sums do not depend on its batch-mates.
    """
    first, last = split_range(num_neurons, thread, num_threads, 4)
    if not is_listed:
        return first, last
    return _first_from(ids, first), _first_from(ids, last)


@njit(nogil=True, cache=True)
def work_stealing_gates(
    thread, num_threads, num_neurons, gate, bias, is_listed, ids, places, token_masks, x, function,
    num_tokens, lists, scratch,
):  # fmt: skip
    """scratch.values of the candidates in the blocks that this thread takes.

    One token's fn(gate . x + bias); several tokens' gate . x, (N, T). Candidate i's gate is row
    places[i], or row i where `places` is empty.
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
                gate_up_products_kernel(
                    gate, places, token_masks, x, begin, end, products[begin:end], lists
                )
            begin = first + next_block(counters, part) * size


@njit(nogil=True, cache=True)
def layer_ffn(
    thread, num_threads, cells, service, layer, is_listed, ids, token_masks, thresholds, x, arrays,
    scratch, function, out,
):  # fmt: skip
    """A layer's FFN: this thread's part; checks nothing.

    out[t] = down_bias + sum over n of
        fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n]) * down[n]
    Over the neurons n in `ids`, ascending, if `is_listed`, else over all. Where there are
    token_masks neuron ids[i] is silent for each token t whose bit token_masks[i] lacks.
    `thresholds` decide which neurons fire; those of thread t are in
    scratch.fired_ids[t, : scratch.counts[t]].
    Shapes:  x, out (T, d), T <= 32; ids (A,); cells of `SharedBuffers`
    Dtypes:  x, out float32; ids int32; token_masks uint32; up as gate, down `is_summed`
    Units:   reads d weights for each candidate, 2 d more (one matrix up, one down) if it fired
    Source:  PowerInfer section 5.4; the early stop at a silent gate: PowerInfer-2 section 4.4

    All of a service's threads call it. They share the gates by work stealing. After a barrier each
    adds its own candidates that fired to its own sums; after another each adds up one range of
    columns in thread order, so that the result does not depend on timing. `out` is complete when
    all have returned; until then none may start another request.
    """
    first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
    gate, down = arrays.gate[first:last], arrays.down[first:last]
    up = arrays.up[first:last] if arrays.up.shape[0] else arrays.up
    num_tokens = x.shape[0]
    begin, end = own_candidates(thread, num_threads, last - first, is_listed, ids)
    sums = scratch.sums[thread, :num_tokens]
    sums[:] = 0
    gates = scratch.gates[thread]
    fired_ids, fired_masks = scratch.fired_ids[thread], scratch.fired_masks[thread]
    lists = thread_lists(scratch.lists, thread, num_tokens)
    vectors = quantize_activations(gate, x, scratch.inputs, thread)
    gate_bias = part_of(arrays.gate_bias, first, last)
    work_stealing_gates(
        thread, num_threads, last - first, gate, gate_bias, is_listed, ids, ids, token_masks,
        vectors, function, num_tokens, lists, scratch,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    if thread == 0:
        scratch.counters[:] = 0  # for the next request
    if num_tokens == 1:
        values = scratch.values[begin:end]
        num_fired = keep_fired_kernel(
            ids, token_masks, thresholds.gate, begin, end, values, fired_ids, fired_masks, gates
        )
    else:
        products = by_neuron(scratch.values, num_tokens)[begin:]
        num_fired = keep_some_kernel(
            gate_bias, ids, token_masks, function, thresholds.gate, begin, end, products,
            fired_ids, fired_masks, by_neuron(gates, num_tokens),
        )  # fmt: skip
    up_bias = part_of(arrays.up_bias, first, last)
    down_norms = part_of(arrays.down_norms, first, last)
    scratch.up_counts[thread] = num_fired
    scratch.counts[thread] = up_down_kernel(
        up, up_bias, down, down_norms, fired_ids, fired_masks, num_fired, gates, vectors, function,
        thresholds.product, sums, lists,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    add_up(thread, num_threads, down, out, scratch.sums, arrays.down_bias[layer])


@njit(nogil=True, cache=True)
def add_up(thread, num_threads, down, out, sums, down_bias):
    """out = all threads' sums and the bias, in this thread's range of columns."""
    begin, end = split_range(out.shape[1], thread, num_threads, CHUNK)
    for t in range(out.shape[0]):
        out[t, begin:end] = 0
        if down_bias.shape[0]:
            out[t, begin:end] = down_bias[begin:end]
        total = sums[0, t, begin : begin + (end - begin + CHUNK - 1) // CHUNK * CHUNK]
        for other in range(1, num_threads):
            part = sums[other, t, begin : begin + total.shape[0]]
            for i in range(total.shape[0]):
                total[i] += part[i]
        add_in_order(down, sums[0, t], out[t], begin, end)
