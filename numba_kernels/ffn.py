"""The feed-forward network, neuron by neuron: a neuron whose gate does not fire costs its gate row.

Three-matrix FFN (ReGLU, SwiGLU):  y = sum over n of fn(gate[n] . x) * (up[n] . x) * down[n]
Two-matrix FFN (OPT, Falcon):      y = sum over n of fn(gate[n] . x) * down[n]
In the two-matrix FFN the first matrix is called gate, for it decides whether the neuron fires; `up`
then has no rows.
"""

import math

import numpy as np
from numba import njit

from numba_kernels.checks import (
    activation_code,
    float_array,
    optional_floats,
    require,
    row_ids,
    weight_rows,
)
from numba_kernels.formats import row_width
from numba_kernels.rows import add_in_order, one_row_kernel, rows_ahead, tile_kernel, tile_rows
from numba_kernels.vector_ir import (
    add_row,
    add_scaled1,
    add_scaled4,
    add_scaled4_ahead,
    dot_ahead,
    dot_tokens2,
    dot_tokens4,
    prefetch_row,
)
from numba_kernels.vectors import empty_vectors, prepared

NO_IDS = np.empty(0, np.int32)
NO_TOKENS = np.empty(0, np.uint32)
ALL_TOKENS = np.uint32(0xFFFFFFFF)
SPARE = 24  # places of `gates` beside those of candidates: a panel's last rows, products of up
_FEW_TOKENS = 8  # whose outputs stay in the cache while neurons pass by
_BLOCK = 64  # neurons whose down rows stay in the cache while all tokens take theirs


@njit(nogil=True, cache=True)
def activate(code, value):
    """relu, silu or gelu (exact, by erf) of one number; a NaN stays NaN."""
    if code == 0:
        return np.float32(0) if value <= 0 else value
    if code == 1:
        return np.float32(value / (1.0 + math.exp(-value)))
    return np.float32(0.5 * value * (1.0 + math.erf(value * 0.7071067811865476)))


@njit(nogil=True, cache=True)
def _keep(code, keep_all, wanted, shift, products, target):
    """target[t] = fn(products[t] + shift), zero for tokens whose bit in `wanted` is not set.

    Returns a bit for each token that the neuron fires for.
    """
    fires = np.uint32(0)
    for t in range(target.shape[0]):
        bit = np.uint32(1) << np.uint32(t)
        value = np.float32(0)
        if wanted & bit:
            value = activate(code, products[t] + shift)
            if value != 0 or keep_all:
                fires |= bit
        target[t] = value
    return fires


@njit(nogil=True, cache=True)
def _gate_of_one(
    gate, bias, ids, tokens, x, code, keep_all, first, last, fired_ids, fired_tokens, h
):
    """`gate_kernel` for one token; h (>= last - first,) is `gates`.

    All in one loop without calls that take arrays: those cost as much as reading a short row.
    """
    num_fired, listed, distance = 0, ids.shape[0] > 0, rows_ahead(gate)
    for candidate in range(first, last):
        n, following = candidate, min(candidate + distance, last - 1)
        if listed:
            n, following = ids[candidate], ids[following]
            if candidate + distance + 2 < last:
                prefetch_row(gate, ids[candidate + distance + 2])
        value = dot_ahead(gate, n, following, x, 0)
        if bias.shape[0]:
            value += bias[n]
        value = activate(code, value)
        if tokens.shape[0] and not tokens[candidate] & np.uint32(1):
            value = np.float32(0)
        if value != 0 or keep_all:
            fired_ids[num_fired] = n
            fired_tokens[num_fired] = np.uint32(1)
            h[num_fired] = value
            num_fired += 1
    return num_fired


@njit(nogil=True, cache=True, inline="always")  # a call costs a quarter of a row
def _row_for_some(weights, row, following, x, wanted, out, column):
    """out[t, column] = weights[row] . x[t] for the tokens whose bit in `wanted` is set."""
    count, t0, t1, t2 = 0, 0, 0, 0
    for t in range(out.shape[0]):
        if not (wanted >> np.uint32(t)) & np.uint32(1):
            continue
        if count == 3:
            sums = dot_tokens4(weights, row, following, x, t0, t1, t2, t)
            out[t0, column], out[t1, column] = sums[0], sums[1]
            out[t2, column], out[t, column] = sums[2], sums[3]
            count = 0
            continue
        t0, t1, t2 = (t, t1, t2) if count == 0 else (t0, t, t2) if count == 1 else (t0, t1, t)
        count += 1
    if count >= 2:
        pair = dot_tokens2(weights, row, following, x, t0, t1)
        out[t0, column], out[t1, column] = pair[0], pair[1]
    if count % 2:
        t = t0 if count == 1 else t2
        out[t, column] = dot_ahead(weights, row, following, x, t)


@njit(nogil=True, cache=True)
def _candidate_products(gate, ids, tokens, x, at, last, distance, side_by_side, out, column):
    """Products of several tokens with candidate `at` and perhaps those after it.

    They stand in out (T, N) from `column` on. Returns how many: one, or a tile of rows where all
    tokens want all of them.
    """
    if ids.shape[0]:
        following = ids[min(at + distance, last - 1)]
        wanted = tokens[at] if tokens.shape[0] else ALL_TOKENS
        _row_for_some(gate, ids[at], following, x, wanted, out, column)
        return 1
    if side_by_side == 1 or at + side_by_side > last:
        one_row_kernel(gate, at, min(at + distance, last - 1), x, out, column)
        return 1
    tile_kernel(gate, at, min(at + side_by_side, last - side_by_side), x, out, column)
    return side_by_side


@njit(nogil=True, cache=True)
def _gates_of_some(
    gate, bias, ids, tokens, x, code, keep_all, first, last, fired_ids, fired_tokens, gates
):
    """`gate_kernel` for several tokens; gates (N, T) has a row for each neuron."""
    num_fired, candidate, distance = 0, first, rows_ahead(gate)
    side_by_side, by_token = tile_rows(gate, gates.shape[1]), gates.T
    while candidate < last:
        column = num_fired
        count = _candidate_products(
            gate, ids, tokens, x, candidate, last, distance, side_by_side, by_token, column
        )
        for k in range(count):
            n = ids[candidate + k] if ids.shape[0] else candidate + k
            wanted = tokens[candidate + k] if tokens.shape[0] else ALL_TOKENS
            shift = bias[n] if bias.shape[0] else np.float32(0)
            fires = _keep(code, keep_all, wanted, shift, gates[column + k], gates[num_fired])
            if fires or keep_all:
                fired_ids[num_fired] = n
                fired_tokens[num_fired] = fires
                num_fired += 1
        candidate += count
    return num_fired


@njit(nogil=True, cache=True)
def gate_kernel(
    gate, bias, ids, tokens, x, code, keep_all, first, last, fired_ids, fired_tokens, gates,
    num_tokens,
):  # fmt: skip
    """Gate products of candidates first..last-1, and which of them fired; checks nothing.

    The candidates are rows ids[first:last], or rows first..last-1 where `ids` is empty; bit t of
    tokens[i] says whether ids[i] is wanted for token t (all are where `tokens` is empty). `x` is
    what `prepared` gave for `num_tokens` tokens.
    fired_ids (>= last - first,) int32, fired_tokens (same) uint32 and gates (>= T * (last - first +
    SPARE),) float32 receive, for each neuron that fired, its row, a bit for each token that it
    fired for, and T times fn(gate . x + bias), zero for others. Returns their number.
    """
    if num_tokens == 1:
        return _gate_of_one(
            gate, bias, ids, tokens, x, code, keep_all, first, last, fired_ids, fired_tokens, gates
        )
    return _gates_of_some(
        gate, bias, ids, tokens, x, code, keep_all, first, last, fired_ids, fired_tokens,
        _by_neuron(gates, num_tokens),
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _by_neuron(gates, num_tokens):
    """The flat `gates` as (N, T)."""
    height = gates.shape[0] // num_tokens
    return gates[: height * num_tokens].reshape(height, num_tokens)


@njit(nogil=True, cache=True)
def _scale_one(up, bias, fired_ids, num_fired, x, h):
    """h[i] *= up[n] . x[0] + bias[n], n = fired_ids[i]."""
    distance = rows_ahead(up)
    for i in range(num_fired):
        if i + distance + 2 < num_fired:
            prefetch_row(up, fired_ids[i + distance + 2])
        n, following = fired_ids[i], fired_ids[min(i + distance, num_fired - 1)]
        factor = dot_ahead(up, n, following, x, 0)
        if bias.shape[0]:
            factor += bias[n]
        h[i] *= factor


@njit(nogil=True, cache=True)
def _scale_some(up, bias, fired_ids, fired_tokens, num_fired, gates, x):
    """gates[i, t] *= up[n] . x[t] + bias[n], n = fired_ids[i], for the tokens that i fired for."""
    spare, distance, by_token = gates.shape[0] - SPARE, rows_ahead(up), gates.T
    products = gates[spare]
    for i in range(num_fired):
        n, following = fired_ids[i], fired_ids[min(i + distance, num_fired - 1)]
        if i + distance + 2 < num_fired:
            prefetch_row(up, fired_ids[i + distance + 2])
        _row_for_some(up, n, following, x, fired_tokens[i], by_token, spare)
        shift = bias[n] if bias.shape[0] else np.float32(0)
        for t in range(gates.shape[1]):
            if (fired_tokens[i] >> np.uint32(t)) & np.uint32(1):
                gates[i, t] *= products[t] + shift


@njit(nogil=True, cache=True)
def _add_one(down, ids, num_fired, h, out):
    """out += h[i] * down[ids[i]] for all i; `out` is read and written once for four rows.

    The four rows that come next are prefetched in step, those after them by their first lines.
    """
    i, last = 0, num_fired - 1
    while i + 4 <= num_fired:
        for ahead in range(i + 8, min(i + 12, num_fired)):
            prefetch_row(down, ids[ahead])
        a0, a1, a2, a3 = min(i + 4, last), min(i + 5, last), min(i + 6, last), min(i + 7, last)
        add_scaled4_ahead(
            out, down, ids[i], ids[i + 1], ids[i + 2], ids[i + 3],
            h[i], h[i + 1], h[i + 2], h[i + 3], ids[a0], ids[a1], ids[a2], ids[a3],
        )  # fmt: skip
        i += 4
    while i < num_fired:
        add_scaled1(out, down, ids[i], h[i])
        i += 1


@njit(nogil=True, cache=True)
def _add_few(down, ids, fired_tokens, num_fired, gates, out):
    """out[t] += gates[i, t] * down[ids[i]], neuron by neuron: each row is read once."""
    distance = rows_ahead(down)
    for i in range(num_fired):
        following = ids[min(i + distance, num_fired - 1)]
        if i + distance + 2 < num_fired:
            prefetch_row(down, ids[i + distance + 2])
        for t in range(out.shape[0]):
            if (fired_tokens[i] >> np.uint32(t)) & np.uint32(1):
                add_row(out, t, down, ids[i], gates[i, t], following)


@njit(nogil=True, cache=True)
def _add_some(down, ids, fired_tokens, first, last, t, gates, out):
    """out += gates[i, t] * down[ids[i]] for i in first..last-1 that fired for token t."""
    count, i0, i1, i2 = 0, 0, 0, 0
    for i in range(first, last):
        if not (fired_tokens[i] >> np.uint32(t)) & np.uint32(1):
            continue
        if count == 3:
            add_scaled4(
                out, down, ids[i0], ids[i1], ids[i2], ids[i],
                gates[i0, t], gates[i1, t], gates[i2, t], gates[i, t],
            )  # fmt: skip
            count = 0
            continue
        i0, i1, i2 = (i, i1, i2) if count == 0 else (i0, i, i2) if count == 1 else (i0, i1, i)
        count += 1
    for k in range(count):
        i = i0 if k == 0 else i1 if k == 1 else i2
        add_scaled1(out, down, ids[i], gates[i, t])


@njit(nogil=True, cache=True)
def up_down_kernel(up, bias, down, fired_ids, fired_tokens, num_fired, gates, x, out):
    """out[t] += gate * (up[n] . x[t] + bias[n]) * down[n], n = fired_ids[i]; checks nothing.

    Where `up` has no rows, that factor is one. `gates` is as `gate_kernel` left it, and is
    overwritten. `out` (T, d) is in the order of `add_scaled4`, each token's neurons are added one
    after the other: of few tokens neuron by neuron, of more token by token within a block of
    neurons that stays in the cache.
    """
    num_tokens = out.shape[0]
    if num_tokens == 1:
        if up.shape[0]:
            _scale_one(up, bias, fired_ids, num_fired, x, gates)
        _add_one(down, fired_ids, num_fired, gates, out[0])
        return
    by_neuron = _by_neuron(gates, num_tokens)
    if up.shape[0]:
        _scale_some(up, bias, fired_ids, fired_tokens, num_fired, by_neuron, x)
    if num_tokens <= _FEW_TOKENS:
        _add_few(down, fired_ids, fired_tokens, num_fired, by_neuron, out)
        return
    for first in range(0, num_fired, _BLOCK):
        last = min(first + _BLOCK, num_fired)
        for i in range(first, last):
            prefetch_row(down, fired_ids[i])
        for t in range(num_tokens):
            _add_some(down, fired_ids, fired_tokens, first, last, t, by_neuron, out[t])


@njit(nogil=True, cache=True)
def _sparse_ffn(gate, biases, up, down, ids, tokens, x, code, keep_all, room, length, out):
    """`sparse_ffn` with checked arguments; out (T, d) is zero. Returns the fired ids."""
    num_tokens = x.shape[0]
    fired_ids = np.empty(length, np.int32)
    fired_tokens = np.empty(length, np.uint32)
    gates = np.empty(num_tokens * (length + SPARE), np.float32)
    ready = prepared(gate, x, room, 0)
    num_fired = gate_kernel(
        gate, biases[0], ids, tokens, ready, code, keep_all, 0, length, fired_ids, fired_tokens,
        gates, num_tokens,
    )  # fmt: skip
    sums = np.zeros_like(out)
    up_down_kernel(up, biases[1], down, fired_ids, fired_tokens, num_fired, gates, ready, sums)
    for t in range(num_tokens):
        add_in_order(down, sums[t], out[t], 0, out.shape[1])
    return fired_ids[:num_fired]


def sparse_ffn(
    gate: np.ndarray,
    up: np.ndarray | None,
    down: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    *,
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    activation_fn: str = "relu",
    skip_silent: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """The FFN's output over all neurons, or over those in `ids`, and the ids that fired.

    With `tokens`, neuron ids[i] is silent for each token t whose bit is not set in tokens[i].

    out[t] = sum over n of fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n]) * down[n]
    Shapes:  gate, up, down (N, d) or (N, row bytes), down neuron-major; x (T, d), T <= 32;
             ids (A,); out (T, d)
    Dtypes:  weights float32, uint16 (float16 bits), int16 (bfloat16 bits), Q8 or Q4, all three
             alike; ids int32, unique; tokens (A,) uint32; biases, x, out float32
    Units:   reads d weights for each candidate, 2 d more (one matrix up, one down) if it fired
    Errors:  ValueError on any mismatch
    Source:  PowerInfer section 5.4; the early stop at a silent gate: PowerInfer-2 section 4.4
    """
    gate = weight_rows("gate", gate)
    num_neurons, width = gate.shape[0], row_width(gate.dtype, gate.shape[1])
    up = gate[:0] if up is None else weight_rows("up", up, width)
    down = weight_rows("down", down, width)
    require(up.shape[0] in (0, num_neurons), f"up must have {num_neurons} rows")
    require(down.shape[0] == num_neurons, f"down must have {num_neurons} rows")
    require(gate.dtype == up.dtype == down.dtype, "gate, up and down must have one dtype")
    x = float_array("x", x, (x.shape[0] if x.ndim else 0, width))
    require(x.shape[0] <= 32, f"x has {x.shape[0]} rows; at most 32 tokens are computed at once")
    biases = (
        optional_floats("gate_bias", gate_bias, num_neurons),
        optional_floats("up_bias", up_bias, num_neurons if up.shape[0] else 0),
    )
    code = activation_code(activation_fn)
    out = np.zeros((x.shape[0], width), np.float32)
    candidates = NO_IDS if ids is None else row_ids("ids", ids, num_neurons)
    if x.shape[0] == 0 or (ids is not None and not ids.size):
        return out, NO_IDS
    wanted = NO_TOKENS if tokens is None else np.ascontiguousarray(tokens)
    require(wanted.dtype == np.uint32, f"tokens must be uint32, not {wanted.dtype}")
    if tokens is not None:
        require(ids is not None and wanted.shape == candidates.shape, "tokens go with ids")
    length = num_neurons if ids is None else candidates.size
    fired_ids = _sparse_ffn(
        gate, biases, up, down, candidates, wanted, x, code, not skip_silent,
        empty_vectors(1, *x.shape), length, out,
    )  # fmt: skip
    return out, fired_ids
