"""Quantized rows times a prompt's tokens, shared by threads that are in a compiled loop.

The products are those of `quantized_matmul`, to the bit.
"""

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.rows import block_products, rows_a_panel, split_range
from hotcold.numba_kernels.ir.vector_ir import quantize_vector
from hotcold.numba_kernels.prefill.quantized_matmul import ROWS, TOKENS_AT_ONCE, vectors_part
from hotcold.numba_kernels.serve.work_stealing import next_block


@njit(nogil=True, cache=True)
def quantize_tokens(weights, x, first, last, into):
    """into[t] = x[t] quantized for rows like `weights`, for tokens first..last-1; no checks."""
    for t in range(first, last):
        quantize_vector(weights, x, t, into, t)


@njit(nogil=True, cache=True)
def share_rows(counters, thread, num_threads, weights, bias, vectors, addend, out, column):
    """out[t, n] = weights[n - column] . vectors[t] + bias[n] + addend[t, n], of rows it takes.

    Row r is column `column` + r of `out` (T, N); `bias` (N,) and `addend` (T, N) may be empty.
    Rows are read once for every TOKENS_AT_ONCE tokens. counters: a kind of `new_block_counters`.
    Checks nothing.
    """
    num_tokens = out.shape[0]
    size = rows_a_panel(weights, num_tokens)
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        first, last = split_range(weights.shape[0], part, num_threads, ROWS)
        begin = first + next_block(counters, part) * size
        while begin < last:
            end = min(begin + size, last)
            for t in range(0, num_tokens, TOKENS_AT_ONCE):
                count = min(TOKENS_AT_ONCE, num_tokens - t)
                own = out[t : t + count]
                some = vectors_part(vectors, t, count)
                block_products(weights, some, own, begin, end, column + begin)
            for t in range(num_tokens):
                if bias.shape[0]:
                    for n in range(column + begin, column + end):
                        out[t, n] += bias[n]
                if addend.shape[0]:
                    for n in range(column + begin, column + end):
                        out[t, n] += addend[t, n]
            begin = first + next_block(counters, part) * size


@njit(nogil=True, cache=True)
def quantize_for_layer(rows, layer, x, first, last, vectors, second_vectors):
    """`quantize_tokens` for a layer's `LayerRows`: what rows of each format take."""
    if rows.first_rows[layer, 0] < rows.first_rows[layer, 1]:
        quantize_tokens(rows.first, x, first, last, vectors)
    if rows.second_rows[layer, 0] < rows.second_rows[layer, 1]:
        quantize_tokens(rows.second, x, first, last, second_vectors)


@njit(nogil=True, cache=True)
def share_layer(
    counters, thread, num_threads, rows, layer, bias, vectors, second_vectors, addend, out
):  # fmt: skip
    """`share_rows` of a layer's `LayerRows`; `counters` has a kind for each format."""
    begin, end = rows.first_rows[layer]
    second_begin, second_end = rows.second_rows[layer]
    if begin < end:
        share_rows(
            counters[0], thread, num_threads, rows.first[begin:end], bias, vectors, addend, out, 0
        )
    if second_begin < second_end:
        share_rows(
            counters[1], thread, num_threads, rows.second[second_begin:second_end], bias,
            second_vectors, addend, out, end - begin,
        )  # fmt: skip
