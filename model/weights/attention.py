"""Attention projections and layer norms of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import LayerNames
from hotcold.model.config.layer_spec import LayerSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.latent import (
    key_row_ids,
    no_latent,
    query_row_ids,
    read_latent,
    rotated_row_ids,
)
from hotcold.model.weights.per_layer import read_per_layer
from hotcold.model.weights.recurrent import no_recurrent, read_recurrent, recurrent_row_ids
from hotcold.model.weights.routers import read_routers
from hotcold.model.weights.tensor_reader import (
    OnBytes,
    TensorReader,
    Touch,
    empty_blocks,
    held_dtypes,
    tensor_places,
)
from hotcold.numba_kernels.block_rows import BlockRows
from hotcold.numba_kernels.latent_arrays import LatentArrays
from hotcold.numba_kernels.layer_record import LayerVectors
from hotcold.numba_kernels.per_layer_arrays import PerLayerArrays, no_per_layer
from hotcold.numba_kernels.recurrent_arrays import RecurrentVectors
from hotcold.numba_kernels.router_arrays import RouterArrays, no_routers


@dataclass
class AttentionWeights:
    """All layers' attention. Rows of qkv: all q heads, then their gates, k heads and v heads.

    Of latent attention: the query's vector, or all q heads, then rotated and latent rows. Of a
    recurrent layer: q heads, k heads, v heads, and z of each v head; or b | c | x.
    """

    vectors: LayerVectors  # (L, size) float32, of the largest size in LayerSpec.vectors
    qkv: BlockRows  # of `num_inputs` rows a layer, of d bits; neighbours in one format: a block
    out: BlockRows  # (d, `mixed_size`) bits a layer
    routers: RouterArrays
    latent: LatentArrays
    recurrent: RecurrentVectors
    per_layer: PerLayerArrays = field(default_factory=no_per_layer)


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
    weights.latent = read_latent(reader, config, range(config.num_layers), by_layer)
    weights.per_layer = read_per_layer(reader, config)
    weights.recurrent = read_recurrent(reader, config, range(config.num_layers))
    return weights


def attention_layers(reader: TensorReader, config: ModelConfig) -> Iterator[AttentionWeights]:
    """Yield layer after layer in one buffer, which the next layer overwrites.

    For weights that are sent on: the process never holds more than one layer. All layers have the
    same formats.
    Errors:  those of `load_attention`
    """
    one, times = _empty_attention(reader, config, range(1), by_layer=False), config.num_layers
    # Strides of 0: all layers share one layer's memory.
    every = AttentionWeights(
        vectors=LayerVectors(*(_repeated(array, times) for array in one.vectors)),
        qkv=one.qkv._replace(places=_repeated(one.qkv.places, times)),
        out=one.out._replace(places=_repeated(one.out.places, times)),
        routers=one.routers,
        latent=one.latent,
        recurrent=one.recurrent,
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
    names = tensor_names(config)
    if not config.drafts_after:
        last = config.num_layers + config.num_extra_layers
        reader.refuse(f"{names.of_layer(last).out}.weight")
    sizes = {
        name: max(layer.vectors[name] for layer in config.layers) for name in LayerVectors._fields
    }
    return AttentionWeights(
        vectors=LayerVectors(
            **{name: np.zeros((len(layers), size), np.float32) for name, size in sizes.items()}
        ),
        qkv=empty_projections(reader, config, layers, by_layer),
        out=empty_outputs(reader, config, layers, by_layer),
        routers=no_routers(len(layers)),
        latent=no_latent(),
        recurrent=no_recurrent(),
    )


def empty_outputs(
    reader: TensorReader, config: ModelConfig, layers: range, by_layer: bool
) -> BlockRows:
    """Return arrays for output projections; `by_layer` as in `held_dtypes`."""
    found = [_projections(config, layer)[1] for layer in layers]
    # A layer without one counts as the first layer's.
    names = [[f"{out or _projections(config, 0)[1]}.weight"] for out in found]
    widths = np.array([[config.layers[layer].mixed_size] for layer in layers])
    dtypes = held_dtypes(reader, names, by_layer)
    return empty_blocks(reader, dtypes, config.hidden_size, widths)


def empty_projections(
    reader: TensorReader, config: ModelConfig, layers: range, by_layer: bool
) -> BlockRows:
    """Return arrays for q, k and v of the layers; `by_layer` as in `held_dtypes`."""
    names = [[f"{name}.weight" for name in _projections(config, layer)[0]] for layer in layers]
    held = held_dtypes(reader, names, by_layer)
    dtypes: list[list[np.dtype]] = []
    heights = np.zeros((len(layers), max(map(len, held))), np.int64)
    for layer, of_layer, own in zip(layers, held, heights, strict=True):
        sizes = zip(of_layer, config.layers[layer].input_sizes, strict=True)
        runs = [(dtype, [*run]) for dtype, run in groupby(sizes, key=itemgetter(0))]
        dtypes.append([dtype for dtype, _ in runs])
        own[: len(runs)] = [sum(size for _, size in run) for _, run in runs]
    heights = heights[:, : max(map(len, dtypes))]
    return empty_blocks(reader, dtypes, heights, config.hidden_size)


def _projections(config: ModelConfig, layer: int) -> tuple[tuple[str, ...], str]:
    return projections(tensor_names(config).of_layer(layer), config.layers[layer])


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
        size = config.layers[layer].vectors[name]
        if name in ("sinks", "output_scale"):
            if size:
                stack[layer, :size] = reader.vector(
                    bare_name(reader, getattr(names, name)), (size,)
                )
            continue
        module = getattr(names, role)
        if role in ("qkv", "out"):
            continue
        if size and part == "weight":
            stack[layer, :size] = norm_weight(reader, config, module, size)
        elif size:
            stack[layer, :size] = reader.vector(f"{module}.{part}", (size,))
    if not config.qk_norm:
        reader.refuse(f"{names.qkv[0].rpartition('.')[0]}.q_norm.weight")


def bare_name(reader: TensorReader, name: str) -> str:
    """The tensor of a name without suffix, which a GGUF file's has."""
    with_suffix = f"{name}.weight"
    return with_suffix if reader.checkpoint.has(with_suffix) else name


def norm_weight(reader: TensorReader, config: ModelConfig, name: str, size: int) -> np.ndarray:
    """Return a norm's weights (size,) float32: the tensor's + config.norm_offset, or all ones.

    A norm without a name has no tensor.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    if not name or not config.norm_affine:
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
    spec, first = config.layers[layer], 0
    modules, out = projections(names, spec)
    sizes = spec.input_sizes
    places, orders = tensor_places(weights.qkv, layer, sizes), _row_orders(config, layer)
    for name, num_rows, place, order in zip(modules, sizes, places, orders, strict=True):
        part = slice(first, first + num_rows)
        first += num_rows
        others = 0 if spec.recurrent is None else spec.recurrent.num_others
        reader.rows(f"{name}.weight", num_rows + others, place, order)
        if spec.vectors["qkv_bias"]:
            bias = reader.vector(f"{name}.bias", (num_rows,))
            weights.vectors.qkv_bias[layer, part] = bias if order is None else bias[order]
        else:
            reader.refuse(f"{name}.bias")
    if not out:
        return
    hidden = config.hidden_size
    reader.rows(f"{out}.weight", hidden, weights.out.matrix(layer))
    if config.out_bias:
        weights.vectors.out_bias[layer] = reader.vector(f"{out}.bias", (hidden,))
    else:
        reader.refuse(f"{out}.bias")


def projections(names: LayerNames, spec: LayerSpec) -> tuple[tuple[str, ...], str]:
    """Return the modules of a layer's `input_sizes`, and of its output projection."""
    if spec.recurrent is None or names.recurrent is None:
        return names.qkv, names.out
    return names.recurrent.inputs, names.recurrent.out


def _row_orders(config: ModelConfig, layer: int) -> list[np.ndarray | None]:
    """Return the order of rows of each tensor of `input_sizes`; None: as they are."""
    spec = config.layers[layer]
    orders: list[np.ndarray | None] = [None] * len(spec.input_sizes)
    if spec.recurrent is not None:
        if config.fused_recurrent or spec.recurrent.kind == "mamba":
            orders[0] = recurrent_row_ids(spec.recurrent)
    elif spec.attention.has_gate:  # a head's query, its gate, the next head's query
        own = spec.attention
        heads = np.arange(2 * own.heads_size, dtype=np.int32).reshape(own.num_heads, 2, -1)
        orders[0] = heads.swapaxes(0, 1).ravel()
    elif config.fused_qkv == "grouped":
        orders[0] = _fused_row_ids(config)
    elif config.latent is not None:
        orders[1] = key_row_ids(config, layer)
        if not config.latent.query_rank:
            orders[0] = query_row_ids(config, layer)
    elif config.interleaved_rope:
        dim, rope = spec.attention.head_dim, config.ropes[spec.attention.rope]
        head = rotated_row_ids(config, dim, rope)
        for index in (0, 1):
            starts = np.arange(0, spec.input_sizes[index], dim, dtype=np.int32)
            orders[index] = (starts[:, None] + head).ravel()
    return orders


def _fused_row_ids(config: ModelConfig) -> np.ndarray:
    """Return the row of Falcon's query_key_value that holds each row of q | k | v.

    The fused rows are, for each KV head, its query heads, then its key, then its value: one group
    with multi_query, and one group a head in the oldest layout.
    """
    per_group = config.num_heads // config.num_kv_heads + 2
    rows = np.arange(config.most_inputs, dtype=np.int32)
    groups = rows.reshape(config.num_kv_heads, per_group, config.head_dim)
    return np.concatenate([groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()])
