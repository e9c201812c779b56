"""Norms of a prompt's tokens."""

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.norm import norm_kernel


@njit(nogil=True, cache=True)
def norm_rows_kernel(kind, x, weight, bias, epsilon, out, first, last):
    """out[t] = the norm of x[t], as `norm_kernel` computes it, for t in first..last-1; no checks.

    x, out (T, d) float32, weight (d,), bias (d,) or (0,)
    """
    for t in range(first, last):
        norm_kernel(kind, x[t], weight, bias, epsilon, out[t])
