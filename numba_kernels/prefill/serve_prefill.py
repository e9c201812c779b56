"""The loop of an attention service's thread for prompts of quantized weights, layer after layer.

It computes what `actors/attention/prefill_attention.py` does, to the bit, without Python: a layer
of a small model takes less time than Python's part in it would. The order of norms, attention and
residual is that of `numba_kernels.serve.serve_attention`, whose steps these are, each thread for
tokens of its own.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.router import route_tokens
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, aligned_zeros, empty_vectors
from hotcold.numba_kernels.prefill.attention import (
    prompt_attention_kernel,
    prompt_scratch_shapes,
)
from hotcold.numba_kernels.prefill.quantized_matmul import vectors_part
from hotcold.numba_kernels.prefill.shared_rows import (
    quantize_for_layer,
    quantize_tokens,
    share_layer,
    share_rows,
)
from hotcold.numba_kernels.serve.doorbell import now_ns
from hotcold.numba_kernels.serve.mailbox import (
    ATTENTION,
    FULL,
    LAYER,
    NUM_TOKENS,
    NUM_UNWANTED,
    OPERATION,
    WINDOWED,
    barrier_wait,
    finish_request,
    is_for_others,
    next_share,
)
from hotcold.numba_kernels.serve.serve_attention import (
    layer_input,
    layer_norm_before,
    norm_whole,
    rotate_and_store,
    write_ffn_input,
)
from hotcold.numba_kernels.serve.work_stealing import new_block_counters

_QKV, _QKV_SECOND, _HEADS, _OUT = range(4)
NUM_PROMPT_COUNTERS = 4


class PromptScratch(NamedTuple):
    """Work space for prompts of up to T tokens.

    residual, normed (T, d), qkv (T, rows), heads (T, H * head_dim), router_logits (T, experts)
    float32; vectors, second_vectors: T tokens' as rows of the first and second format take them
    queries .. weighted: a thread's of `prompt_attention_kernel`, with a leading axis of threads
    counters of blocks taken (NUM_PROMPT_COUNTERS, threads * 16)
    """

    residual: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    heads: np.ndarray
    router_logits: np.ndarray
    vectors: QuantizedVectors
    second_vectors: QuantizedVectors
    queries: np.ndarray
    page_keys: np.ndarray
    page_values: np.ndarray
    scores: np.ndarray
    sums: np.ndarray
    weighted: np.ndarray
    counters: np.ndarray


def new_prompt_scratch(
    num_threads: int, num_tokens: int, widths: tuple[int, int, int], numbers: np.ndarray
) -> PromptScratch:
    """Work space; what is not used of it takes no memory.

    widths: of hidden states, of rows of qkv, of heads. numbers (L,): of LAYER_NUMBERS, of one
    head_dim
    """
    width, qkv, heads = widths
    shapes = prompt_scratch_shapes(int(numbers["head_dim"].max()))

    def space(row: int) -> np.ndarray:
        return aligned_zeros((num_tokens, row))

    def vectors(row: int) -> QuantizedVectors:
        return QuantizedVectors(*(array[0] for array in empty_vectors(1, num_tokens, row)))

    queries, page_keys, page_values, scores, sums, weighted = (
        aligned_zeros((num_threads, *shape)) for shape in shapes
    )
    return PromptScratch(
        residual=space(width),
        normed=space(width),
        qkv=space(qkv),
        heads=space(heads),
        router_logits=space(int(numbers["num_experts"].max())),
        vectors=vectors(max(width, heads)),
        second_vectors=vectors(width),
        queries=queries,
        page_keys=page_keys,
        page_values=page_values,
        scores=scores,
        sums=sums,
        weighted=weighted,
        counters=new_block_counters(NUM_PROMPT_COUNTERS, num_threads),
    )


@njit(nogil=True, cache=True)
def _route(numbers, routers, layer, x, ffn_input, logits, weights):
    """`route_tokens` of a mixture; a model without experts has None."""
    if routers is None:
        return
    if numbers.num_experts > 0:
        own = logits[:, : numbers.num_experts]
        route_tokens(numbers, routers, layer, x, ffn_input, own, weights)


@njit(nogil=True, cache=True)
def prompt_request(thread, num_threads, service, buffers, arrays, scratch):
    """This thread's share of a prompt's ATTENTION request in the mailbox; no checks."""
    request, cells = buffers.requests[service], buffers.cells
    layer, num_tokens, unwanted = request[LAYER], request[NUM_TOKENS], request[NUM_UNWANTED]
    numbers, learned, counters = arrays.numbers[layer], arrays.vectors, scratch.counters
    residual, normed = scratch.residual[:num_tokens], scratch.normed[:num_tokens]
    qkv, heads = scratch.qkv[:num_tokens], scratch.heads[unwanted:num_tokens]
    first, last = split_range(num_tokens, thread, num_threads, 1)
    layer_input(buffers.hidden[first:last], layer, arrays, residual[first:last])
    layer_norm_before(residual[first:last], layer, arrays, normed[first:last])
    quantize_for_layer(
        arrays.qkv, layer, normed, first, last, scratch.vectors, scratch.second_vectors
    )
    barrier_wait(cells, service, num_threads)
    share_layer(
        counters[_QKV : _QKV_SECOND + 1], thread, num_threads, arrays.qkv, layer,
        learned.qkv_bias[layer], scratch.vectors, scratch.second_vectors, residual[:0], qkv,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    if norm_whole(thread, num_threads, layer, arrays, qkv):
        barrier_wait(cells, service, num_threads)
    rotate_and_store(thread, num_threads, layer, buffers, arrays, qkv)
    if unwanted == num_tokens:
        return
    barrier_wait(cells, service, num_threads)
    tables = buffers.page_tables[WINDOWED if numbers.window else FULL]
    prompt_attention_kernel(
        numbers, learned.sinks[layer], qkv[unwanted:], np.int64(buffers.positions[unwanted]),
        arrays.keys[layer], arrays.values[layer], tables[buffers.slots[0]],
        scratch.queries[thread], scratch.page_keys[thread], scratch.page_values[thread],
        scratch.scores[thread], scratch.sums[thread], scratch.weighted[thread],
        counters[_HEADS], heads,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    weights, count = arrays.out[layer], num_tokens - unwanted
    first, last = split_range(count, thread, num_threads, 1)
    vectors = vectors_part(scratch.vectors, 0, count)
    quantize_tokens(weights, heads, first, last, vectors)
    barrier_wait(cells, service, num_threads)
    wanted = residual[unwanted:]
    share_rows(
        counters[_OUT], thread, num_threads, weights, learned.out_bias[layer], vectors,
        wanted[:0] if numbers.adds_late else wanted, buffers.mixed[unwanted:num_tokens], 0,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    first, last = first + unwanted, last + unwanted
    for t in range(first, last):
        write_ffn_input(t, layer, buffers, arrays, residual, normed)
    x, ffn_input = residual[first:last], buffers.ffn_input[first:last]
    if not numbers.routes_layer_input:
        x = ffn_input
    _route(
        numbers, arrays.routers, layer, x, ffn_input, scratch.router_logits[first:last],
        buffers.block_weights[first:last],
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _is_one_sequence(buffers, num_tokens):
    """Whether the tokens are consecutive positions of one sequence."""
    for t in range(1, num_tokens):
        if buffers.slots[t] != buffers.slots[0]:
            return False
        if buffers.positions[t] != buffers.positions[0] + t:
            return False
    return True


@njit(nogil=True, cache=True)
def serve_prompts(
    thread, num_threads, service, seen, weights, most_tokens, buffers, arrays, scratch
):  # fmt: skip
    """Serve ATTENTION of more than `most_tokens` tokens after `seen`; returns the next other one's.

    `weights` and 0 as for `serve_attention`, whose loop goes on then. Left to Python, as any other
    request, are tokens that are no consecutive ones.
    """
    while True:
        number, team = next_share(buffers.cells, service, thread, num_threads, seen)
        started = now_ns()
        if number == 0:
            return number
        request = buffers.requests[service]
        if is_for_others(request, weights) or request[OPERATION] != ATTENTION:
            return number
        num_tokens = request[NUM_TOKENS]
        if num_tokens <= most_tokens or not _is_one_sequence(buffers, num_tokens):
            return number
        prompt_request(thread, team, service, buffers, arrays, scratch)
        finish_request(
            buffers.cells, buffers.requests, buffers.replies, scratch.counters, service, number,
            team, started,
        )  # fmt: skip
        seen = number
