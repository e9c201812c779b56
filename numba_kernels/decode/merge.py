"""The driver's sum of partial outputs."""

from numba import njit


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
