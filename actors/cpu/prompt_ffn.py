"""The FFN of many tokens (prefill): a matmul of the gates, then what fired neurons add.

Where few neurons fire, up and down are computed only for the tokens for which they fire; else they
are matmuls too.
"""

from collections.abc import Callable

import numpy as np
import torch

from hotcold.actors.cpu.matmul import Matmul
from hotcold.model.config.activations import activated, activated_up
from hotcold.numba_kernels.checks import ACTIVATION_NAMES, DRELU
from hotcold.numba_kernels.decode.activations import Activation
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.selection import NO_WEIGHTS
from hotcold.numba_kernels.ffn_arrays import FfnArrays, TransposedArrays
from hotcold.numba_kernels.ir.operands import PART_COLUMNS
from hotcold.numba_kernels.prompt.prompt_ffn import (
    empty_fired,
    list_fired,
    num_blocks,
    num_parts,
    prompt_down_kernel,
    prompt_up_kernel,
)

# Up to this share of neurons that fire, one by one is faster than a matmul over all
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

    up, weights, sizes = part(arrays.up), block_weights, np.diff(arrays.starts[layer])
    matmul.begin_layer()
    num_tokens = x.shape[0]
    h = matmul.scratch((num_tokens, last - first))
    factors = matmul.scratch((num_tokens, up.shape[0]))
    gate_product = part(arrays.gate), part(arrays.gate_bias), h
    up_product = up, part(arrays.up_bias), factors
    # Which neurons fire is not waited for where all are computed.
    waits = skip_silent or counts is not None
    scales_at_once = up.shape[0] > 0 and (not waits or function.code == DRELU)
    scales_later = up.shape[0] > 0 and not scales_at_once
    name, threshold = ACTIVATION_NAMES[function.code], float(function.threshold)

    def scale(begin: int, end: int) -> None:
        h[begin:end] *= activated_up(name, torch.from_numpy(factors[begin:end])).numpy()

    def activate(begin: int, end: int) -> None:
        h[begin:end] = activated(name, torch.from_numpy(h[begin:end]), threshold)
        if weights.size:
            h[begin:end] *= np.repeat(weights[begin:end], sizes, axis=1)
        if scales_at_once:
            scale(begin, end)

    def add_bias(begin: int, end: int) -> None:
        biases = arrays.down_bias[layer]
        out[begin:end] += weights[begin:end] @ biases if weights.size else biases.sum(axis=0)

    with matmul.at_once():
        if scales_at_once or not waits:
            await_up_down()
        matmul.linears(x, [gate_product, up_product] if scales_at_once else [gate_product])
        matmul.then_rows(len(x), activate)
        if waits:
            matmul.run()
            if not scales_at_once:
                await_up_down()
        if counts is not None:
            counts += np.count_nonzero(h, axis=0)
        by_neurons = isinstance(arrays, FfnArrays)
        few = by_neurons and skip_silent and np.count_nonzero(h) <= _FEW * h.size
        if scales_later and not few:
            matmul.linears(x, [up_product])
            matmul.then_rows(len(x), scale)
        if isinstance(arrays, TransposedArrays):
            matmul.layer_linear(h, arrays.down, layer, out[:0, 0], out)
        elif few:
            own_up, own_down = up if scales_later else up[:0], part(arrays.down)
            _add_fired(matmul, own_up, part(arrays.up_bias), own_down, x, h, out)
        else:
            matmul.combine(h, part(arrays.down), out)
        if arrays.down_bias.shape[2]:
            matmul.then_rows(len(x), add_bias)


def _add_fired(
    matmul: Matmul,
    up: np.ndarray,
    up_bias: np.ndarray,
    down: np.ndarray,
    x: np.ndarray,
    h: np.ndarray,
    out: np.ndarray,
) -> None:
    """out = sum over the neurons that fire for each token, once it has been run."""
    fired = empty_fired(h.shape[0], h.shape[1], matmul.scratch)
    vectors = matmul.vectors(x, up) if up.shape[0] else x
    sums = matmul.scratch((num_parts(out.shape[1]), out.shape[0], PART_COLUMNS))
    out[:] = 0

    def scale(thread: int) -> None:
        blocks = split_range(num_blocks(h.shape[1]), thread, matmul.num_threads, 1)
        list_fired(h, *blocks, fired)
        if up.shape[0]:
            prompt_up_kernel(up, up_bias, vectors, *blocks, fired)

    def add(thread: int) -> None:
        parts = split_range(num_parts(out.shape[1]), thread, matmul.num_threads, 1)
        prompt_down_kernel(down, fired, *parts, sums, out)

    matmul.then(scale)
    matmul.then(add)
