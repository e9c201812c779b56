"""The FFN of many tokens (prefill): dense matrix products, for few neurons stay silent throughout."""

import numpy as np
import torch

from actors.torch_blocks import as_tensor, linear
from numba_kernels.serve_ffn import FfnArrays

_FUNCTIONS = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}


def dense_ffn(
    arrays: FfnArrays,
    layer: int,
    x: np.ndarray,
    activation_fn: str,
    num_threads: int,
    out: np.ndarray,
) -> None:
    """out = the partial FFN output of layer `layer`'s shard for all tokens.

    Shapes:  x, out (T, d) float32
    """
    torch.set_num_threads(num_threads)
    first, last = int(arrays.offsets[layer]), int(arrays.offsets[layer + 1])

    def part(array: np.ndarray) -> np.ndarray:
        return array[first:last] if array.shape[0] else array

    tokens = torch.from_numpy(x)
    h = _FUNCTIONS[activation_fn](linear(tokens, part(arrays.gate), part(arrays.gate_bias)))
    if arrays.up.shape[0]:
        h *= linear(tokens, part(arrays.up), part(arrays.up_bias))
    down = as_tensor(part(arrays.down))
    if down.dtype == torch.float32:
        result = h @ down
    else:
        result = (h.to(torch.bfloat16) @ down.to(torch.bfloat16)).to(torch.float32)
    if arrays.down_bias.shape[1]:
        result += torch.from_numpy(arrays.down_bias[layer])
    torch.from_numpy(out).copy_(result)
