"""The short convolution: alone, and before a recurrence, with norms of its queries and keys."""

import math

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.vectors import copy_numbers
from hotcold.numba_kernels.ir.activation_ir import silu_row
from hotcold.numba_kernels.ir.recurrent_ir import dots2
from hotcold.numba_kernels.recurrent.pages import num_channels, page_places, previous_token
from hotcold.numba_kernels.recurrent_arrays import DELTA, STATE_POSITIONS

_NORM_EPSILON = 1e-6  # of queries and keys, whatever config.json has for norms


@njit(nogil=True, cache=True)
def _write_inputs(pages, inputs, tables, positions, slots, width, first, size, rows):
    """Let the pages that there are have rows (T, numbers), columns first..first+size-1."""
    for t in range(rows.shape[0]):
        page = tables[slots[t], positions[t] // STATE_POSITIONS]
        if page >= 0:
            place = inputs + positions[t] % STATE_POSITIONS * width + first
            copy_numbers(rows[t, first : first + size], pages[page, place : place + size])


@njit(nogil=True, cache=True)
def _convolve(
    weights, bias, pages, inputs, tables, positions, slots, width, first, t, rows, out
):  # fmt: skip
    """out[i] = bias + sum over taps of weight * input, of channels from `first` on; none before 0.

    Inputs of the step's own tokens are in rows (T, numbers), those before in pages (M, items). out
    may be token t's own row, if those before it are not convolved yet.
    weights (taps, channels), of the position itself last; bias (channels,) or (0,); out (n,)
    """
    taps = weights.shape[0]
    weight = weights[taps - 1]
    for i in range(out.shape[0]):
        own = bias[first + i] if bias.shape[0] else np.float32(0)
        out[i] = own + weight[first + i] * rows[t, first + i]
    position, table, before = positions[t], tables[slots[t]], t
    for back in range(1, min(taps, position + 1)):
        weight = weights[taps - 1 - back]
        if before >= 0:
            before = previous_token(slots, before)
        if before >= 0:
            for i in range(out.shape[0]):
                out[i] += weight[first + i] * rows[before, first + i]
        else:
            at = position - back
            x = pages[table[at // STATE_POSITIONS]]
            place = inputs + at % STATE_POSITIONS * width + first
            for i in range(out.shape[0]):
                out[i] += weight[first + i] * x[place + i]


@njit(nogil=True, cache=True)
def _norm(x, first, size, scale):
    """x[first:][:size] divided by its length, times `scale`."""
    total, _ = dots2(x, first, x, first, first, size)
    factor = np.float32(scale / math.sqrt(total + _NORM_EPSILON))
    for i in range(first, first + size):
        x[i] *= factor


@njit(nogil=True, cache=True)
def prepare_recurrence(
    part, num_parts, numbers, vectors, pages, tables, positions, slots, rows
):  # fmt: skip
    """Convolve and norm queries, keys and values in place; write inputs and keys to pages.

    A row of a token has queries q (Hk, dk), keys k (Hk, dk), values v (Hv, dv) and z (Hv, dv), as
    projected. Then
        q, k, v = silu(conv(q, k, v)), q = q / |q| / sqrt(dk), k = k / |k|
    Mamba's q and k are not normed. Every num_parts-th head of all tokens; all parts are to be done
    before `recurrence.recur`.
    Shapes:  rows (T, numbers) float32; pages (M, items) of the layer; tables (slots, pages) int32;
             positions, slots (T,): tokens of a sequence follow each other
    Source:  Yang, Kautz and Hatamizadeh, arXiv 2412.06464
    """
    key_dim, value_dim, layer = numbers.key_dim, numbers.value_dim, numbers.place
    num_keys, num_values = numbers.num_key_heads, numbers.num_value_heads
    keys_at, _, _, inputs_at = page_places(numbers)
    width = num_channels(numbers)
    for head in range(part, 2 * num_keys + num_values, num_parts):
        is_key = num_keys <= head < 2 * num_keys
        is_value = head >= 2 * num_keys
        size = value_dim if is_value else key_dim
        first = head * key_dim
        if is_value:
            first = 2 * num_keys * key_dim + (head - 2 * num_keys) * value_dim
        _write_inputs(pages, inputs_at, tables, positions, slots, width, first, size, rows)
        for t in range(rows.shape[0] - 1, -1, -1):
            own = rows[t, first : first + size]
            _convolve(
                vectors.conv_weight[layer], vectors.conv_bias[layer], pages, inputs_at, tables,
                positions, slots, width, first, t, rows, own,
            )  # fmt: skip
            silu_row(rows[:, first : first + size], t)
            if numbers.kind == DELTA and not is_value:
                _norm(rows[t], first, size, 1.0 if is_key else 1.0 / math.sqrt(size))
            page = tables[slots[t], positions[t] // STATE_POSITIONS]
            if is_key and page >= 0:
                row = (head - num_keys) * STATE_POSITIONS + positions[t] % STATE_POSITIONS
                place = keys_at + row * size
                copy_numbers(own, pages[page, place : place + size])


@njit(nogil=True, cache=True)
def gated_convolution(
    part, num_parts, numbers, vectors, pages, tables, positions, slots, rows, unwanted, heads
):  # fmt: skip
    """heads[t - unwanted] = c * conv(b * x), of tokens from `unwanted` on; pages get b * x of all.

    A row of a token is b | c | x, and b becomes b * x. Every num_parts-th head of all tokens.
    Shapes:  rows (T, 3 d), heads (T - unwanted, d) float32; the others as of `prepare_recurrence`
    Source:  Liquid AI, LFM2 technical report, arXiv 2511.23404
    """
    size, width = numbers.value_dim, num_channels(numbers)
    for head in range(part, numbers.num_value_heads, num_parts):
        first = head * size
        for t in range(rows.shape[0]):
            for i in range(first, first + size):
                rows[t, i] *= rows[t, 2 * width + i]
        _write_inputs(pages, 0, tables, positions, slots, width, first, size, rows)
        for t in range(unwanted, rows.shape[0]):
            own = heads[t - unwanted, first : first + size]
            _convolve(
                vectors.conv_weight[numbers.place], vectors.conv_bias[numbers.place], pages, 0,
                tables, positions, slots, width, first, t, rows, own,
            )  # fmt: skip
            for i in range(size):
                own[i] *= rows[t, width + first + i]
