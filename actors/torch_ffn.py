"""The FFN of many tokens (prefill): dense products, for few neurons stay silent throughout."""

import numpy as np
import torch

from actors.matrix_products import MatrixProducts
from numba_kernels.serve_ffn import FfnArrays

_FUNCTIONS = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}


def dense_ffn(
    products: MatrixProducts,
    arrays: FfnArrays,
    layer: int,
    x: np.ndarray,
    activation_fn: str,
    out: np.ndarray,
    counts: np.ndarray | None = None,
) -> None:
    """out = the partial FFN output of layer `layer`'s shard for all tokens.

    Where `counts` is given, counts[n] += number of tokens for which neuron n's activation is not 0.
    Shapes:  x, out (T, d) float32; counts (N of the layer's shard,) int64
    """
    first, last = int(arrays.offsets[layer]), int(arrays.offsets[layer + 1])

    def part(array: np.ndarray) -> np.ndarray:
        return array[first:last] if array.shape[0] else array

    tokens = torch.from_numpy(x)
    h = products.linear(tokens, part(arrays.gate), part(arrays.gate_bias))
    h = _FUNCTIONS[activation_fn](h)
    if counts is not None:
        torch.from_numpy(counts).add_((h != 0).sum(dim=0))
    if arrays.up.shape[0]:
        h *= products.linear(tokens, part(arrays.up), part(arrays.up_bias))
    result = products.combine(h, part(arrays.down))
    if arrays.down_bias.shape[1]:
        result += torch.from_numpy(arrays.down_bias[layer])
    torch.from_numpy(out).copy_(result)
