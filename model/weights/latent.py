"""Loads the matrices of multi-head latent attention that widen vectors of low rank."""

from __future__ import annotations

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.layer_spec import LatentSpec
from hotcold.model.config.model_config import MatrixKind, ModelConfig, RopeConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.tensor_reader import TensorReader, empty_blocks, held_dtypes
from hotcold.numba_kernels.block_rows import BlockRows, matrices_of
from hotcold.numba_kernels.formats import Q8, is_quantized
from hotcold.numba_kernels.latent_arrays import LatentArrays
from hotcold.numba_kernels.load.convert import to_float32


def no_latent() -> LatentArrays:
    """The arrays of a model without it."""
    none = matrices_of(np.empty((0, 0, 0), np.float32))
    return LatentArrays(none, none, none)


def _names(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> dict[MatrixKind, str]:
    """A layer's tensors of `LatentArrays`, by its fields; {} without."""
    names = tensor_names(config).of_layer(layer)
    has_parts = checkpoint.has(f"{names.k_b}.weight")
    keys, values = (names.k_b, names.v_b) if has_parts else (names.kv_b, names.kv_b)
    modules: dict[MatrixKind, str] = {"queries": names.q_b, "keys": keys, "values": values}
    return {role: f"{module}.weight" for role, module in modules.items() if module}


def empty_latent(
    reader: TensorReader, config: ModelConfig, layers: range, by_layer: bool
) -> LatentArrays:
    """Return arrays for the matrices of `layers`; `by_layer` as in `held_dtypes`.

    Keys that stand beside values are transposed, so quantized ones are quantized anew: to Q8.
    """
    if config.latent is None:
        return no_latent()
    names = [_names(reader.checkpoint, config, layer) for layer in layers]
    empty: dict[str, BlockRows] = {}
    for role, (num_rows, width) in config.latent_shapes.items():
        if role not in names[0]:
            empty[role] = matrices_of(np.empty((len(layers), 0, 0), np.float32))
            continue
        dtypes = held_dtypes(reader, [[own[role]] for own in names], by_layer)
        if role == "keys" and names[0]["keys"] == names[0]["values"]:
            dtypes = [[Q8 if is_quantized(dtype) else dtype] for (dtype,) in dtypes]
        empty[role] = empty_blocks(reader, dtypes, num_rows, width)
    return LatentArrays(**empty)


def read_latent(
    reader: TensorReader, config: ModelConfig, layers: range, by_layer: bool
) -> LatentArrays:
    """Read the matrices of `layers`; `by_layer` as in `held_dtypes`.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    spec, found = config.latent, empty_latent(reader, config, layers, by_layer)
    if spec is None:
        return found
    heads = config.num_heads
    for index, layer in enumerate(layers):
        names = _names(reader.checkpoint, config, layer)
        if spec.query_rank:
            rows = found.queries.matrix(index)
            reader.rows(names["queries"], len(rows), rows, query_row_ids(config, layer))
        keys, values = found.keys.matrix(index), found.values.matrix(index)
        if names["keys"] == names["values"]:
            _read_joined(reader, spec, heads, names["keys"], keys, values)
        else:  # as in GGUF files since 2025
            reader.rows(names["keys"], spec.rank, keys, stack=heads)
            reader.rows(names["values"], spec.value_size, values, stack=heads)
    return found


def _read_joined(
    reader: TensorReader,
    spec: LatentSpec,
    heads: int,
    name: str,
    keys: np.ndarray,
    values: np.ndarray,
) -> None:
    """One tensor has of each head the rows of keys, then those of values."""
    num_rows, height = heads * (spec.plain_size + spec.value_size), spec.plain_size
    rows = np.arange(num_rows, dtype=np.int32).reshape(heads, -1)[:, height:].ravel()
    reader.rows(name, num_rows, values, rows)

    def transposed(stored: np.ndarray) -> np.ndarray:
        """(H * rank, plain size) float32"""
        found = to_float32(stored).reshape(heads, -1, spec.rank)[:, :height]
        return np.ascontiguousarray(found.swapaxes(1, 2)).reshape(-1, height)

    reader.made_rows(name, transposed, keys)


def query_row_ids(config: ModelConfig, layer: int) -> np.ndarray:
    """Return which row of the queries' tensor each of ours is: the rotated ones of a head first."""
    own, spec = config.layers[layer].attention, config.latent
    assert spec is not None
    rotated = spec.plain_size + rotated_row_ids(config, spec.rope_size, config.ropes[own.rope])
    head = np.concatenate([rotated, np.arange(spec.plain_size)])
    starts = np.arange(own.num_heads) * spec.query_size
    return (starts[:, None] + head).ravel().astype(np.int32)


def key_row_ids(config: ModelConfig, layer: int) -> np.ndarray:
    """Return which row of the tensor of latent and rotated rows each of ours is, rotated first."""
    own, spec = config.layers[layer].attention, config.latent
    assert spec is not None
    rotated = spec.rank + rotated_row_ids(config, spec.rope_size, config.ropes[own.rope])
    return np.concatenate([rotated, np.arange(spec.rank)]).astype(np.int32)


def rotated_row_ids(config: ModelConfig, head_dim: int, rope: RopeConfig) -> np.ndarray:
    """Return which of a head's rows stands where, once pairs are half a head apart."""
    rows = np.arange(head_dim, dtype=np.int32)
    if not config.interleaved_rope:
        return rows
    size = rope.rotary_dim(head_dim)
    return np.concatenate([rows[:size:2], rows[1:size:2], rows[size:]])
