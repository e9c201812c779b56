"""Typed access to a GGUF file's metadata, and the keys of config.json that follow from it."""

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
        **rope_values(metadata),
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


def rope_values(metadata: Metadata) -> dict[str, Any]:
    """config.json's rope_theta, rope_scaling and partial_rotary_factor."""
    values: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 10000.0)}
    size = head_dim(metadata)
    rotated = metadata.integer("rope.dimension_count", size)
    if rotated != size:
        values["partial_rotary_factor"] = rotated / max(1, size)
    kind = metadata.text("rope.scaling.type", "none")
    if kind == "linear" or (kind == "none" and metadata.has("rope.scale_linear")):
        old = metadata.number("rope.scale_linear", 1.0)
        factor = metadata.number("rope.scaling.factor", old)
        if factor != 1:
            values["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        values["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.integer(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    elif kind not in ("none", "longrope"):
        raise metadata.fail("rope.scaling.type", f"is {kind!r}, which is not supported")
    if metadata.has_tensor("rope_freqs.weight"):
        values["rope_scaling"] = _llama3_scaling(metadata, values["rope_theta"], rotated)
    return values


def longrope_values(metadata: Metadata) -> dict[str, Any]:
    """Phi-3's rope_scaling, whose factors are tensors; no keys without them."""
    names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
    if not any(metadata.has_tensor(name) for name in names.values()):
        return {}
    for name in names.values():
        metadata.rows_of(name)
    factors = {
        key: [float(value) for value in metadata.floats(name)] for key, name in names.items()
    }
    original = metadata.integer("rope.scaling.original_context_length")
    return {
        "rope_scaling": {"rope_type": "longrope", **factors},
        "original_max_position_embeddings": original,
    }


def _llama3_scaling(metadata: Metadata, theta: float, size: int) -> dict[str, Any]:
    """Llama 3's rope_scaling, from the factors: the file has nothing else of it.

    Llama 3.1 to 3.3 have the same low and high frequencies, between which factors go from 1 to
    `factor`.
    """
    factors = metadata.floats("rope_freqs.weight")
    factor, low, high, positions = float(factors.max(initial=1.0)), 1.0, 4.0, 8192
    if factors.size == size // 2:
        waves = 2 * np.pi * theta ** (2 * np.arange(size // 2) / size)
        smooth = (positions / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(waves > positions / low, factor, between)
        expected = np.where(waves < positions / high, 1.0, expected)
        if np.allclose(factors, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": positions,
            }
    raise CheckpointError(
        f"{metadata.model.path}: tensor 'rope_freqs.weight' has factors of no known model, which "
        "are not supported"
    )
