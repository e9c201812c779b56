"""The FFN of many tokens (prefill): gates by matrix products, then what the fired neurons add.

Where few neurons fire, up and down are computed for those tokens alone for which they do; else they
are matrix products too.
"""

import numpy as np
import torch

from actors.cpu.matrix_products import MatrixProducts
from model.torch_activations import activated
from numba_kernels.checks import ACTIVATION_NAMES, DRELU
from numba_kernels.decode.activations import Activation
from numba_kernels.decode.rows import split_range
from numba_kernels.ir.operands import PART_COLUMNS
from numba_kernels.prompt.prompt_ffn import (
    empty_fired,
    list_fired,
    num_blocks,
    num_parts,
    prompt_down_kernel,
    prompt_up_kernel,
)
from numba_kernels.serve.layer_ffn import FfnArrays

# Up to this share of neurons that fire, one by one is faster than products over all
# (docs/lab_log.md).
_FEW = 0.18


def prompt_ffn(
    products: MatrixProducts,
    arrays: FfnArrays,
    layer: int,
    x: np.ndarray,
    function: Activation,
    out: np.ndarray,
    *,
    skip_silent: bool,
    counts: np.ndarray | None = None,
) -> None:
    """out = the partial FFN output of layer `layer`'s shard for all tokens.

    `skip_silent` allows to leave out neurons whose activation is zero; thresholds do not apply to
    so many tokens, which together want nearly all. Where `counts` is given, counts[n] += number of
    tokens for which neuron n's activation is not 0; with drelu also its up product.
    Shapes:  x, out (T, d) float32; counts (N of the layer's shard,) int64
    """
    first, last = int(arrays.offsets[layer]), int(arrays.offsets[layer + 1])

    def part(array: np.ndarray) -> np.ndarray:
        return array[first:last] if array.shape[0] else array

    tokens = torch.from_numpy(x)
    h = products.linear(tokens, part(arrays.gate), part(arrays.gate_bias))
    h = activated(ACTIVATION_NAMES[function.code], h, float(function.threshold))
    up, up_bias, down = part(arrays.up), part(arrays.up_bias), part(arrays.down)
    if function.code == DRELU:
        h *= torch.relu(products.linear(tokens, up, up_bias))
        up, up_bias = up[:0], up_bias[:0]
    if counts is not None:
        torch.from_numpy(counts).add_((h != 0).sum(dim=0))
    if skip_silent and int(torch.count_nonzero(h)) <= _FEW * h.numel():
        _add_fired(products, up, up_bias, down, x, h.numpy(), out)
    else:
        if up.shape[0]:
            h *= products.linear(tokens, up, up_bias)
        torch.from_numpy(out).copy_(products.combine(h, down))
    if arrays.down_bias.shape[1]:
        out += arrays.down_bias[layer]


def _add_fired(
    products: MatrixProducts,
    up: np.ndarray,
    up_bias: np.ndarray,
    down: np.ndarray,
    x: np.ndarray,
    h: np.ndarray,
    out: np.ndarray,
) -> None:
    """out = sum over the neurons that fire for each token; h (T, N) is overwritten."""
    fired = empty_fired(*h.shape)
    vectors = products.operands(x, up)
    sums = np.empty((num_parts(out.shape[1]), out.shape[0], PART_COLUMNS), np.float32)
    out[:] = 0

    def scale(thread: int) -> None:
        blocks = split_range(num_blocks(h.shape[1]), thread, products.num_threads, 1)
        list_fired(h, *blocks, fired)
        if up.shape[0]:
            prompt_up_kernel(up, up_bias, vectors, *blocks, fired)

    def add(thread: int) -> None:
        parts = split_range(num_parts(out.shape[1]), thread, products.num_threads, 1)
        prompt_down_kernel(down, fired, *parts, sums, out)

    products.each_thread(scale)
    products.each_thread(add)
