"""What a family of models is to the rest of the project, and what several families read alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotcold.model.config.families.tensor_names import TensorNames
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ActivationFn, ModelConfig
from hotcold.model.errors import shown

# What config.json calls them. fatrelu comes with a threshold, which only some families have.
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
MAX_WIDTH = 1 << 20
MAX_POSITIONS = 1 << 26
MAX_LAYERS = 4096


@dataclass(frozen=True)
class Family:
    """One family: how its config.json and its checkpoints are read. Defaults are transformers'."""

    name: str  # model_type in config.json
    architectures: tuple[str, ...]  # any of them in config.json; errors name the first
    prefixes: tuple[str, ...]  # of tensors' names, but the head's; new checkpoints have the first
    bos_id: int | None
    eos_id: int | None
    tied_embeddings: bool
    read_fields: Callable[[ConfigReader], dict[str, Any]]  # those that not all families share
    tensor_names: Callable[[ModelConfig], TensorNames]
    reads: tuple[str, ...] = ()  # keys that others would have to refuse (`model.config.build`)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that all others must have


def activation(reader: ConfigReader, key: str, default: str) -> dict[str, Any]:
    """Return activation_fn and activation_threshold, which fatrelu has: hidden_act_param.

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


def max_positions(reader: ConfigReader) -> int:
    """Return the longest context."""
    return reader.integer("max_position_embeddings", 2048, high=MAX_POSITIONS)


def num_layers(reader: ConfigReader) -> int:
    """Return the number of layers."""
    return reader.integer("num_hidden_layers", high=MAX_LAYERS)


def head_sizes(reader: ConfigReader, free_head_dim: bool = False) -> dict[str, int]:
    """Return hidden_size, num_heads and head_dim, which is hidden / heads unless it is free."""
    hidden = reader.integer("hidden_size", high=MAX_WIDTH)
    heads = reader.integer("num_attention_heads", high=MAX_WIDTH)
    if hidden % heads and not (reader.has("head_dim") and free_head_dim):
        raise reader.fail(
            "hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}"
        )
    head_dim = reader.integer("head_dim", hidden // heads, high=MAX_WIDTH)
    if head_dim != hidden // heads and not free_head_dim:
        raise reader.fail("head_dim", f"is {head_dim}; this family needs {hidden // heads}")
    return {"hidden_size": hidden, "num_heads": heads, "head_dim": head_dim}


def grouped_kv_heads(reader: ConfigReader, key: str, heads: int) -> int:
    """Return the number of KV heads, each of which as many query heads share."""
    kv_heads = reader.integer(key, heads, high=heads)
    if heads % kv_heads:
        raise reader.fail(key, f"is {kv_heads}, which does not divide num_attention_heads {heads}")
    return kv_heads
