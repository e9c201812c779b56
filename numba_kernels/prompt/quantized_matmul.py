"""Matmul of quantized weights and many tokens (prefill), by integers."""

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.rows import rows_kernel
from hotcold.numba_kernels.decode.vectors import NO_BIAS, QuantizedVectors
from hotcold.numba_kernels.ir.vector_ir import quantize_vector

TOKENS_AT_ONCE = 128  # whose vectors stay in a core's second-level cache while rows pass by


@njit(nogil=True, cache=True)
def quantize_kernel(weights, x, into, first, last):
    """into[t] = x[t] quantized for rows like `weights`, for tokens first..last-1; checks nothing.

    x (T, d) float32
    """
    for t in range(first, last):
        quantize_vector(weights, x, t, into)


@njit(nogil=True, cache=True)
def matmul_kernel(weights, vectors, out, first, last):
    """out[t, n] = weights[n] . vectors[t] for rows first..last-1 and all tokens; checks nothing.

    Rows are read once for every TOKENS_AT_ONCE tokens. out (T, N) float32
    """
    for begin in range(0, out.shape[0], TOKENS_AT_ONCE):
        end = min(begin + TOKENS_AT_ONCE, out.shape[0])
        part = QuantizedVectors(
            vectors.values[begin:end], vectors.scales[begin:end], vectors.sums[begin:end]
        )
        rows_kernel(weights, NO_BIAS, part, out[begin:end], first, last)
