"""Activation functions of an FFN, by torch, for numbers of any precision."""

from __future__ import annotations

import torch
from torch.nn import functional


def activated(name: str, x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """Return fn(x), `name` being one of `ActivationFn`; fatrelu has a threshold.

    drelu is relu here: that of up's product is whoever's who multiplies the two.
    """
    if name in ("relu", "drelu"):
        return functional.relu(x)
    if name == "relu2":
        return functional.relu(x).square()
    if name == "fatrelu":
        return functional.threshold(x, threshold, 0.0)
    if name == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def activated_up(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return what up's product becomes before it meets the gate's."""
    return functional.relu(x) if name == "drelu" else x
