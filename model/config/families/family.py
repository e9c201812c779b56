"""`Family`: how a family's config.json and tensors are read; readers that families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotcold.model.config.families.tensor_names import LLAMA_NAMES, TensorNames
from hotcold.model.config.gguf_metadata import Metadata, gated_values
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import shown

MAX_WIDTH = 1 << 20
MAX_POSITIONS = 1 << 26
MAX_LAYERS = 4096
_MAX_WINDOW = 1 << 26


@dataclass(frozen=True)
class GgufArchitecture:
    """How GGUF files have a family."""

    kinds: tuple[str, ...]  # of general.architecture
    # config.json's keys beside those that all architectures have; model_type: of another family.
    values: Callable[[Metadata], dict[str, Any]] = gated_values
    # By module of a checkpoint, where a role's is not that of `GGUF_NAMES`.
    names: Mapping[str, str] = field(default_factory=dict)
    # Rows of q and k that rotate together stand side by side, in a checkpoint half a head apart.
    pairs_rows: bool = False
    rope_keys: tuple[str, ...] = ()  # that `values` reads; refused for others


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models. Defaults of keys are transformers'."""

    name: str  # model_type in config.json
    architectures: tuple[str, ...]  # accepted in config.json; errors name the first
    # Of tensors' names, but for the head's; new checkpoints have the first.
    prefixes: tuple[str, ...] = ("model.",)
    bos_id: int | None = None
    eos_id: int | None = None
    tied_embeddings: bool = False
    read_fields: Callable[[ConfigReader], dict[str, Any]]  # of ModelConfig, beside `build_config`'s
    tensor_names: TensorNames | Callable[[ModelConfig], TensorNames] = LLAMA_NAMES
    reads: tuple[str, ...] = ()  # keys that are refused for families that do not name them
    # Of keys, the values that its models have, or that change nothing: others are refused.
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Of keys that are required for other families.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufArchitecture | None = None


def max_positions(reader: ConfigReader) -> int:
    """Return the longest context."""
    return reader.integer("max_position_embeddings", 2048, high=MAX_POSITIONS)


def num_layers(reader: ConfigReader) -> int:
    """Return the number of layers."""
    return reader.integer("num_hidden_layers", high=MAX_LAYERS)


def head_sizes(reader: ConfigReader, free_head_dim: bool = False) -> dict[str, int]:
    """Return hidden_size, num_heads and head_dim: hidden / heads, unless `free_head_dim`."""
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
    """Return the number of KV heads, which divides the number of query heads."""
    kv_heads = reader.integer(key, heads, high=heads)
    if heads % kv_heads:
        raise reader.fail(key, f"is {kv_heads}, which does not divide num_attention_heads {heads}")
    return kv_heads


def of_layers(reader: ConfigReader, key: str, *accepted: str | int) -> list[Any]:
    """Return the list `key`. Errors: ConfigError unless each layer has one of the values."""
    found: Any = reader.values.get(key)
    is_whole = isinstance(found, list) and len(found) == num_layers(reader)
    if not is_whole or any(one not in accepted for one in found):
        values = " or ".join(map(str, accepted))
        raise reader.fail(key, f"is {shown(found, 60)}; give {values} for each layer")
    return list(found)


def sliding_layers(reader: ConfigReader, is_sliding: Callable[[int], bool]) -> tuple[bool, ...]:
    """Return which layers have a window: by `layer_types`, or by `is_sliding` without that key.

    Errors:  ConfigError for other kinds of layers, or another number of them
    """
    if not reader.has("layer_types"):
        return tuple(is_sliding(layer) for layer in range(num_layers(reader)))
    kinds = of_layers(reader, "layer_types", "full_attention", "sliding_attention")
    return tuple(kind == "sliding_attention" for kind in kinds)


def windows(
    reader: ConfigReader, sliding: tuple[bool, ...], default: int | None = None
) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none; () where no layer has one.

    Errors:  ConfigError where a layer has one and config.json has no size
    """
    if not any(sliding):
        return ()
    size = reader.integer("sliding_window", default, high=_MAX_WINDOW)
    return tuple(size if is_windowed else 0 for is_windowed in sliding)
