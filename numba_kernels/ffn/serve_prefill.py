"""The loop of a CPU service's thread for prompts of quantized weights, layer after layer.

Of neurons in memory, in one block, whose down rows are an output each. It computes what
`actors/cpu/prefill_ffn.py` does, to the bit, without Python: a layer of a small model takes less
time than Python's part in it would.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import IS_SECOND
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.block_vectors import block_vectors, matrix_at, part_of_row
from hotcold.numba_kernels.decode.rows import block_products, split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, copy_numbers, empty_vectors
from hotcold.numba_kernels.ffn.in_memory import layer_span, part_of
from hotcold.numba_kernels.ffn.transposed import merge_stripes
from hotcold.numba_kernels.ir.vector_ir import quantize_vector
from hotcold.numba_kernels.loops.doorbell import now_ns
from hotcold.numba_kernels.loops.mailbox import (
    FFN,
    LAYER,
    NUM_COMPUTED,
    NUM_TOKENS,
    NUM_UNWANTED,
    NUM_UP,
    OPERATION,
    barrier_wait,
    finish_request,
    is_for_others,
    next_share,
)
from hotcold.numba_kernels.loops.work_stealing import new_block_counters, next_block
from hotcold.numba_kernels.prefill.ffn import activate_row, scale_row
from hotcold.numba_kernels.prefill.shared_rows import (
    ROWS,
    SUM_ROWS,
    TOKENS_AT_ONCE,
    prepare_tokens,
    share_rows,
    vectors_part,
)

_GATES, _UPS, _DOWN = range(3)
_NUM_KINDS = 3


class PromptFfnScratch(NamedTuple):
    """Work space for T tokens and N neurons: gates, ups, columns (T * N,) float32.

    inputs, values: the vectors of gate and down rows; columns: what values are made of, stripe
    after stripe, a row for each token
    sums (threads, S, TOKENS_AT_ONCE, SUM_ROWS) float32, first_stripes (threads, S): of stripes
    counters of blocks taken
    """

    gates: np.ndarray
    ups: np.ndarray
    columns: np.ndarray
    inputs: QuantizedVectors
    values: QuantizedVectors
    sums: np.ndarray
    first_stripes: np.ndarray
    counters: np.ndarray


def new_prompt_ffn_scratch(
    num_threads: int, num_tokens: int, num_neurons: int, width: int, num_stripes: int
) -> PromptFfnScratch:
    """What is not used of it takes no memory."""
    inputs, values = (empty_vectors(1, num_tokens, size) for size in (width, num_neurons))
    num_sums = 2 * max(1, num_stripes).bit_length()
    gates, ups, columns = (np.zeros(num_tokens * num_neurons, np.float32) for _ in range(3))
    return PromptFfnScratch(
        gates,
        ups,
        columns,
        inputs=QuantizedVectors(*(array[0] for array in inputs)),
        values=values,
        sums=np.zeros((num_threads, num_sums, TOKENS_AT_ONCE, SUM_ROWS), np.float32),
        first_stripes=np.zeros((num_threads, num_sums), np.int64),
        counters=new_block_counters(_NUM_KINDS, num_threads),
    )


@njit(nogil=True, cache=True)
def _quantize_stripe(array, h, t, numbers, first, end, count, values):
    """Token t's vector of a stripe's neurons first..end-1, for rows like `array`; of `count`."""
    weights, width = array[:0].reshape(0, 1), end - first
    own = part_of_row(numbers, first * count, count, width)
    copy_numbers(h[t, first:end], own[t])
    vectors = block_vectors(weights, numbers, first * count, count, width, values, 0)
    quantize_vector(weights, own, t, vectors, t)


@njit(nogil=True, cache=True)
def _stripe_products(array, place, numbers, first, end, count, values, begin, last, t, out):
    """out[i, n - begin] = the stripe's row n . h[t + i], for n in begin..last-1."""
    weights = matrix_at(array, place)
    vectors = block_vectors(weights, numbers, first * count, count, end - first, values, 0)
    block_products(weights, vectors_part(vectors, t, out.shape[0]), out, begin, last, 0)


@njit(nogil=True, cache=True)
def _share_down(
    counters, thread, num_threads, down, places, cuts, first_stripe, bias, numbers, values, sums,
    first_stripes, out, more, first_token,
):  # fmt: skip
    """What is left over of the sums of stripes, in rows that it takes; the bias comes last of all.

    As `transposed.add_up` has it. more (M, T, d): sums after the first one, those of
    out[0] in row `first_token`
    """
    num_tokens, num_stripes = out.shape[0], cuts.shape[0] - 1
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        part_first, part_last = split_range(out.shape[1], part, num_threads, ROWS)
        begin = part_first + next_block(counters, part) * SUM_ROWS
        while begin < part_last:
            last = min(begin + SUM_ROWS, part_last)
            for t in range(0, num_tokens, TOKENS_AT_ONCE):
                some, left = min(TOKENS_AT_ONCE, num_tokens - t), 0
                for stripe in range(num_stripes):
                    first, end = cuts[stripe] - cuts[0], cuts[stripe + 1] - cuts[0]
                    place, own = places[stripe], sums[left, :some]
                    if first == end:
                        own[:, : last - begin] = 0
                    elif place[IS_SECOND]:
                        _stripe_products(
                            down.second, place, numbers, first, end, num_tokens, values, begin,
                            last, t, own,
                        )  # fmt: skip
                    else:
                        _stripe_products(
                            down.first, place, numbers, first, end, num_tokens, values, begin,
                            last, t, own,
                        )  # fmt: skip
                    first_stripes[left] = first_stripe + stripe
                    left = merge_stripes(
                        sums, first_stripes, left + 1, first_stripe, first_stripe + stripe + 1,
                        some, last - begin,
                    )  # fmt: skip
                for k in range(some):
                    for i in range(max(left, 1)):
                        target = more[i - 1, first_token + t + k] if i else out[t + k]
                        for n in range(begin, last):
                            target[n] = sums[i, k, n - begin] if left else np.float32(0)
                    if bias.shape[0]:
                        of_bias = out[t + k]
                        if more.shape[0]:
                            of_bias = more[max(left - 1, 0), first_token + t + k]
                            of_bias[begin:last] = 0
                        for n in range(begin, last):
                            of_bias[n] += bias[n]
            begin = part_first + next_block(counters, part) * SUM_ROWS


@njit(nogil=True, cache=True)
def prompt_ffn_request(thread, num_threads, service, buffers, source, scratch, function):
    """This thread's share of a prompt's FFN request in the mailbox; checks nothing."""
    request, cells = buffers.requests[service], buffers.cells
    layer, num_tokens, unwanted = request[LAYER], request[NUM_TOKENS], request[NUM_UNWANTED]
    begin, end = layer_span(source, layer)
    count, size, counters = num_tokens - unwanted, end - begin, scratch.counters
    x, out = (
        buffers.ffn_input[unwanted:num_tokens],
        buffers.partials[service, unwanted:num_tokens],
    )
    gate, up = source.gate[begin:end], part_of(source.up, begin, end)
    gate_bias = part_of(source.gate_bias, begin, end)
    up_bias = part_of(source.up_bias, begin, end)
    h = scratch.gates[: count * size].reshape(count, size)
    factors = scratch.ups[: count * size].reshape(count, size)
    inputs = vectors_part(scratch.inputs, 0, count)
    first, last = split_range(count, thread, num_threads, 1)
    prepare_tokens(gate, x, first, last, inputs, thread)
    barrier_wait(cells, service, num_threads)
    no_bias = source.gate_bias[:0]
    share_rows(counters[_GATES], thread, num_threads, gate, no_bias, inputs, h[:0], h, 0)
    if up.shape[0]:
        share_rows(counters[_UPS], thread, num_threads, up, no_bias, inputs, h[:0], factors, 0)
    barrier_wait(cells, service, num_threads)
    down, places, numbers = source.down, source.down.places[layer], scratch.columns
    cuts = source.cuts[layer, 0]
    for t in range(first, last):
        activate_row(function, gate_bias, 0, h, t)
        if up.shape[0]:
            scale_row(function, up_bias, 0, factors[t], h[t])
        for stripe in range(cuts.shape[0] - 1):
            start, stop = cuts[stripe] - cuts[0], cuts[stripe + 1] - cuts[0]
            if start == stop:
                continue
            if places[stripe, IS_SECOND]:
                _quantize_stripe(down.second, h, t, numbers, start, stop, count, scratch.values)
            else:
                _quantize_stripe(down.first, h, t, numbers, start, stop, count, scratch.values)
    barrier_wait(cells, service, num_threads)
    _share_down(
        counters[_DOWN], thread, num_threads, down, places, cuts, source.first_stripe,
        source.down_bias[layer, 0], numbers, scratch.values, scratch.sums[thread],
        scratch.first_stripes[thread], out, buffers.more_partials[service], unwanted,
    )  # fmt: skip
    if thread == 0:
        buffers.replies[service, NUM_COMPUTED] = buffers.replies[service, NUM_UP] = size


@njit(nogil=True, cache=True)
def serve_prompt_ffn(
    thread, num_threads, service, seen, weights, most_tokens, buffers, source, scratch, function
):  # fmt: skip
    """Serve FFNs of more than `most_tokens` tokens after `seen`; returns the next other request's.

    `weights` and 0 as for `serve_ffn`, whose loop goes on then.
    """
    while True:
        number, team = next_share(buffers.cells, service, thread, num_threads, seen)
        started = now_ns()
        if number == 0:
            return number
        request = buffers.requests[service]
        if is_for_others(request, weights) or request[OPERATION] != FFN:
            return number
        if request[NUM_TOKENS] <= most_tokens:
            return number
        prompt_ffn_request(thread, team, service, buffers, source, scratch, function)
        finish_request(
            buffers.cells, buffers.requests, buffers.replies, scratch.counters, service, number,
            team, started,
        )  # fmt: skip
        seen = np.int32(number)
