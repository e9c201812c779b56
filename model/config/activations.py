"""Activation functions of an FFN: their names, how config.json spells them, what they compute.

Kernels compute them too: `numba_kernels.decode.activations`, and `cuda_kernels` for a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import shown

if TYPE_CHECKING:  # torch takes a second to import, and reading a config does without
    import torch

ActivationFn = Literal[
    "relu", "silu", "gelu", "gelu_tanh", "relu2", "fatrelu", "drelu", "clamped_silu"
]
# Exactly zero for some inputs: a neuron fires where it is not.
SPARSE_ACTIVATION_FNS: tuple[ActivationFn, ...] = ("relu", "relu2", "fatrelu", "drelu")
CLAMPED_SLOPE = 1.702  # of clamped_silu
# By config.json's names. Only some families have fatrelu and its threshold: see `activation`.
ACTIVATION_FNS: dict[str, ActivationFn] = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def activation(reader: ConfigReader, key: str, default: str) -> dict[str, Any]:
    """Return activation_fn, and for fatrelu activation_threshold, which is hidden_act_param.

    Errors:  ConfigError for an unknown function
    """
    if reader.text(key, default) != "fatrelu":
        return {"activation_fn": activation_fn(reader, key, default)}
    if not reader.has("hidden_act_param"):
        raise reader.fail(key, "is fatrelu, but its threshold hidden_act_param is missing")
    threshold = reader.number("hidden_act_param", low=0.0, high=1e6)
    return {"activation_fn": "fatrelu", "activation_threshold": threshold}


def activation_fn(reader: ConfigReader, key: str, default: str) -> ActivationFn:
    """Return the FFN's function, which `key` names. Errors: ConfigError for an unknown one."""
    name = reader.text(key, default)
    if name not in ACTIVATION_FNS:
        supported = ", ".join(sorted(set(ACTIVATION_FNS.values())))
        raise reader.fail(key, f"is {shown(name)}, which is not supported; supported: {supported}")
    for other in ("hidden_act", "activation_function", "activation"):
        if reader.has(other) and reader.values[other] != reader.values.get(key, name):
            raise reader.fail(
                other, f"is {shown(reader.values[other])} but {key} is {shown(name)}; keep one"
            )
    return ACTIVATION_FNS[name]


def activated(name: str, x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """Return fn(x), elementwise, in x's precision; `threshold` is fatrelu's, or a limit.

    drelu is relu of gate and of up: here it is relu, and `activated_up` applies it to up.
    clamped_silu (gpt-oss) is g * sigmoid(1.702 g) with g = min(x, limit).
    """
    from torch.nn import functional

    if name in ("relu", "drelu"):
        return functional.relu(x)
    if name == "relu2":
        return functional.relu(x).square()
    if name == "fatrelu":
        return functional.threshold(x, threshold, 0.0)
    if name == "silu":
        return functional.silu(x)
    if name == "clamped_silu":
        g = x.clamp(max=threshold)
        return g * (g * CLAMPED_SLOPE).sigmoid()
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def activated_up(name: str, x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """Return what the activated gate is multiplied with: up . x, and relu of it for drelu.

    With clamped_silu up . x is clamped to -limit..limit, and 1 is added.
    """
    if name == "clamped_silu":
        return x.clamp(-threshold, threshold) + 1
    return x.relu() if name == "drelu" else x
