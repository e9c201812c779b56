"""The FFN of many tokens (prefill): a matmul of the gates, then what fired neurons add.

For tokens for which few neurons fire, up and down are computed only for those; for the others they
are matmuls too. Each token's own neurons decide, so its result does not depend on its batch-mates.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from hotcold.actors.cpu.matmul import Matmul
from hotcold.numba_kernels.checks import DRELU
from hotcold.numba_kernels.decode.activations import Activation
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.selection import NO_WEIGHTS
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from hotcold.numba_kernels.ffn_arrays import FfnArrays, TransposedArrays
from hotcold.numba_kernels.formats import is_quantized
from hotcold.numba_kernels.ir.operands import PART_COLUMNS
from hotcold.numba_kernels.prompt.prompt_ffn import (
    activate_kernel,
    empty_fired,
    list_fired,
    num_blocks,
    num_parts,
    prompt_down_kernel,
    prompt_up_kernel,
    scale_kernel,
)

# Up to this share of a token's neurons that fire, one by one is faster than a matmul over all
# (docs/lab_log.md).
_FEW = 0.18


def prompt_ffn(
    matmul: Matmul,
    arrays: FfnArrays | TransposedArrays,
    layer: int,
    x: np.ndarray,
    function: Activation,
    out: np.ndarray,
    *,
    skip_silent: bool,
    counts: np.ndarray | None = None,
    await_up_down: Callable[[], None] = lambda: None,
    block_weights: np.ndarray = NO_WEIGHTS,
) -> None:
    """out = the partial FFN output of layer `layer`'s shard for all tokens.

    `skip_silent` allows to leave out neurons whose activation is zero; thresholds do not apply to
    so many tokens, which together want nearly all. Where `counts` is given, counts[n] += number of
    tokens for which neuron n's activation is not 0; with drelu also its up product. `await_up_down`
    returns once up and down rows are loaded. Gate rows always are, and are multiplied before that
    where gate and up need not be multiplied together. `block_weights` as in `Selection`: what they
    multiply with zero counts as not fired.
    Shapes:  x, out (T, d) float32; counts (N of the layer's shard,) int64; block_weights (T, B)
    """
    first, last = int(arrays.starts[layer, 0]), int(arrays.starts[layer, -1])

    def part(array: np.ndarray) -> np.ndarray:
        return array[first:last] if array.shape[0] else array

    up, weights = part(arrays.up), block_weights
    bounds = np.asarray(arrays.starts[layer] - first, np.int64)
    matmul.begin_layer()
    num_tokens = x.shape[0]
    h = matmul.scratch((num_tokens, last - first))
    factors = matmul.scratch((num_tokens, up.shape[0]))
    num_fired = np.empty(num_tokens, np.int64)
    gate_product = part(arrays.gate), part(arrays.gate_bias), h
    up_product = up, part(arrays.up_bias), factors
    # Which neurons fire is not waited for where all are computed.
    waits = skip_silent or counts is not None
    scales_at_once = up.shape[0] > 0 and (not waits or function.code == DRELU)
    scales_later = up.shape[0] > 0 and not scales_at_once
    at_once = factors if scales_at_once else factors[:, :0]
    activate = partial(activate_kernel, function, weights, bounds, at_once, h, num_fired)

    def add_bias(begin: int, end: int) -> None:
        biases = arrays.down_bias[layer]
        if not weights.size:
            out[begin:end] += biases.sum(axis=0)
        for block in range(weights.shape[1]):
            out[begin:end] += weights[begin:end, block, None] * biases[block]

    with matmul.at_once():
        if scales_at_once or not waits:
            await_up_down()
        matmul.linears(x, [gate_product, up_product] if scales_at_once else [gate_product])
        matmul.then_rows(num_tokens, activate)
        if waits:
            matmul.run()
            if not scales_at_once:
                await_up_down()
        if counts is not None:
            counts += np.count_nonzero(h, axis=0)
        own_up = up if scales_later else up[:0]
        if isinstance(arrays, TransposedArrays):
            if scales_later:
                _scale_all(matmul, function, own_up, part(arrays.up_bias), x, h, factors)
            _add_blocks(matmul, arrays, layer, bounds, h, out)
        else:
            later = _UpAndDown(function, own_up, part(arrays.up_bias), part(arrays.down), factors)
            if skip_silent:
                _add_by_token(matmul, later, num_fired <= _FEW * h.shape[1], x, h, out)
            else:
                _add_all(matmul, later, x, h, out)
        if arrays.down_bias.shape[2]:
            matmul.then_rows(num_tokens, add_bias)


def _add_blocks(
    matmul: Matmul,
    arrays: TransposedArrays,
    layer: int,
    bounds: np.ndarray,
    h: np.ndarray,
    out: np.ndarray,
) -> None:
    """out = the sum over blocks, in order, of their transposed down rows . h, once it is run."""
    no_bias = np.empty(0, np.float32)
    blocks = [block for block in range(len(bounds) - 1) if bounds[block] < bounds[block + 1]]
    if len(blocks) == 1:
        matmul.linear(h, arrays.down.matrix(layer, blocks[0]), no_bias, out)
        return

    def add(product: np.ndarray, begin: int, end: int) -> None:
        out[begin:end] += product[begin:end]

    def clear(begin: int, end: int) -> None:
        out[begin:end] = 0

    matmul.then_rows(len(out), clear)

    def copy(own: np.ndarray, first: int, begin: int, end: int) -> None:
        own[begin:end] = h[begin:end, first : first + own.shape[1]]

    for block in blocks:
        first, last = int(bounds[block]), int(bounds[block + 1])
        own = matmul.scratch((len(h), last - first))
        matmul.then_rows(len(h), partial(copy, own, first))
        product = matmul.linear(own, arrays.down.matrix(layer, block), no_bias)
        matmul.then_rows(len(out), partial(add, product))


def compile_prompt_ffn(arrays: FfnArrays | TransposedArrays, function: Activation) -> None:
    """Compile what `prompt_ffn` calls beside the matmul, so that no prompt waits for it."""
    nothing, none = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    activate_kernel(function, NO_WEIGHTS, none, nothing, nothing, none, 0, 0)
    scale_kernel(function, nothing, nothing, 0, 0)
    if isinstance(arrays, FfnArrays):
        fired = empty_fired(0, 0)
        list_fired(nothing, 0, 0, fired)
        vectors = QuantizedVectors(*(array[0] for array in empty_vectors(1, 0, 0)))
        up_input = vectors if is_quantized(arrays.up.dtype) else nothing
        prompt_up_kernel(arrays.up, arrays.up_bias, up_input, 0, 0, fired)
        prompt_down_kernel(arrays.down, fired, 0, 0, np.empty((0, 0, 0), np.float32), nothing)


class _UpAndDown(NamedTuple):
    """A shard's rows; `up` has none where `h` is multiplied with it already.

    factors (T, N): space for products with up
    """

    function: Activation
    up: np.ndarray
    up_bias: np.ndarray
    down: np.ndarray
    factors: np.ndarray


def _add_by_token(
    matmul: Matmul, rows: _UpAndDown, few: np.ndarray, x: np.ndarray, h: np.ndarray, out: np.ndarray
) -> None:
    """`_add_fired` for tokens of which `few` (T,) bool is set, `_add_all` for the others."""
    if few.all() or not few.any():
        (_add_fired if few.all() else _add_all)(matmul, rows, x, h, out)
        return

    def copy(own_x: np.ndarray, own_h: np.ndarray, ids: np.ndarray, first: int, last: int) -> None:
        own_x[first:last], own_h[first:last] = x[ids[first:last]], h[ids[first:last]]

    def copy_back(own: np.ndarray, ids: np.ndarray, first: int, last: int) -> None:
        out[ids[first:last]] = own[first:last]

    for add, ids in ((_add_fired, np.flatnonzero(few)), (_add_all, np.flatnonzero(~few))):
        own_x, own_h, own_out = (
            matmul.scratch((ids.size, array.shape[1])) for array in (x, h, out)
        )
        matmul.then_rows(ids.size, partial(copy, own_x, own_h, ids))
        add(matmul, rows, own_x, own_h, own_out)
        matmul.then_rows(ids.size, partial(copy_back, own_out, ids))


def _add_all(
    matmul: Matmul, rows: _UpAndDown, x: np.ndarray, h: np.ndarray, out: np.ndarray
) -> None:
    """out = sum over all neurons, once it has been run."""
    if rows.up.shape[0]:
        factors = rows.factors[: h.shape[0]]
        _scale_all(matmul, rows.function, rows.up, rows.up_bias, x, h, factors)
    matmul.combine(h, rows.down, out)


def _scale_all(
    matmul: Matmul,
    function: Activation,
    up: np.ndarray,
    up_bias: np.ndarray,
    x: np.ndarray,
    h: np.ndarray,
    factors: np.ndarray,
) -> None:
    """h *= x @ up.T, which `factors` is space for, once it has been run."""
    matmul.linears(x, [(up, up_bias, factors)])
    matmul.then_rows(h.shape[0], partial(scale_kernel, function, factors, h))


def _add_fired(
    matmul: Matmul, rows: _UpAndDown, x: np.ndarray, h: np.ndarray, out: np.ndarray
) -> None:
    """out = sum over the neurons that fire for each token, once it has been run."""
    up = rows.up
    fired = empty_fired(h.shape[0], h.shape[1], matmul.scratch)
    vectors = matmul.vectors(x, up) if up.shape[0] else x
    sums = matmul.scratch((num_parts(out.shape[1]), out.shape[0], PART_COLUMNS))

    def scale(thread: int) -> None:
        blocks = split_range(num_blocks(h.shape[1]), thread, matmul.num_threads, 1)
        list_fired(h, *blocks, fired)
        if up.shape[0]:
            prompt_up_kernel(up, rows.up_bias, vectors, *blocks, fired)

    def add(thread: int) -> None:
        first, last = split_range(num_parts(out.shape[1]), thread, matmul.num_threads, 1)
        out[:, first * PART_COLUMNS : last * PART_COLUMNS] = 0
        prompt_down_kernel(rows.down, fired, first, last, sums, out)

    matmul.then(scale)
    matmul.then(add)
