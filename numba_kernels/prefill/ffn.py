"""Up and down of a prompt's tokens, for the neurons that fire for each of them.

A matmul computes a prompt's gates; where few fire, most of up and down need not be computed.
Neurons go by in runs and columns of the output in parts, so that what many tokens read stays in the
second-level cache meanwhile. A choice is a token and a block that it chose (`block_tokens.py`); a
part of a block is its neurons of a stripe (`decode.stripes`).
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.checks import ACTIVATES_UP, CLAMPED_SILU, GELU, GELU_TANH, SILU
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate, activate_up
from hotcold.numba_kernels.decode.rows import add_in_order
from hotcold.numba_kernels.ir.activation_ir import (
    clamped_silu_row,
    gelu_row,
    gelu_tanh_row,
    silu_row,
)
from hotcold.numba_kernels.ir.operands import PART_COLUMNS
from hotcold.numba_kernels.ir.vector_ir import (
    add_part,
    dot_lone_row,
    dot_rows,
    prefetch_part,
)
from hotcold.numba_kernels.prefill.block_tokens import (
    CLEARS,
    LEVEL,
    MERGES,
    StripeSums,
    block_rows,
    choice_share,
    cut_row,
    level_rows,
    merge_levels,
)

_ZERO = np.float32(0)
RUN = 256  # neurons, about; 256 KiB of a part of float16 rows


class FiredNeurons(NamedTuple):
    """Which neurons fire for which choices, run by run: what is read together is contiguous.

    runs (R, 5) int64: of each run of about RUN neurons of a part: the part, its first neuron and
    the one after its last, where its lists begin in `ids`, `values` and in `starts`
    Of a run's choice t they are ids[starts[t] : starts[t + 1]], and values, what each row of down
    is multiplied with, in the same way; ids count from the layer's first. ids int32, values
    float32, starts int32
    """

    runs: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    starts: np.ndarray


@njit(nogil=True, cache=True)
def activate_kernel(
    function,
    weights,
    gate_bias,
    up_bias,
    firsts,
    tokens,
    scores,
    factors,
    ends,
    h,
    num_fired,
    first,
    last,
):
    """h[i] = fn(h[i] + gate_bias) * weights[i] * (factors[i] + up_bias), for choices first..last-1.

    But 0 where a choice has `scores` (`ChoiceRows`, or no values) and that number is not above 0.
    num_fired[k, i] is how many of stripe k, which ends at ends[b, k + 1], are not zero. `factors`
    (`ChoiceRows`, or no values), products with up rows, are activated as up is. weights (P,)
    float32 or (0,); biases (N,) or (0,) float32, of block b from firsts[b] on; h `ChoiceRows`
    ends (B, stripes + 1), num_fired (stripes, P) int64. Checks nothing.
    """
    for b in range(tokens.starts.shape[0] - 1):
        begin, end = choice_share(tokens, b, first, last)
        if begin < end:
            own, _ = block_rows(h, tokens, b)
            choice = tokens.starts[b]
            for t in range(begin, end):
                activate_row(function, gate_bias, firsts[b], own, t)
                if weights.shape[0]:
                    for n in range(own.shape[1]):
                        own[t, n] *= weights[choice + t]
            if factors.values.shape[0]:
                of_up, _ = block_rows(factors, tokens, b)
                for t in range(begin, end):
                    scale_row(function, up_bias, firsts[b], of_up[t], own[t])
            if scores.values.shape[0]:
                counted, _ = block_rows(scores, tokens, b)
                for t in range(begin, end):
                    for n in range(counted.shape[1]):
                        if counted[t, n] <= 0:  # a NaN reaches the output
                            own[t, n] = 0
            for t in range(begin, end):
                for stripe in range(num_fired.shape[0]):
                    found, of_stripe = 0, own[t, ends[b, stripe] : ends[b, stripe + 1]]
                    for n in range(of_stripe.shape[0]):
                        found += of_stripe[n] != 0
                    num_fired[stripe, choice + t] = found


@njit(nogil=True, cache=True)
def activate_row(function, bias, first, h, t):
    """h[t] = fn(h[t] + bias[first:]); `bias` may be empty."""
    own = h[t]
    if bias.shape[0]:
        for n in range(own.shape[0]):
            own[n] += bias[first + n]
    if function.code == SILU:
        silu_row(h, t)
    elif function.code == GELU:
        gelu_row(h, t)
    elif function.code == GELU_TANH:
        gelu_tanh_row(h, t)
    elif function.code == CLAMPED_SILU:
        clamped_silu_row(h, t, function.threshold)
    else:
        for n in range(own.shape[0]):
            own[n] = activate(function, own[n])


@njit(nogil=True, cache=True)
def scale_kernel(function, up_bias, firsts, tokens, factors, h, first, last):
    """h[i] *= factors[i] + up_bias, activated as up is, for choices first..last-1; as above.

    But h `CutRows`, of parts with biases from firsts[b] on
    """
    for b in range(tokens.starts.shape[0] - 1):
        begin, end = choice_share(tokens, b, first, last)
        if begin < end:
            of_up, _ = block_rows(factors, tokens, b)
            for t in range(begin, end):
                own = cut_row(h, b, h.rows[tokens.starts[b] + t])
                scale_row(function, up_bias, firsts[b], of_up[t], own)


@njit(nogil=True, cache=True, _nrt=True)
def add_bias_kernel(weights, biases, out, first, last):
    """out[t] += the sum over blocks b of weights[t, b] * biases[b], for first <= t < last.

    weights (T, B) float32 as in `Selection`: without any each is 1, with 0 a block is not chosen
    biases (B, d), out (T, d) float32. Checks nothing.
    """
    total = np.empty(out.shape[1], np.float32)
    for t in range(first, last):
        total[:] = 0
        for b in range(biases.shape[0]):
            weight = weights[t, b] if weights.shape[0] else np.float32(1)
            if weight != 0:
                for i in range(out.shape[1]):
                    total[i] += weight * biases[b, i]
        for i in range(out.shape[1]):
            out[t, i] += total[i]


@njit(nogil=True, cache=True)
def scale_row(function, bias, first, factors, h):
    """h *= factors + bias[first:], activated as up is; `bias` may be empty."""
    if bias.shape[0]:
        for n in range(h.shape[0]):
            factors[n] += bias[first + n]
    if function.code in ACTIVATES_UP:
        for n in range(h.shape[0]):
            h[n] *= activate_up(function, factors[n])
    else:
        for n in range(h.shape[0]):
            h[n] *= factors[n]


@njit(nogil=True, cache=True)
def list_fired(h, firsts, tokens, run, fired):
    """List the neurons of a run where h (`CutRows`) is not zero; no checks.

    firsts (S,) int64: first neurons of parts
    """
    part, begin, end, place, of_starts = fired.runs[run]
    ids, values, starts = fired.ids[place:], fired.values[place:], fired.starts[of_starts:]
    found, offset, choice = 0, firsts[part], tokens.starts[part]
    starts[0] = 0
    for t in range(tokens.starts[part + 1] - choice):
        own = cut_row(h, part, h.rows[choice + t])
        for n in range(begin, end):
            ids[found], values[found] = n, own[n - offset]
            found += own[n - offset] != 0
        starts[t + 1] = found


@njit(nogil=True, cache=True, inline="always")
def _prefetch_share(matrix, run, first_part, last_part, turn, num_turns):
    """Prefetch some rows of a run: all at once would be more than a core has in flight."""
    first, size = run[1], run[2] - run[1]
    for n in range(first + size * turn // num_turns, first + size * (turn + 1) // num_turns):
        for part in range(first_part, last_part):
            prefetch_part(matrix, n, part)


@njit(nogil=True, cache=True)
def prompt_up_kernel(up, bias, x, tokens, run, num_runs, fired):
    """values *= up[n] . x[t] + bias[n] for listed neurons of a run; no checks.

    `x`, of all tokens, is what `quantize_activations` gave, bias (N,) or (0,)
    """
    parts = up.shape[1] * up.itemsize // 1024 + 1
    block, _, _, place, of_starts = fired.runs[run]
    ids, values, starts = fired.ids[place:], fired.values[place:], fired.starts[of_starts:]
    choice = tokens.starts[block]
    num_tokens = tokens.starts[block + 1] - choice
    following = fired.runs[min(run + 1, num_runs - 1)]
    for i in range(num_tokens):
        _prefetch_share(up, following, 0, parts, i, num_tokens)
        _multiply_fired(up, bias, x, tokens.ids[choice + i], ids, values, starts[i], starts[i + 1])


@njit(nogil=True, cache=True)
def _multiply_fired(up, bias, x, t, ids, values, i, end):
    while i + 4 <= end:
        sums = dot_rows(up, (ids[i], ids[i + 1], ids[i + 2], ids[i + 3]), x, t)
        for k in range(4):
            values[i + k] *= sums[k] + (bias[ids[i + k]] if bias.shape[0] else _ZERO)
        i += 4
    while i < end:
        n = ids[i]
        product = dot_lone_row(up, n, x, t)
        values[i] *= product + (bias[n] if bias.shape[0] else _ZERO)
        i += 1


@njit(nogil=True, cache=True)
def prompt_down_kernel(
    down, tokens, fired, steps, left, first_part, first_run, last_run, first, last, sums, out
):  # fmt: skip
    """Sums over listed n of value * down[n], in a share of their parts of PART_COLUMNS columns.

    Over runs first_run..last_run-1, of parts of neurons from number first_part on. Part p of token
    t is number p * T + t; the share is first..last-1. Sums are added up by stripes:
    in sums (H, T, PART_COLUMNS) float32, the thread's (rows a power of two apart would evict each
    other), as steps (S, 4) of `StripeSums` say; then those that are left over are added to `out`,
    `StripeSums`: row i of left (K, 4) int64 are steps of level i. A token's neurons are added in
    their order. Checks nothing.
    """
    num_tokens, width = out.out.shape[0], out.out.shape[1]
    for part in range(first // num_tokens, (last + num_tokens - 1) // num_tokens):
        first_token = max(first - part * num_tokens, 0)
        last_token = min(last - part * num_tokens, num_tokens)
        begin, end = part * PART_COLUMNS, min((part + 1) * PART_COLUMNS, width)
        if first_run < last_run:  # else the shard has no neuron of the chosen blocks
            _prefetch_share(down, fired.runs[first_run], part, part + 1, 0, 1)
        own, run = StripeSums(sums[0], sums[1:], steps), first_run
        for s in range(steps.shape[0]):
            level = level_rows(own, steps[s, LEVEL])
            if steps[s, CLEARS]:
                level[first_token:last_token] = 0
            while run < last_run and fired.runs[run, 0] == first_part + s:
                _add_run(down, tokens, fired, run, last_run, part, first_token, last_token, level)
                run += 1
            merge_levels(
                own, steps[s, LEVEL], steps[s, MERGES], first_token, last_token, 0, PART_COLUMNS
            )  # fmt: skip
        for i in range(left.shape[0]):
            source, target = level_rows(own, i), level_rows(out, left[i, LEVEL])
            for t in range(first_token, last_token):
                if left[i, CLEARS]:
                    target[t, begin:end] = 0
                add_in_order(down, source[t], target[t, begin:end], 0, end - begin)
            merge_levels(
                out, left[i, LEVEL], left[i, MERGES], first_token, last_token, begin, end
            )  # fmt: skip


@njit(nogil=True, cache=True)
def _add_run(down, tokens, fired, run, last_run, part, first_token, last_token, sums):
    block, _, _, place, of_starts = fired.runs[run]
    ids, values, starts = fired.ids[place:], fired.values[place:], fired.starts[of_starts:]
    of_block = tokens.ids[tokens.starts[block] : tokens.starts[block + 1]]
    first, last = np.searchsorted(of_block, first_token), np.searchsorted(of_block, last_token)
    following = fired.runs[min(run + 1, last_run - 1)]
    for choice in range(first, last):
        t = of_block[choice]
        _prefetch_share(down, following, part, part + 1, choice - first, last - first)
        i, end = starts[choice], starts[choice + 1]
        while i + 4 <= end:
            rows = ids[i], ids[i + 1], ids[i + 2], ids[i + 3]
            factors = values[i], values[i + 1], values[i + 2], values[i + 3]
            add_part(sums, t, down, rows, factors, part)
            i += 4
        while i < end:
            add_part(sums, t, down, (ids[i],), (values[i],), part)
            i += 1
