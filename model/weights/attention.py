"""Attention projections and layer norms of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import LayerNames
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.tensor_reader import (
    OnBytes,
    TensorReader,
    Touch,
    empty_rows,
    tensor_places,
)
from hotcold.numba_kernels.layer_rows import LayerRows


@dataclass
class AttentionWeights:
    """All layers' attention. Rows of qkv: all q heads, then k heads, then v heads.

    norm_* is applied before attention and ffn_norm_* before the FFN; with post_norm each is applied
    after its residual sum. ffn_norm_weight is (L, 0) where the FFN reads attention's input.
    attention_norm_weight is for attention's output, q_norm_weight and k_norm_weight for one head of
    q and k or for all heads together: RMSNorms, or (L, 0).
    """

    norm_weight: np.ndarray  # (L, d) float32, or (L, 0)
    norm_bias: np.ndarray  # (L, d) float32, or (L, 0)
    qkv: LayerRows  # of (H + 2 KV) hd rows a layer, of d bits
    qkv_bias: np.ndarray  # (L, (H + 2 KV) hd) float32, or (L, 0)
    out: np.ndarray  # (L, d, H hd) bits
    out_bias: np.ndarray  # (L, d) float32, or (L, 0)
    ffn_norm_weight: np.ndarray  # (L, d) float32, or (L, 0)
    ffn_norm_bias: np.ndarray  # (L, d) float32, or (L, 0)
    attention_norm_weight: np.ndarray  # (L, d) float32, or (L, 0)
    q_norm_weight: np.ndarray  # (L, hd) or (L, H hd) float32, or (L, 0)
    k_norm_weight: np.ndarray  # (L, hd) or (L, KV hd) float32, or (L, 0)


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
    return weights


def attention_layers(reader: TensorReader, config: ModelConfig) -> Iterator[AttentionWeights]:
    """Yield layer after layer in one buffer, which the next layer overwrites.

    For weights that are sent on: the process never holds more than one layer. All layers have the
    same formats.
    Errors:  those of `load_attention`
    """
    one, times = _empty_attention(reader, config, range(1), by_layer=False), config.num_layers
    # Strides of 0: all layers share one layer's memory.
    arrays = {name: array for name, array in vars(one).items() if name != "qkv"}
    first, second, *spans = one.qkv
    every = AttentionWeights(
        qkv=LayerRows(first, second, *(_repeated(span, times) for span in spans)),
        **{name: _repeated(array, times) for name, array in arrays.items()},
    )
    for layer in range(config.num_layers):
        _load_layer(reader, config, every, layer)
        yield one


def _repeated(array: np.ndarray, times: int) -> np.ndarray:
    shape = (times, *array.shape[1:])
    return np.lib.stride_tricks.as_strided(array, shape, (0, *array.strides[1:]))


def _empty_attention(
    reader: TensorReader, config: ModelConfig, layers: range, by_layer: bool
) -> AttentionWeights:
    """Return arrays for the layers; refuse a checkpoint with more layers than the config."""
    names, hidden = tensor_names(config), config.hidden_size
    reader.refuse(f"{names.of_layer(config.num_layers).out}.weight")
    first = names.of_layer(0)

    def vectors(size: int, present: bool) -> np.ndarray:
        return np.empty((len(layers), size if present else 0), np.float32)

    return AttentionWeights(
        norm_weight=vectors(hidden, config.has_norm),
        norm_bias=vectors(hidden, config.has_norm and config.norm_bias),
        qkv=empty_projections(reader, config, layers, by_layer),
        qkv_bias=vectors(config.qkv_rows, config.attention_bias),
        out=reader.matrix((len(layers), hidden, config.attention_size), f"{first.out}.weight"),
        out_bias=vectors(hidden, config.out_bias),
        ffn_norm_weight=vectors(hidden, config.has_ffn_norm),
        ffn_norm_bias=vectors(hidden, config.has_ffn_norm and config.norm_bias),
        attention_norm_weight=vectors(hidden, config.has_output_norms),
        q_norm_weight=vectors(config.q_norm_size, True),
        k_norm_weight=vectors(config.k_norm_size, True),
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
    _load_norms(reader, config, names, weights, layer)
    _load_projections(reader, config, names, weights, layer)


def _load_norms(
    reader: TensorReader,
    config: ModelConfig,
    names: LayerNames,
    weights: AttentionWeights,
    layer: int,
) -> None:
    size = config.hidden_size
    for name, weight, bias in (
        (names.norm, weights.norm_weight, weights.norm_bias),
        (names.ffn_norm, weights.ffn_norm_weight, weights.ffn_norm_bias),
    ):
        if weight.shape[1]:
            weight[layer] = norm_weight(reader, config, name, size)
        if bias.shape[1]:
            bias[layer] = reader.vector(f"{name}.bias", (size,))
    for name, weight in (
        (names.attention_norm, weights.attention_norm_weight),
        (names.q_norm, weights.q_norm_weight),
        (names.k_norm, weights.k_norm_weight),
    ):
        if weight.shape[1]:
            weight[layer] = norm_weight(reader, config, name, weight.shape[1])
    if not config.qk_norm:
        reader.refuse(f"{names.qkv[0].rpartition('.')[0]}.q_norm.weight")


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
            weights.qkv_bias[layer, part] = bias if order is None else bias[order]
        else:
            reader.refuse(f"{name}.bias")
    reader.rows(f"{names.out}.weight", hidden, weights.out[layer])
    if config.out_bias:
        weights.out_bias[layer] = reader.vector(f"{names.out}.bias", (hidden,))
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
