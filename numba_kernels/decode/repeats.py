"""How long the ends of a text have stood in it before."""

import numpy as np

from hotcold.numba_kernels.compiler import njit


@njit(nogil=True, cache=True, _nrt=True)
def repeat_lengths(tokens):
    """For each k the number of last tokens that also stand k places earlier; checks nothing.

    out[k] = the most n with tokens[N - n : N] == tokens[N - n - k : N - k], for 0 < k < N; 0 at 0
    Shapes:  tokens (N,) int32; out (N,) int64
    Units:   reads each token a few times: the Z algorithm, over the tokens from the last one on
    """
    size = tokens.shape[0]
    out = np.zeros(size, np.int64)
    left, right = 0, 0  # tokens [left, right) from the last one equal the first right - left
    for k in range(1, size):
        length = 0
        if k < right:
            length = min(out[k - left], right - k)
        while k + length < size and tokens[size - 1 - length] == tokens[size - 1 - k - length]:
            length += 1
        out[k] = length
        if k + length > right:
            left, right = k, k + length
    return out


@njit(nogil=True, cache=True, _nrt=True)
def longest_repeats(tokens, limit, least, vocab_size):
    """For each token of a model the most last tokens that also stand before it; checks nothing.

    out[v] = the most n <= limit of all places of v, but the first, that have the last n tokens
    right before them; -1 where that is less than `least`
    Shapes:  tokens (N,) int32; out (vocab_size,) int64
    """
    out, lengths = np.full(vocab_size, -1, np.int64), repeat_lengths(tokens)
    for k in range(1, tokens.shape[0]):
        length = min(lengths[k], limit)
        if length >= least:
            token = tokens[tokens.shape[0] - k]
            out[token] = max(out[token], length)
    return out
