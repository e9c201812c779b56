"""Recurrent layers' learned numbers outside of their projections: gates, convolution, decays."""

from __future__ import annotations

import math

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import RecurrentNames
from hotcold.model.config.layer_spec import RecurrentSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.recurrent_arrays import RecurrentVectors


def read_recurrent(reader: TensorReader, config: ModelConfig, layers: range) -> RecurrentVectors:
    """Read what the recurrent ones of `layers` have beside their projections.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    spec = config.recurrent
    found = [layer for layer in layers if config.layers[layer].recurrent is not None]
    if spec is None:
        return no_recurrent()
    count, heads = len(found), spec.num_states
    vectors = RecurrentVectors(
        gates=reader.empty((count, spec.num_gates, config.hidden_size), np.dtype(np.float32)),
        conv_weight=np.empty((count, spec.conv_size, spec.num_channels), np.float32),
        conv_bias=np.empty((count, spec.num_channels * spec.has_conv_bias), np.float32),
        decay_rate=np.empty((count, heads), np.float32),
        step_bias=np.empty((count, heads), np.float32),
        norm_weight=np.empty((count, spec.norm_size), np.float32),
        skip=np.empty((count, heads if spec.kind == "mamba" else 0), np.float32),
    )
    for place, layer in enumerate(found):
        names = tensor_names(config).of_layer(layer).recurrent
        assert names is not None
        own = RecurrentVectors(*(array[place] for array in vectors))
        _read_convolution(reader, names, spec, own)
        if not heads:
            continue
        _read_gates(reader, names, spec, own.gates)
        own.decay_rate[:] = -np.exp(_flat(reader, names.decay, heads))
        own.step_bias[:] = reader.vector(names.step_bias, (heads,))
        own.norm_weight[:] = _flat(reader, f"{names.norm}.weight", spec.norm_size)
        if own.skip.size:
            own.skip[:] = _flat(reader, names.skip, heads)
    return vectors


def _flat(reader: TensorReader, name: str, size: int) -> np.ndarray:
    """A vector, which a GGUF file may have in two dimensions."""
    shape = reader.checkpoint.shape(name)
    return reader.vector(name, shape if math.prod(shape) == size else (size,)).reshape(-1)


def no_recurrent() -> RecurrentVectors:
    """What a model without recurrent layers has."""
    return RecurrentVectors(*(np.empty((0, 0, 0), np.float32) for _ in range(2)),
                            *(np.empty((0, 0), np.float32) for _ in range(5)))  # fmt: skip


def recurrent_row_ids(spec: RecurrentSpec) -> np.ndarray:
    """Rows of a tensor that has all in the order q | k | v | z: Mamba's, Qwen3-Next's by key head.

    Mamba's is z | v | k | q, and gates.
    """
    if spec.kind == "mamba":
        z = np.arange(spec.values_size, dtype=np.int32)
        return np.concatenate([spec.values_size + _channel_ids(spec), z])
    own = spec.num_value_heads // spec.num_key_heads * spec.value_dim
    return _by_key_head(spec, (spec.key_dim, spec.key_dim, own, own))


def _channel_ids(spec: RecurrentSpec) -> np.ndarray:
    """Channels in the order q | k | v; Mamba's convolution has v | k | q."""
    ids = np.arange(spec.num_channels, dtype=np.int32)
    if spec.kind != "mamba":
        return ids
    size = spec.num_key_heads * spec.key_dim
    v, k, q = np.split(ids, [spec.values_size, spec.values_size + size])
    return np.concatenate([q, k, v])


def _by_key_head(spec: RecurrentSpec, sizes: tuple[int, ...]) -> np.ndarray:
    rows = np.arange(spec.num_key_heads * sum(sizes), dtype=np.int32)
    parts = np.split(rows.reshape(spec.num_key_heads, -1), np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.ravel() for part in parts])


def _read_gates(
    reader: TensorReader, names: RecurrentNames, spec: RecurrentSpec, gates: np.ndarray
) -> None:
    """Fill gates: rows of b, then of a; one tensor has both by key head. Mamba's are other rows."""
    order, first = None, 0
    own = f"{names.inputs[0]}.weight.gates"  # `hotcold quantize` writes it
    if not names.gates and reader.checkpoint.has(own):
        reader.rows(own, len(gates), gates)
    elif not names.gates:
        total = spec.num_channels + spec.values_size + spec.num_others
        reader.rows(
            f"{names.inputs[0]}.weight", total, gates,
            np.arange(total - spec.num_others, total, dtype=np.int32),
        )  # fmt: skip
    if len(names.gates) == 1:
        order = _by_key_head(spec, (spec.num_value_heads // spec.num_key_heads,) * 2)
    for name in names.gates:
        rows = len(gates) // len(names.gates)
        reader.require_floats(f"{name}.weight", (rows, gates.shape[1]))
        reader.rows(f"{name}.weight", rows, gates[first : first + rows], order)
        first += rows


def _read_convolution(
    reader: TensorReader, names: RecurrentNames, spec: RecurrentSpec, own: RecurrentVectors
) -> None:
    """Fill (conv_size, channels); a checkpoint has (channels, 1, conv_size), or without the 1."""
    name, shape = f"{names.conv}.weight", (spec.num_channels, spec.conv_size)
    is_flat = len(reader.checkpoint.shape(name)) == 2
    stored = reader.vector(name, shape if is_flat else (shape[0], 1, shape[1]))
    ids = _channel_ids(spec)
    own.conv_weight[:] = stored.reshape(shape)[ids].T
    if spec.has_conv_bias:
        own.conv_bias[:] = reader.vector(f"{names.conv}.bias", shape[:1])[ids]
    else:
        reader.refuse(f"{names.conv}.bias")
