"""The FFN's output, of the services' partial ones, added to the residual: one order of sums.

A GPU that adds up has the same bits (cuda_kernels/csrc/share.cu, sum_parts.cu), but for LayerNorms
and pairs of FFNs, which are the driver's.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.norm import RMS_NORM, lane_rms_norm_kernel, norm_kernel
from hotcold.numba_kernels.decode.stripes import ALL_STRIPES, meet
from hotcold.numba_kernels.decode.vectors import copy_numbers


@njit(nogil=True, cache=True)
def _add_rows(target, source, first, num_tokens):
    for t in range(first, num_tokens):
        own, other = target[t], source[t]
        for i in range(own.shape[0]):
            own[i] += other[i]


@njit(nogil=True, cache=True, _nrt=True)
def add_sums(partials, more_partials, sums, first, num_tokens):
    """Add what CPU services passed on, `sums` of `LayerFacts`, to the first; checks nothing.

    Of tokens first..num_tokens-1.
    """
    kept, count = np.empty(sums.shape[0], np.int64), 0
    for i in range(sums.shape[0] + 1):
        stripe = sums[i, 2] if i < sums.shape[0] else ALL_STRIPES
        while count > 1 and meet(sums[kept[count - 2], 2], sums[kept[count - 1], 2], 0, stripe):
            count -= 1
            target, output, _ = sums[kept[count - 1]]
            source, other, _ = sums[kept[count]]
            own = more_partials[target, output - 1] if output else partials[target]
            added = more_partials[source, other - 1] if other else partials[source]
            _add_rows(own, added, first, num_tokens)
        if i < sums.shape[0]:
            kept[count] = i
            count += 1


@njit(nogil=True, cache=True)
def merge_partials(ffn_residual, partials, services, first, num_tokens, hidden):
    """hidden[t] = ffn_residual[t] + sum over s of partials[services[s], t], t >= first; no checks.

    ffn_residual, hidden (T, d), partials (S, T, d) float32; summed in the order of `services`
    int64.
    """
    for t in range(first, num_tokens):
        target = hidden[t]
        copy_numbers(ffn_residual[t], target)
        for s in services:
            part = partials[s, t]
            for i in range(target.shape[0]):
                target[i] += part[i]


@njit(nogil=True, cache=True)
def merge_normed(
    ffn_residual, partials, services, first, num_tokens, kind, weight, epsilon, scale, hidden
):  # fmt: skip
    """hidden[t] = ffn_residual[t] + scale * norm(sum over s of partials[services[s], t]).

    weight (d,) float32, or (0,) for no norm; shapes and order as in `merge_partials`. An RMSNorm
    has a GPU's bits. No checks.
    """
    for t in range(first, num_tokens):
        target = hidden[t]
        copy_numbers(partials[services[0], t], target)
        for s in services[1:]:
            part = partials[s, t]
            for i in range(target.shape[0]):
                target[i] += part[i]
        if kind == RMS_NORM and weight.shape[0]:
            lane_rms_norm_kernel(target, weight, epsilon, target)
        else:
            norm_kernel(kind, target, weight, weight[:0], epsilon, target)
        for i in range(target.shape[0]):
            target[i] = ffn_residual[t, i] + scale * target[i]


@njit(nogil=True, cache=True)
def merge_pair(
    ffn_residual, partials, services, first, num_tokens, kind, weight, pair_norm, is_second,
    epsilon, hidden,
):  # fmt: skip
    """x = norm(sum over s of partials[services[s], t]), of two FFNs in turn:

    hidden[t] = x of the first, then
    hidden[t] = ffn_residual[t] + pair_norm(hidden[t] + x) of the second.
    Shapes and order as in `merge_partials`; partials of the first service are overwritten.
    """
    for t in range(first, num_tokens):
        total, target = partials[services[0], t], hidden[t]
        for s in services[1:]:
            part = partials[s, t]
            for i in range(total.shape[0]):
                total[i] += part[i]
        if not is_second:
            norm_kernel(kind, total, weight, weight[:0], epsilon, target)
            continue
        norm_kernel(kind, total, weight, weight[:0], epsilon, total)
        for i in range(total.shape[0]):
            total[i] += target[i]
        norm_kernel(kind, total, pair_norm, weight[:0], epsilon, total)
        for i in range(total.shape[0]):
            target[i] = ffn_residual[t, i] + total[i]
