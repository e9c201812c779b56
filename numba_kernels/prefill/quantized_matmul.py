"""Matmul of quantized weights and many tokens (prefill), by integers."""

from hotcold.numba_kernels.compiler import by_types, njit
from hotcold.numba_kernels.decode.rows import block_products, rows_a_panel, split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors
from hotcold.numba_kernels.ir.vector_ir import quantize_vector
from hotcold.numba_kernels.prefill.block_tokens import (
    adds_rows,
    begin_sums,
    block_matrix,
    block_rows,
    choice_share,
    end_sums,
    is_summed,
    num_outputs,
)

TOKENS_AT_ONCE = 128  # whose vectors stay in a core's second-level cache while rows pass by
ROWS = 8  # a thread has whole ones: as many as some tile takes side by side
SUM_ROWS = 192  # of products that are added to rows of tokens, panel by panel


@njit(nogil=True, cache=True)
def quantize_kernel(weights, x, tokens, into, first, last):
    """into[i] = x of choice i quantized for rows like `weights`, for choices first..last-1.

    x (T, d) float32, `ChoiceRows` or `CutRows`; tokens `BlockTokens`; checks nothing
    """
    for b in range(tokens.starts.shape[0] - 1):
        begin, end = choice_share(tokens, b, first, last)
        if begin < end:
            own, ids = block_rows(x, tokens, b)
            _quantize_rows(weights, own, ids, begin, end, vectors_part(into, tokens.starts[b], end))


@njit(nogil=True, cache=True)
def _quantize_rows(weights, x, ids, first, last, into):
    for t in range(first, last):
        quantize_vector(weights, x, ids[t], into, t)


@njit(nogil=True, cache=True)
def vectors_part(vectors, first, count):
    """`count` of the vectors from number `first` on."""
    end = first + count
    return QuantizedVectors(
        vectors.values[first:end], vectors.scales[first:end], vectors.sums[first:end]
    )


@njit(nogil=True, cache=True)
def matmul_kernel(weights, places, tokens, vectors, sums, out, thread, num_threads):
    """A thread's share of each block's rows times its choices; checks nothing.

    out[t, n] = weights[n] . vectors[t] of row n and choice t of a block; of `StripeSums` they are
    added up. Rows are read once for every TOKENS_AT_ONCE choices.
    weights, places: `WeightBlocks`; out: see `block_rows`; sums (TOKENS_AT_ONCE, SUM_ROWS) float32
    """
    for b in range(tokens.starts.shape[0] - 1):
        count = tokens.starts[b + 1] - tokens.starts[b]
        rows = block_matrix(weights, places[b])
        first, last = split_range(num_outputs(out, rows.shape[0]), thread, num_threads, ROWS)
        if first == last:
            continue
        own, ids = block_rows(out, tokens, b)
        begin_sums(out, b, first, last)
        for begin in range(0, count if rows.shape[0] else 0, TOKENS_AT_ONCE):
            end = min(begin + TOKENS_AT_ONCE, count)
            part = vectors_part(vectors, tokens.starts[b] + begin, end - begin)
            _put_products(rows, part, sums, out, b, own, ids, begin, end, first, last)
        if adds_rows(out, b):
            end_sums(out, b, 0, own.shape[0], first, last)


@by_types
def _put_products(weights, vectors, sums, out, b, own, ids, begin, end, first, last):  # type: ignore[no-untyped-def]
    """Of rows first..last-1 and choices begin..end-1 of block b; for compiled code.

    `own` are rows of `out`, and ids their places.
    """

    def put(weights, vectors, sums, out, b, own, ids, begin, end, first, last):  # type: ignore[no-untyped-def]
        block_products(weights, vectors, own[begin:end], first, last, first)

    def add(weights, vectors, sums, out, b, own, ids, begin, end, first, last):  # type: ignore[no-untyped-def]
        _add_products(weights, vectors, sums, out, b, own, ids[begin:end], first, last)

    return add if is_summed(out) else put


@njit(nogil=True, cache=True)
def _add_products(weights, vectors, sums, of_stripes, b, out, ids, first, last):
    """out[ids[t], n] += weights[n] . vectors[t] for rows first..last-1, or = where it is whole.

    Panel by panel: neighbours of a row of `out` lie together, others a power of two apart.
    """
    own, size = sums[: ids.shape[0]], min(SUM_ROWS, rows_a_panel(weights, ids.shape[0]))
    adds = adds_rows(of_stripes, b)
    for row in range(first, last, size):
        end = min(row + size, last)
        block_products(weights, vectors, own, row, end, 0)
        for t in range(ids.shape[0]):
            target, products = out[ids[t]], own[t]
            if adds:
                for n in range(row, end):
                    target[n] += products[n - row]
            else:
                for n in range(row, end):
                    target[n] = products[n - row]
                end_sums(of_stripes, b, ids[t], ids[t] + 1, row, end)
