"""Typed access to a GGUF file's metadata, and keys of config.json that families make of it alike.

Those of the rope: model/config/gguf_rope.py.
Source:  llama.cpp, gguf-py/gguf/constants.py, conversion/ and src/models/
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import CheckpointError
from hotcold.model.gguf.file import GgufModel
from hotcold.model.gguf.header import ArrayValue

LATENT_RANK = "attention.kv_lora_rank"  # of multi-head latent attention
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
# Of the rope: with pictures a position is three numbers, which are one in a text.
SECTIONS = ("dimension_sections",)


class Metadata(ConfigReader):
    """Reads the keys of a file's architecture, as llama.block_count. Errors: CheckpointError.

    rope_keys: those that the architecture alone has
    """

    def __init__(self, model: GgufModel, rope_keys: tuple[str, ...] = ()):
        super().__init__(dict(model.metadata), str(model.path), CheckpointError)
        self.model, self.rope_keys = model, rope_keys
        self.architecture = model.metadata.get("general.architecture")
        self.prefix = f"{self.architecture}."

    def integer(
        self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 40
    ) -> int:
        """Return a whole number, or the one that an array repeats for every layer.

        Layers with 0 have none of what is counted.
        """
        if (numbers := self._array(key)) is None:
            return super().integer(key, default, low=low, high=high)
        found = np.unique(numbers)
        counts = found[found != 0] if found.size > 1 else found
        if numbers.dtype.kind not in "iu" or counts.size != 1:
            raise self.fail(key, "differs from layer to layer, which is not supported")
        return int(counts[0])

    def integers(self, key: str, count: int, default: int | None = None) -> list[int]:
        """Return a whole number, or true or false, of each of `count` layers.

        A key that is no array has the number of all.
        """
        if (numbers := self._array(key)) is None:
            return [self.integer(key, default)] * count
        if numbers.dtype.kind not in "iub" or len(numbers) != count:
            raise self.fail(key, f"is no list of {count} whole numbers, one a layer")
        return [int(number) for number in numbers]

    def number(
        self, key: str, default: float | None = None, *, low: float = -1e30, high: float = 1e30
    ) -> float:
        """Return a float."""
        return super().number(key, default, low=low, high=high)

    def flags(self, key: str, period: int) -> list[bool]:
        """Return true or false for each layer: an array, or false for each n-th layer.

        n is `period` where the file has no number either; 0 is false for none.
        """
        layers, found = self.integer("block_count"), self._array(key)
        if found is None:
            period = self.integer(key, period)
            return [not period or (layer + 1) % period != 0 for layer in range(layers)]
        if len(found) < layers:
            raise self.fail(key, f"is not one for each of {layers} layers")
        return [bool(value) for value in found[:layers]]

    def has_tensor(self, name: str) -> bool:
        """Whether the model has the tensor."""
        return name in self.model.names

    def rows_of(self, name: str) -> int:
        """Return the number of rows of a tensor. Errors: CheckpointError where it is missing."""
        if not self.has_tensor(name):
            raise CheckpointError(f"{self.model.path}: tensor {name!r} is missing")
        return self.model.file_of(name).tensors[name].shape[0]

    def floats(self, name: str) -> np.ndarray:
        """Return a small float32 tensor. Errors: CheckpointError for another type."""
        file = self.model.file_of(name)
        kind = file.tensors[name].type
        if kind.dtype != np.float32:
            raise CheckpointError(f"{self.model.path}: tensor {name!r} is {kind.name}, not F32")
        return np.asarray(file.array(name), np.float64).reshape(-1)

    def _array(self, key: str) -> np.ndarray | None:
        """The numbers of an array; None where the key is none."""
        is_array = isinstance(self.values.get(self.prefix + key), ArrayValue)
        return self.model.first.numbers(self.prefix + key) if is_array else None


def gated_values(metadata: Metadata, epsilon: float | None = None) -> dict[str, Any]:
    """config.json's keys of a Llama-like decoder; `epsilon` where it has LayerNorms."""
    heads = metadata.integer("attention.head_count")
    # Mixtures without a dense layer may have that of an expert alone.
    of_expert = metadata.integer("expert_feed_forward_length", 0) or None
    return {
        "hidden_act": "silu",
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length", of_expert),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim(metadata),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", epsilon),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
        "num_local_experts": metadata.integer("expert_count", 0),
        "num_experts_per_tok": metadata.integer("expert_used_count", 0) or None,
    }


def window(metadata: Metadata) -> int | None:
    """Return the size of sliding windows; None where there are none."""
    return metadata.integer("attention.sliding_window", 0) or None


def window_kinds(metadata: Metadata, period: int) -> list[str]:
    """Return layer_types of windows, where a file has one: all but each `period`-th."""
    flags = metadata.flags("attention.sliding_window_pattern", period)
    return [("full", "sliding")[flag] + "_attention" for flag in flags]


def recurrent_kinds(metadata: Metadata, recurrent: str) -> list[str]:
    """Return layer_types: a layer has attention where it has KV heads."""
    counts = metadata.integers("attention.head_count_kv", metadata.integer("block_count"))
    return ["full_attention" if count else recurrent for count in counts]


def rotary_share(metadata: Metadata) -> float:
    """Return which part of a head is rotated."""
    size = max(1, head_dim(metadata))
    return metadata.integer("rope.dimension_count", size) / size


def expert_length(metadata: Metadata) -> int:
    """Return an expert's neurons. Older files say those of all chosen experts together."""
    used = max(1, metadata.integer("expert_used_count"))
    length = metadata.integer("expert_feed_forward_length", 0)
    return length or metadata.integer("feed_forward_length") // used


def gating(metadata: Metadata, default: int, *accepted: int) -> int:
    """Return how experts are scored. Errors: CheckpointError for what is not `accepted`."""
    found = metadata.integer("expert_gating_func", 0) or default
    if found not in (accepted or (SIGMOID,)):
        raise metadata.fail("expert_gating_func", f"is {found}, which is not supported")
    return found


def draft_layers(metadata: Metadata) -> dict[str, int]:
    """Return the numbers of layers and of those of drafts, which block_count includes."""
    drafts = metadata.integer("nextn_predict_layers", 0)
    layers = metadata.integer("block_count") - drafts
    return {"num_hidden_layers": layers, "num_nextn_predict_layers": drafts}


def head_dim(metadata: Metadata) -> int:
    """Return the width of a head, of keys and values alike; of latent attention what is rotated."""
    if metadata.has(LATENT_RANK):
        return metadata.integer("rope.dimension_count")
    heads = metadata.integer("attention.head_count")
    if not heads:
        raise metadata.fail("attention.head_count", "is 0; download the model again")
    size = metadata.integer("attention.key_length", metadata.integer("embedding_length") // heads)
    if metadata.integer("attention.value_length", size) != size:
        raise metadata.fail("attention.value_length", f"is not {size}, which is not supported")
    return size
