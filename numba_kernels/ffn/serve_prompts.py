"""The loop of a CPU service's thread for prompts of quantized weights, layer after layer.

Of neurons in memory, in one block, whose down rows are an output each. It computes what
`actors/cpu/prompt_ffn.py` does, to the bit, without Python: a layer of a small model takes less
time than Python's part in it would.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import IS_SECOND
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.block_vectors import matrix_at
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from hotcold.numba_kernels.ffn.in_memory import layer_span, part_of
from hotcold.numba_kernels.prompt.prompt_ffn import activate_row, scale_row
from hotcold.numba_kernels.prompt.quantized_matmul import vectors_part
from hotcold.numba_kernels.prompt.shared_rows import quantize_tokens, share_rows
from hotcold.numba_kernels.serve.doorbell import now_ns
from hotcold.numba_kernels.serve.mailbox import (
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
    next_request,
)
from hotcold.numba_kernels.serve.work_stealing import new_block_counters

_GATES, _UPS, _DOWN = range(3)
_NUM_KINDS = 3


class PromptFfnScratch(NamedTuple):
    """Work space for T tokens and N neurons: gates, ups (T * N,) float32.

    inputs, values: the vectors of gate and down rows; counters of blocks taken
    """

    gates: np.ndarray
    ups: np.ndarray
    inputs: QuantizedVectors
    values: QuantizedVectors
    counters: np.ndarray


def new_prompt_ffn_scratch(
    num_threads: int, num_tokens: int, num_neurons: int, width: int
) -> PromptFfnScratch:
    """What is not used of it takes no memory."""
    inputs, values = (empty_vectors(1, num_tokens, size) for size in (width, num_neurons))
    return PromptFfnScratch(
        np.zeros(num_tokens * num_neurons, np.float32),
        np.zeros(num_tokens * num_neurons, np.float32),
        QuantizedVectors(*(array[0] for array in inputs)),
        QuantizedVectors(*(array[0] for array in values)),
        new_block_counters(_NUM_KINDS, num_threads),
    )


@njit(nogil=True, cache=True)
def _add_up(
    counters, thread, num_threads, array, place, bias, h, first, last, vectors, cells, service, out
):  # fmt: skip
    """out = the matrix at `place` . h and the bias; tokens first..last-1 are this thread's."""
    down = matrix_at(array, place)
    quantize_tokens(down, h, first, last, vectors)
    barrier_wait(cells, service, num_threads)
    share_rows(counters, thread, num_threads, down, bias, vectors, h[:0], out, 0)


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
    quantize_tokens(gate, x, first, last, inputs)
    barrier_wait(cells, service, num_threads)
    no_bias = source.gate_bias[:0]
    share_rows(counters[_GATES], thread, num_threads, gate, no_bias, inputs, h[:0], h, 0)
    if up.shape[0]:
        share_rows(counters[_UPS], thread, num_threads, up, no_bias, inputs, h[:0], factors, 0)
    barrier_wait(cells, service, num_threads)
    for t in range(first, last):
        activate_row(function, gate_bias, 0, h, t)
        if up.shape[0]:
            scale_row(function, up_bias, 0, factors[t], h[t])
    place, bias = source.down.places[layer, 0], source.down_bias[layer, 0]
    values = vectors_part(scratch.values, 0, count)
    if place[IS_SECOND]:
        _add_up(
            counters[_DOWN], thread, num_threads, source.down.second, place, bias, h, first, last,
            values, cells, service, out,
        )  # fmt: skip
    else:
        _add_up(
            counters[_DOWN], thread, num_threads, source.down.first, place, bias, h, first, last,
            values, cells, service, out,
        )  # fmt: skip
    if thread == 0:
        buffers.replies[service, NUM_COMPUTED] = buffers.replies[service, NUM_UP] = size


@njit(nogil=True, cache=True)
def serve_prompt_ffn(
    thread, num_threads, service, seen, weights, most_tokens, buffers, source, scratch, function
):  # fmt: skip
    """Serve FFNs of more than `most_tokens` tokens after `seen`; returns the next other request's.

    `weights` as for `serve_ffn`, whose loop goes on then.
    """
    while True:
        number = next_request(buffers.cells, service, seen)
        started = now_ns()
        request = buffers.requests[service]
        if is_for_others(request, weights) or request[OPERATION] != FFN:
            return number
        if request[NUM_TOKENS] <= most_tokens:
            return number
        prompt_ffn_request(thread, num_threads, service, buffers, source, scratch, function)
        finish_request(
            buffers.cells, buffers.requests, buffers.replies, scratch.counters, service, number,
            num_threads, started,
        )  # fmt: skip
        seen = np.int32(number)
