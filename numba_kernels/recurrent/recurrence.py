"""The gated delta rule and Mamba-2 over pages: attention in a page, and the state before it.

With S the state before a page, g the decays, c(s, t) = g[s + 1] + ... + g[t] and c(t) = g[0] + ...
+ g[t], all of one head and page,
    u[t] = beta[t] (v[t] - exp(c(t)) S^T k[t] - sum over s < t of exp(c(s, t)) (k[t] . k[s]) u[s])
    o[t] = exp(c(t)) S^T q[t] + sum over s <= t of exp(c(s, t)) (q[t] . k[s]) u[s]
and the state before the next page is exp(c(e)) S + sum over s of exp(c(s, e)) k[s] u[s]^T, e the
last position. That is the recurrence S = exp(g) S, S += beta k (v - S^T k)^T, o = S^T q, unrolled
to the page's beginning. Mamba-2's u[t] is dt[t] v[t] alone.

All sums follow the positions, so a token's bits depend on the tokens before it alone: on no chunk,
no draft, no other sequence, no thread.
Source:  Yang, Kautz and Hatamizadeh, arXiv 2412.06464 (equations 8 to 10); Dao and Gu, arXiv
         2405.21060 (section 6)
"""

import math

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.norm import rms_norm_kernel
from hotcold.numba_kernels.decode.vectors import copy_numbers
from hotcold.numba_kernels.ir.activation_ir import silu_row
from hotcold.numba_kernels.ir.recurrent_ir import add_scaled_rows2, dots2
from hotcold.numba_kernels.recurrent.pages import (
    FACTORS,
    SUMS,
    head_places,
    key_head_of,
    num_channels,
    previous_token,
    scratch_places,
)
from hotcold.numba_kernels.recurrent_arrays import DELTA, STATE_POSITIONS

_LINEAR_FROM = 20.0  # softplus(x) = x above, as in PyTorch


@njit(nogil=True, cache=True)
def _gate(vectors, layer, head, gates):
    """b = sigmoid(b), of Mamba dt = softplus(dt + step_bias), of a token's gates (2 Hv,) or (Hv,).

    And the logarithm of what is kept of the state.
    """
    num_heads = vectors.decay_rate.shape[1]
    has_steps = gates.shape[0] == num_heads
    a = np.float64(gates[head if has_steps else num_heads + head]) + vectors.step_bias[layer, head]
    softplus = a if a > _LINEAR_FROM else math.log1p(math.exp(a))
    b = softplus if has_steps else 1.0 / (1.0 + math.exp(-np.float64(gates[head])))
    return np.float32(b), np.float32(vectors.decay_rate[layer, head] * softplus)


@njit(nogil=True, cache=True)
def _keep(page, decays, row, scratch):
    """scratch[s] = exp(c(s, row)), s <= row; returns exp(c(row))."""
    total = 0.0
    for s in range(row, -1, -1):
        scratch[s] = math.exp(total)
        total += page[decays + s]
    return np.float32(math.exp(total))


@njit(nogil=True, cache=True)
def _begin_page(numbers, before, places, page, state, scratch):
    """Write a head's state to page[state:], of the page before it, which has it in `places`.

    They may be the same.
    """
    key_dim, value_dim = numbers.key_dim, numbers.value_dim
    old, keys, values, decays = places
    kept = _keep(before, decays, STATE_POSITIONS - 1, scratch)
    sums = scratch[SUMS : SUMS + 2 * value_dim]
    for i in range(0, key_dim, 2):
        first, count = i * value_dim, min(2, key_dim - i) * value_dim
        for s in range(STATE_POSITIONS):
            place = keys + s * key_dim + i
            scratch[FACTORS + s] = scratch[s] * before[place]
            scratch[FACTORS + STATE_POSITIONS + s] = scratch[s] * before[place + 1]
        for d in range(count):
            sums[d] = kept * before[old + first + d]
        add_scaled_rows2(
            sums, 0, value_dim, before, values, value_dim, scratch, FACTORS,
            FACTORS + STATE_POSITIONS, STATE_POSITIONS, value_dim,
        )  # fmt: skip
        copy_numbers(sums[:count], page[state + first : state + first + count])


@njit(nogil=True, cache=True)
def _step(numbers, head, page, places, row, x, beta, scratch):
    """One token's value u, written to the page; its o: scratch[SUMS + dv:]; x: its row."""
    key_dim, value_dim = numbers.key_dim, numbers.value_dim
    state, keys, values, decays = places
    key_head = key_head_of(numbers, head)
    query, key = key_head * key_dim, (numbers.num_key_heads + key_head) * key_dim
    value = 2 * numbers.num_key_heads * key_dim + head * value_dim
    kept = _keep(page, decays, row, scratch)
    sums = scratch[SUMS : SUMS + 2 * value_dim]
    for d in range(2 * value_dim):
        sums[d] = 0
    add_scaled_rows2(
        sums, 0, value_dim, page, state, value_dim, x, key, query, key_dim, value_dim
    )  # fmt: skip
    corrects = numbers.kind == DELTA
    for d in range(value_dim):
        known = kept * sums[d] if corrects else np.float32(0)
        sums[d] = beta * (x[value + d] - known)
        sums[value_dim + d] *= kept
    for s in range(row):
        of_key, of_query = dots2(page, keys + s * key_dim, x, key, query, key_dim)
        scratch[FACTORS + s] = -beta * scratch[s] * of_key if corrects else np.float32(0)
        scratch[FACTORS + STATE_POSITIONS + s] = scratch[s] * of_query
    add_scaled_rows2(
        sums, 0, value_dim, page, values, value_dim, scratch, FACTORS, FACTORS + STATE_POSITIONS,
        row, value_dim,
    )  # fmt: skip
    copy_numbers(sums[:value_dim], page[values + row * value_dim : values + (row + 1) * value_dim])
    _, own = dots2(x, key, x, key, query, key_dim)
    for d in range(value_dim):
        sums[value_dim + d] += own * sums[d]


@njit(nogil=True, cache=True)
def _finish(numbers, head, epsilon, vectors, rows, t, out, own):
    """own (dv,) = what `recur` gives for a head of token t, of o in `out`."""
    size, layer, of_z = numbers.value_dim, numbers.place, num_channels(numbers)
    z = of_z + head * size
    silu_row(rows[:, z : z + size], t)
    if numbers.kind == DELTA:
        rms_norm_kernel(out[:size], vectors.norm_weight[layer], epsilon, own)
    else:
        value = of_z - (numbers.num_value_heads - head) * size
        for d in range(size):
            own[d] = out[d] + vectors.skip[layer, head] * rows[t, value + d]
    for d in range(size):
        own[d] *= rows[t, z + d]


@njit(nogil=True, cache=True)
def recur(
    part, num_parts, numbers, epsilon, vectors, pages, tables, positions, slots, rows, gates,
    unwanted, scratch, heads,
):  # fmt: skip
    """heads[t - unwanted] = norm(o[t]) * silu(z[t]), of tokens from `unwanted` on; pages as above.

    Of Mamba (o[t] + skip v[t]) * silu(z[t]), which `norm_groups` norms.

    Every num_parts-th head of all tokens, after all parts of `convolution.prepare_recurrence`,
    whose arguments these are, as it has left rows. A token's gates have b (Hv) and a (Hv), Mamba's
    dt (Hv), as projected, and its decays are rate * softplus(a + step_bias), of Mamba rate * dt.
        norm(o) = o / sqrt(mean(o^2) + epsilon) * norm_weight
    A token at a page's first position reads the page before it.
    Shapes:  gates (T, 2 Hv), heads (T - unwanted, Hv * dv) float32; scratch of one thread
             (`recurrent_scratch`)
    """
    size, key_dim = numbers.value_dim, numbers.key_dim
    in_scratch = scratch_places(numbers)
    for head in range(part, numbers.num_value_heads, num_parts):
        first, in_pages = head * size, head_places(numbers, head)
        key = (numbers.num_key_heads + key_head_of(numbers, head)) * key_dim
        for begin in range(rows.shape[0]):
            if previous_token(slots, begin) >= 0:
                continue
            table, page, places = tables[slots[begin]], scratch, in_scratch
            for t in range(begin, rows.shape[0]):
                if slots[t] != slots[begin]:
                    continue
                number, row = positions[t] // STATE_POSITIONS, positions[t] % STATE_POSITIONS
                if t == begin and row == 0 and number > 0:
                    page, places = pages[table[number - 1]], in_pages
                if t == begin or row == 0:
                    before, old = page, places
                    has_page = table[number] >= 0
                    page = pages[table[number]] if has_page else scratch
                    places = in_pages if has_page else in_scratch
                    if row == 0 and number > 0:
                        _begin_page(numbers, before, old, page, places[0], scratch)
                    elif row == 0:
                        page[places[0] : places[0] + key_dim * size] = 0
                beta, page[places[3] + row] = _gate(vectors, numbers.place, head, gates[t])
                _step(numbers, head, page, places, row, rows[t], beta, scratch)
                if table[number] < 0:
                    own_key = places[1] + row * key_dim
                    copy_numbers(rows[t, key : key + key_dim], page[own_key : own_key + key_dim])
                if t < unwanted:
                    continue
                own = heads[t - unwanted, first : first + size]
                _finish(numbers, head, epsilon, vectors, rows, t, scratch[SUMS + size :], own)


@njit(nogil=True, cache=True)
def norm_groups(part, num_parts, numbers, epsilon, vectors, heads):
    """Norm what `recur` has left of Mamba's tokens: all value heads of a key head as one vector.

    Every num_parts-th vector of heads (T, Hv * dv).
    """
    groups, weight = numbers.num_key_heads, vectors.norm_weight[numbers.place]
    size = heads.shape[1] // groups
    for index in range(part, heads.shape[0] * groups, num_parts):
        first = index % groups * size
        own = heads[index // groups, first : first + size]
        rms_norm_kernel(own, weight[first : first + size], epsilon, own)
