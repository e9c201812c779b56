"""Feed-forward layers: any subset of each layer's neurons, each neuron one row.

`FfnWeights` has down transposed, a row a neuron; `model/weights/down_outputs.py` a row an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.expert_predictors import read_predictors
from hotcold.model.weights.ffn_tensors import NeuronRows, ffn_tensors
from hotcold.model.weights.tensor_reader import (
    OnBytes,
    TensorReader,
    Touch,
    empty_blocks,
    held_dtypes,
)
from hotcold.numba_kernels.block_rows import BlockRows
from hotcold.numba_kernels.ffn_arrays import ExpertPredictors, ShardStripes, starts_of


@dataclass
class FfnWeights:
    """N neurons of L layers, each layer's in B blocks.

    Block b of layer l has rows starts[l, b]:starts[l, b + 1] of each array.
    In the two-matrix FFN of OPT and Falcon the first matrix is `gate`: its row decides whether the
    neuron fires; `up` is then empty.
    """

    starts: np.ndarray  # (L, B + 1) int64; starts[l, B] == starts[l + 1, 0]
    neuron_ids: np.ndarray  # (N,) int32, ids within the layer, block after block
    gate: np.ndarray  # (N, d) bits
    up: np.ndarray  # (N, d) bits, or (0, d)
    down: np.ndarray  # (N, d) bits, neuron-major
    gate_bias: np.ndarray  # (N,) float32, or (0,)
    up_bias: np.ndarray  # (N,) float32, or (0,)
    down_bias: np.ndarray  # (L, B, d) float32, or (L, B, 0)
    predictors: ExpertPredictors  # of experts that have some
    stripes: ShardStripes = field(default_factory=ShardStripes)

    def part(self, layer: int) -> slice:
        """The rows of a layer."""
        return slice(int(self.starts[layer, 0]), int(self.starts[layer, -1]))


def load_ffn(
    checkpoint: Checkpoint,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    *,
    include_down_bias: bool,
    dtype: str = "",
    on_bytes: OnBytes | None = None,
    touch: Touch | None = None,
    max_rows: int | None = None,
) -> FfnWeights:
    """Load the neurons `neuron_ids[l]` (int32, in [0, ffn_sizes[l])) of every layer l.

    Of the services that share a layer only one adds `down_bias`. `dtype`, such as "q8", quantizes
    gate, up and down. `touch` gets each new matrix before it is filled. `max_rows`: as
    `TensorReader`.
    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite;
             UsageError for an unknown dtype;
             ValueError unless there are int32 ids in range for each layer
    """
    with TensorReader(checkpoint, on_bytes, requested_dtype(dtype), touch, max_rows) as reader:
        return read_ffn(reader, config, neuron_ids, include_down_bias)


def load_ffn_biases(
    checkpoint: Checkpoint,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    include_down_bias: bool,
    dtype: str = "",
) -> FfnWeights:
    """`load_ffn` without gate, up and down, which have no rows: a neuron store reads them."""
    ids = _checked_ids(config, neuron_ids)
    with TensorReader(checkpoint, None, requested_dtype(dtype)) as reader:
        weights = _empty_ffn(reader, config, ids, include_down_bias, has_rows=False)
        for layer in range(config.num_layers if config.ffn_bias else 0):
            _load_biases(reader, config, weights, layer)
    return weights


def load_rows(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, role: Literal["gate", "up"]
) -> tuple[np.ndarray, np.ndarray]:
    """Load the gate rows of `layer` and their biases, which decide whether neurons fire; or up's.

    Shapes:  (N, d) bits, quantized where the checkpoint is; (N,) float32 or (0,)
    Errors:  CheckpointError as for `load_ffn`
    """
    found = vars(ffn_tensors(checkpoint, config, layer))
    tensors, biases = found[role], found[f"{role}_bias"]
    size = config.ffn_sizes[layer]
    ids = np.arange(size, dtype=np.int32)
    blocks = _blocks(config, layer, ids)
    with TensorReader(checkpoint, None) as reader:
        rows = reader.matrix((size, config.hidden_size), tensors[0].name)
        with reader.together():
            _copy_rows(reader, tensors, rows, ids, blocks)
        bias = np.empty(size if biases else 0, np.float32)
        _copy_biases(reader, biases, bias, ids, blocks)
        return rows, bias


def read_ffn(
    reader: TensorReader,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    include_down_bias: bool,
    has_matrices: bool = True,
) -> FfnWeights:
    """`load_ffn` with a given reader; without `has_matrices` gate, up and down have no rows."""
    ids = _checked_ids(config, neuron_ids)
    weights = _empty_ffn(reader, config, ids, include_down_bias, has_rows=has_matrices)
    for layer in range(config.num_layers):
        _load_layer(reader, config, weights, layer, has_matrices)
    return weights


def read_gates(
    reader: TensorReader, config: ModelConfig, weights: FfnWeights
) -> tuple[BlockRows, BlockRows]:
    """Read gate and up rows of the neurons of `weights`, in the formats of the tensors.

    Errors:  CheckpointError as of `load_ffn`
    """
    gates, ups = empty_gates(reader, config, np.diff(weights.starts))
    for layer in range(config.num_layers):
        tensors = ffn_tensors(reader.checkpoint, config, layer)
        ids = weights.neuron_ids[weights.part(layer)]
        if not ids.size:
            continue
        blocks = _blocks(config, layer, ids)
        with reader.together():
            for rows, own in ((gates, tensors.gate), (ups, tensors.up)):
                for tensor in own:
                    dst = rows.of_blocks(layer, tensor.block, tensor.block + tensor.num_blocks)
                    _copy_tensor(reader, tensor, dst, ids, blocks)
    return gates, ups


def ffn_layers(
    reader: TensorReader,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    layers: Sequence[int] | None = None,
    has_matrices: bool = True,
) -> Iterator[FfnWeights]:
    """Yield the weights of one layer after another: its neurons, and its down bias.

    For weights that are sent on: the process never holds more than one layer. `layers`: all, or
    those given. Without `has_matrices` gate, up and down have no rows.
    Errors:  those of `load_ffn`
    """
    ids = _checked_ids(config, neuron_ids)
    none = np.empty(0, np.int32)
    for layer in range(config.num_layers) if layers is None else layers:
        alone = [ids[layer] if other == layer else none for other in range(config.num_layers)]
        weights = _empty_ffn(reader, config, alone, True, has_matrices)
        _load_layer(reader, config, weights, layer, has_matrices)
        yield weights


def _checked_ids(config: ModelConfig, neuron_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
    if len(neuron_ids) != config.num_layers:
        raise ValueError(f"neuron ids of {len(neuron_ids)} layers for {config.num_layers} layers")
    for layer, ids in enumerate(neuron_ids):
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise ValueError(f"neuron ids of layer {layer} are no row of int32")
        size = config.ffn_sizes[layer]
        if ids.size and (ids.min() < 0 or ids.max() >= size):
            raise ValueError(f"neuron ids of layer {layer} do not lie in [0, {size})")
        if (np.diff(_blocks_of(config, layer, ids)) < 0).any():
            raise ValueError(f"neuron ids of layer {layer} do not come block after block")
    return list(neuron_ids)


def _blocks_of(config: ModelConfig, layer: int, ids: np.ndarray) -> np.ndarray:
    """The block of each of these neurons."""
    ends = np.cumsum(config.layers[layer].ffn.block_sizes)
    return np.searchsorted(ends, ids, side="right")


@dataclass(frozen=True)
class _Blocks:
    """Where blocks begin, and the end: among a layer's neurons, and among those that are read."""

    neurons: np.ndarray
    rows: np.ndarray

    def part(self, tensor: NeuronRows, ids: np.ndarray) -> tuple[slice, np.ndarray]:
        """The rows that a tensor fills, and their neurons, counted from its first block's first."""
        first, last = tensor.block, tensor.block + tensor.num_blocks
        part = slice(int(self.rows[first]), int(self.rows[last]))
        return part, ids[part] - np.int32(self.neurons[first])


def _blocks(config: ModelConfig, layer: int, ids: np.ndarray) -> _Blocks:
    sizes = config.layers[layer].ffn.block_sizes
    counts = np.bincount(_blocks_of(config, layer, ids), minlength=len(sizes))
    return _Blocks(np.append(0, np.cumsum(sizes)), np.append(0, np.cumsum(counts)))


def _starts(config: ModelConfig, neuron_ids: Sequence[np.ndarray]) -> np.ndarray:
    """`FfnWeights.starts`; where a layer has fewer blocks than others, empty ones follow."""
    num_blocks = max(len(layer.ffn.block_sizes) for layer in config.layers)
    sizes = [
        np.bincount(_blocks_of(config, layer, ids), minlength=num_blocks)
        for layer, ids in enumerate(neuron_ids)
    ]
    return starts_of(np.array(sizes))


def _empty_ffn(
    reader: TensorReader,
    config: ModelConfig,
    ids: list[np.ndarray],
    include_down_bias: bool,
    has_rows: bool = True,
) -> FfnWeights:
    """Arrays for the neurons `ids`; predictors, which are few, have been read."""
    first = ffn_tensors(reader.checkpoint, config, 0)
    starts = _starts(config, ids)
    total, hidden, num_blocks = int(starts[-1, -1]), config.hidden_size, starts.shape[1] - 1
    num_rows = total if has_rows else 0

    def matrix(tensors: list[NeuronRows], num_rows: int) -> np.ndarray:
        offsets = np.append(starts[:, 0], total) if num_rows else None
        return reader.matrix((num_rows, hidden), (tensors or first.gate)[0].name, offsets)

    num_biases = total if config.ffn_bias else 0
    has_down_bias = include_down_bias and config.ffn_bias
    return FfnWeights(
        starts=starts,
        neuron_ids=np.concatenate(ids).astype(np.int32),
        gate=matrix(first.gate, num_rows),
        up=matrix(first.up, num_rows if config.has_gate else 0),
        down=matrix(first.down, num_rows),
        gate_bias=np.empty(num_biases, np.float32),
        up_bias=np.empty(num_biases if config.has_gate else 0, np.float32),
        down_bias=np.zeros(
            (config.num_layers, num_blocks, hidden if has_down_bias else 0), np.float32
        ),
        predictors=read_predictors(reader, config, ids, starts),
    )


def empty_gates(
    reader: TensorReader, config: ModelConfig, sizes: np.ndarray
) -> tuple[BlockRows, BlockRows]:
    """Return arrays for gate and up rows of sizes[l, b] neurons, in the formats of the tensors.

    A two-matrix FFN has no blocks of up rows.
    """
    tensors = [ffn_tensors(reader.checkpoint, config, layer) for layer in range(config.num_layers)]
    each = [(*own.gate, *own.up) for own in tensors]
    held = held_dtypes(reader, [[tensor.name for tensor in own] for own in each], by_layer=True)
    of_blocks = [
        [dtype for tensor, dtype in zip(own, dtypes, strict=True) for _ in range(tensor.num_blocks)]
        for own, dtypes in zip(each, held, strict=True)
    ]
    counts = [sum(tensor.num_blocks for tensor in own.gate) for own in tensors]
    gates, ups = (
        empty_blocks(reader, dtypes, sizes, config.hidden_size)
        for dtypes in (
            [own[:count] for own, count in zip(of_blocks, counts, strict=True)],
            [own[count:] or own for own, count in zip(of_blocks, counts, strict=True)],
        )
    )
    if not config.has_gate:
        ups = BlockRows(tuple(array[:0] for array in gates.arrays), gates.places[:, :0])
    return gates, ups


def _load_layer(
    reader: TensorReader,
    config: ModelConfig,
    weights: FfnWeights,
    layer: int,
    has_matrices: bool = True,
) -> None:
    tensors, part = ffn_tensors(reader.checkpoint, config, layer), weights.part(layer)
    ids = weights.neuron_ids[part]
    blocks = _blocks(config, layer, ids)
    for name in tensors.absent:
        reader.refuse(name)
    roles = [(tensors.gate, weights.gate), (tensors.down, weights.down), (tensors.up, weights.up)]
    with reader.together():
        for own, rows in roles[: (2 + config.has_gate) * has_matrices]:
            _copy_rows(reader, own, rows[part], ids, blocks)
    if config.ffn_bias:
        _load_biases(reader, config, weights, layer)


def _copy_rows(
    reader: TensorReader,
    tensors: list[NeuronRows],
    dst: np.ndarray,
    ids: np.ndarray,
    blocks: _Blocks,
) -> None:
    """Copy the rows of a layer's neurons `ids` from one role's tensors into `dst`."""
    for tensor in tensors:
        _copy_tensor(reader, tensor, dst[blocks.part(tensor, ids)[0]], ids, blocks)


def _copy_tensor(
    reader: TensorReader, tensor: NeuronRows, dst: np.ndarray, ids: np.ndarray, blocks: _Blocks
) -> None:
    """Copy the rows of those of a layer's neurons `ids` that a tensor has into `dst`."""
    part, neurons = blocks.part(tensor, ids)
    rows = tensor.rows_of(neurons)
    if not tensor.by_columns:
        reader.rows(tensor.name, tensor.num_rows, dst, rows, tensor.stack)
        return
    for index in range(tensor.num_blocks):
        first, end = blocks.rows[tensor.block + index : tensor.block + index + 2] - part.start
        columns = rows[first:end] - np.int32(index * tensor.num_rows)
        reader.columns(tensor.name, tensor.num_rows, dst[first:end], columns, tensor.stack, index)


def _copy_biases(
    reader: TensorReader,
    tensors: list[NeuronRows],
    dst: np.ndarray,
    ids: np.ndarray,
    blocks: _Blocks,
) -> None:
    for tensor in tensors:
        part, neurons = blocks.part(tensor, ids)
        shape = (tensor.stack, tensor.num_rows) if tensor.stack else (tensor.num_rows,)
        values = reader.vector(tensor.name, shape)
        dst[part] = values.reshape(-1)[tensor.rows_of(neurons)]


def _load_biases(
    reader: TensorReader, config: ModelConfig, weights: FfnWeights, layer: int
) -> None:
    tensors, part = ffn_tensors(reader.checkpoint, config, layer), weights.part(layer)
    ids, hidden = weights.neuron_ids[part], config.hidden_size
    blocks = _blocks(config, layer, ids)
    _copy_biases(reader, tensors.gate_bias, weights.gate_bias[part], ids, blocks)
    _copy_biases(reader, tensors.up_bias, weights.up_bias[part], ids, blocks)
    for name, block, stack in tensors.down_biases if weights.down_bias.size else ():
        last = block + max(1, stack)
        values = reader.vector(name, (stack, hidden) if stack else (hidden,))
        weights.down_bias[layer, block:last] = values
