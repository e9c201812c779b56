"""The driver's sum of partial outputs."""

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.norm import norm_kernel


@njit(nogil=True, cache=True)
def merge_partials(mixed, partials, first, num_tokens, hidden):
    """hidden[t] = mixed[t] + sum over services s >= first of partials[s, t]; checks nothing.

    mixed, hidden (T, d), partials (S, T, d) float32; always summed in the services' order.
    """
    for t in range(num_tokens):
        target = hidden[t]
        target[:] = mixed[t]
        for s in range(first, partials.shape[0]):
            part = partials[s, t]
            for i in range(target.shape[0]):
                target[i] += part[i]


@njit(nogil=True, cache=True)
def merge_normed(mixed, partials, first, num_tokens, kind, weight, epsilon, scale, hidden):
    """hidden[t] = mixed[t] + scale * norm(sum over services s >= first of partials[s, t]).

    weight (d,) float32, or (0,) for no norm; shapes and order as in `merge_partials`. No checks.
    """
    for t in range(num_tokens):
        target = hidden[t]
        target[:] = partials[first, t]
        for s in range(first + 1, partials.shape[0]):
            part = partials[s, t]
            for i in range(target.shape[0]):
                target[i] += part[i]
        norm_kernel(kind, target, weight, weight[:0], epsilon, target)
        for i in range(target.shape[0]):
            target[i] = mixed[t, i] + scale * target[i]
