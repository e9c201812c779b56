"""Attention projections and layer norms of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import LayerNames
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.routers import read_routers
from hotcold.model.weights.tensor_reader import (
    OnBytes,
    TensorReader,
    Touch,
    empty_rows,
    tensor_places,
)
from hotcold.numba_kernels.layer_record import LayerVectors
from hotcold.numba_kernels.layer_rows import LayerRows
from hotcold.numba_kernels.router_arrays import RouterArrays, no_routers


@dataclass
class AttentionWeights:
    """All layers' attention. Rows of qkv: all q heads, then k heads, then v heads."""

    vectors: LayerVectors  # (L, size) float32, of the sizes of LayerSpec.vectors
    qkv: LayerRows  # of (H + 2 KV) hd rows a layer, of d bits
    out: np.ndarray  # (L, d, H hd) bits
    routers: RouterArrays


def load_attention(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: str = "",
    on_bytes: OnBytes | None = None,
    touch: Touch | None = None,
) -> AttentionWeights:
    """Load all layers' attention and norms; `dtype`, such as "q8", quantizes the projections.

    `touch` gets each new matrix before it is filled.
    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite, or that
             config.json does not allow for; UsageError for an unknown dtype
    """
    with TensorReader(checkpoint, on_bytes, requested_dtype(dtype), touch) as reader:
        return read_attention(reader, config)


def read_attention(
    reader: TensorReader, config: ModelConfig, by_layer: bool = True
) -> AttentionWeights:
    """`load_attention` with a given reader; without `by_layer` matrices have one format."""
    weights = _empty_attention(reader, config, range(config.num_layers), by_layer)
    for layer in range(config.num_layers):
        _load_layer(reader, config, weights, layer)
    weights.routers = read_routers(reader, config, range(config.num_layers))
    return weights


def attention_layers(reader: TensorReader, config: ModelConfig) -> Iterator[AttentionWeights]:
    """Yield layer after layer in one buffer, which the next layer overwrites.

    For weights that are sent on: the process never holds more than one layer. All layers have the
    same formats.
    Errors:  those of `load_attention`
    """
    one, times = _empty_attention(reader, config, range(1), by_layer=False), config.num_layers
    # Strides of 0: all layers share one layer's memory.
    first, second, *spans = one.qkv
    every = AttentionWeights(
        vectors=LayerVectors(*(_repeated(array, times) for array in one.vectors)),
        qkv=LayerRows(first, second, *(_repeated(span, times) for span in spans)),
        out=_repeated(one.out, times),
        routers=one.routers,
    )
    for layer in range(config.num_layers):
        _load_layer(reader, config, every, layer)
        yield replace(one, routers=read_routers(reader, config, range(layer, layer + 1)))


def _repeated(array: np.ndarray, times: int) -> np.ndarray:
    shape = (times, *array.shape[1:])
    return np.lib.stride_tricks.as_strided(array, shape, (0, *array.strides[1:]))


def _empty_attention(
    reader: TensorReader, config: ModelConfig, layers: range, by_layer: bool
) -> AttentionWeights:
    """Return arrays for the layers; refuse a checkpoint with more layers than the config."""
    names, hidden = tensor_names(config), config.hidden_size
    last = config.num_layers + config.num_extra_layers
    reader.refuse(f"{names.of_layer(last).out}.weight")
    first, sizes = names.of_layer(0), config.layers[0].vectors
    return AttentionWeights(
        vectors=LayerVectors(
            **{name: np.empty((len(layers), size), np.float32) for name, size in sizes.items()}
        ),
        qkv=empty_projections(reader, config, layers, by_layer),
        out=reader.matrix((len(layers), hidden, config.attention_size), f"{first.out}.weight"),
        routers=no_routers(len(layers)),
    )


def empty_projections(
    reader: TensorReader, config: ModelConfig, layers: range, by_layer: bool
) -> LayerRows:
    """Return arrays for q, k and v of the layers; `by_layer` as in `empty_rows`."""
    names = tensor_names(config)
    tensors = [
        [
            (f"{name}.weight", num_rows)
            for name, num_rows in zip(names.of_layer(layer).qkv, config.qkv_sizes, strict=True)
        ]
        for layer in layers
    ]
    return empty_rows(reader, tensors, config.hidden_size, by_layer)


def _load_layer(
    reader: TensorReader, config: ModelConfig, weights: AttentionWeights, layer: int
) -> None:
    names = tensor_names(config).of_layer(layer)
    _load_vectors(reader, config, names, weights, layer)
    _load_projections(reader, config, names, weights, layer)


def _load_vectors(
    reader: TensorReader,
    config: ModelConfig,
    names: LayerNames,
    weights: AttentionWeights,
    layer: int,
) -> None:
    """Load all vectors but the projections' biases, which come with their rows."""
    for name, stack in weights.vectors._asdict().items():
        role, _, part = name.rpartition("_")
        size = stack.shape[1]
        if name == "sinks":
            if size:
                stack[layer] = reader.vector(_sinks(reader, names), (size,))
            continue
        module = getattr(names, role)
        if role in ("qkv", "out"):
            continue
        if size and part == "weight":
            stack[layer] = norm_weight(reader, config, module, size)
        elif size:
            stack[layer] = reader.vector(f"{module}.{part}", (size,))
    if not config.qk_norm:
        reader.refuse(f"{names.qkv[0].rpartition('.')[0]}.q_norm.weight")


def _sinks(reader: TensorReader, names: LayerNames) -> str:
    """The tensor of attention's sinks: a GGUF file's name has a suffix."""
    with_suffix = f"{names.sinks}.weight"
    return with_suffix if reader.checkpoint.has(with_suffix) else names.sinks


def norm_weight(reader: TensorReader, config: ModelConfig, name: str, size: int) -> np.ndarray:
    """Return a norm's weights (size,) float32: the tensor's + config.norm_offset, or all ones.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    if not config.norm_affine:
        return np.ones(size, np.float32)
    weight = reader.vector(f"{name}.weight", (size,))
    return weight + np.float32(config.norm_offset) if config.norm_offset else weight


def _load_projections(
    reader: TensorReader,
    config: ModelConfig,
    names: LayerNames,
    weights: AttentionWeights,
    layer: int,
) -> None:
    hidden = config.hidden_size
    order = _fused_row_ids(config) if config.fused_qkv == "grouped" else None
    first = 0
    places = tensor_places(weights.qkv, layer, config.qkv_sizes)
    for name, num_rows, place in zip(names.qkv, config.qkv_sizes, places, strict=True):
        part = slice(first, first + num_rows)
        first += num_rows
        reader.rows(f"{name}.weight", num_rows, place, order)
        if config.attention_bias:
            bias = reader.vector(f"{name}.bias", (num_rows,))
            weights.vectors.qkv_bias[layer, part] = bias if order is None else bias[order]
        else:
            reader.refuse(f"{name}.bias")
    reader.rows(f"{names.out}.weight", hidden, weights.out[layer])
    if config.out_bias:
        weights.vectors.out_bias[layer] = reader.vector(f"{names.out}.bias", (hidden,))
    else:
        reader.refuse(f"{names.out}.bias")


def _fused_row_ids(config: ModelConfig) -> np.ndarray:
    """Return the row of Falcon's query_key_value that holds each row of q | k | v.

    The fused rows are, for each KV head, its query heads, then its key, then its value: one group
    with multi_query, and one group a head in the oldest layout.
    """
    per_group = config.num_heads // config.num_kv_heads + 2
    rows = np.arange(config.qkv_rows, dtype=np.int32)
    groups = rows.reshape(config.num_kv_heads, per_group, config.head_dim)
    return np.concatenate([groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()])
