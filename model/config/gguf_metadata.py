"""Typed access to a GGUF file's metadata, and the keys of config.json that follow from it.

Those of the rope: model/config/gguf_rope.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import CheckpointError
from hotcold.model.gguf.file import GgufModel
from hotcold.model.gguf.header import ArrayValue

_MAX_NUMBER = 1 << 40


class Metadata:
    """Reads the keys of a file's architecture, as llama.block_count. Errors: CheckpointError."""

    def __init__(self, model: GgufModel):
        self.model = model
        self.architecture = model.metadata.get("general.architecture")
        self._reader = ConfigReader(dict(model.metadata), str(model.path), CheckpointError)

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return self._reader.has(self._full(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number, or the one that an array repeats for every layer."""
        full = self._full(key)
        if isinstance(self._reader.values.get(full), ArrayValue):
            return self._equal(full)
        return self._reader.integer(full, default, low=0, high=_MAX_NUMBER)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float."""
        return self._reader.number(self._full(key), default, low=-1e30, high=1e30)

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return self._reader.boolean(self._full(key), default)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        return self._reader.text(self._full(key), default)

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

    def fail(self, key: str, problem: str) -> Exception:
        """Return (not raise) the error that a key has `problem`."""
        return self._reader.fail(self._full(key), problem)

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _equal(self, full: str) -> int:
        numbers = self.model.first.numbers(full)
        if numbers is None or numbers.dtype.kind not in "iu" or np.unique(numbers).size != 1:
            raise self._reader.fail(full, "differs from layer to layer, which is not supported")
        return int(numbers[0])


def gated_values(metadata: Metadata, epsilon: float | None = None) -> dict[str, Any]:
    """config.json's keys of a Llama-like decoder; `epsilon` where it has LayerNorms."""
    heads = metadata.integer("attention.head_count")
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim(metadata),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", epsilon),
    }


def head_dim(metadata: Metadata) -> int:
    """Return the width of a head, of keys and values alike."""
    heads = metadata.integer("attention.head_count")
    if not heads:
        raise metadata.fail("attention.head_count", "is 0; download the model again")
    size = metadata.integer("attention.key_length", metadata.integer("embedding_length") // heads)
    if metadata.integer("attention.value_length", size) != size:
        raise metadata.fail("attention.value_length", f"is not {size}, which is not supported")
    return size
