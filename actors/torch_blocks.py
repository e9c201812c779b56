"""Matrix products of prefill by torch, over weights that stay bits of their checkpoint's format."""

import numpy as np
import torch

_BLOCK_BYTES = 4 << 20  # of weights widened at a time: what stays in a core's second-level cache


def as_tensor(bits: np.ndarray) -> torch.Tensor:
    """A tensor over the same memory: uint16 is float16, int16 is bfloat16."""
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.float16))
    if bits.dtype == np.int16:
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(bits)


def linear(x: torch.Tensor, weights: np.ndarray, bias: np.ndarray) -> torch.Tensor:
    """x @ weights.T + bias in float32; weights (N, d) bits, bias (N,) or (0,) float32."""
    matrix = as_tensor(weights)
    if matrix.dtype == torch.float32:
        out = x @ matrix.T
    else:
        out = (x.to(torch.bfloat16) @ matrix.to(torch.bfloat16).T).to(torch.float32)
    return out + torch.from_numpy(bias) if bias.size else out
