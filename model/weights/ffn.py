"""Feed-forward layers: any subset of each layer's neurons, each neuron one row.

`FfnWeights` has down transposed, a row a neuron; `model/weights/down_outputs.py` a row an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.tensor_reader import (
    OnBytes,
    TensorReader,
    Touch,
)
from hotcold.numba_kernels.ffn_arrays import starts_of


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
) -> FfnWeights:
    """Load the neurons `neuron_ids[l]` (int32, in [0, ffn_sizes[l])) of every layer l.

    Of the services that share a layer only one adds `down_bias`. `dtype`, such as "q8", quantizes
    gate, up and down. `touch` gets each new matrix before it is filled.
    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite;
             UsageError for an unknown dtype;
             ValueError unless there are int32 ids in range for each layer
    """
    with TensorReader(checkpoint, on_bytes, requested_dtype(dtype), touch) as reader:
        return read_ffn(reader, config, neuron_ids, include_down_bias)


def load_ffn_biases(
    checkpoint: Checkpoint,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    include_down_bias: bool,
) -> FfnWeights:
    """`load_ffn` without the matrices, which have no rows: a neuron store reads them."""
    ids = _checked_ids(config, neuron_ids)
    with TensorReader(checkpoint, None) as reader:
        weights = _empty_ffn(reader, config, ids, include_down_bias, has_rows=False)
        for layer in range(config.num_layers if config.ffn_bias else 0):
            _load_biases(reader, config, weights, layer)
    return weights


def load_gate(
    checkpoint: Checkpoint, config: ModelConfig, layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Load the gate rows of `layer` and their biases, which decide whether neurons fire.

    Shapes:  (N, d) bits, quantized where the checkpoint is; (N,) float32 or (0,)
    Errors:  CheckpointError as for `load_ffn`
    """
    return _load_rows(checkpoint, config, tensor_names(config).of_layer(layer).gate, 0)


def load_up(
    checkpoint: Checkpoint, config: ModelConfig, layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Load up rows and their biases, which decide too with drelu; as `load_gate`."""
    name = tensor_names(config).of_layer(layer).up
    return _load_rows(checkpoint, config, name, _first_up_row(config))


def _load_rows(
    checkpoint: Checkpoint, config: ModelConfig, name: str, first: int
) -> tuple[np.ndarray, np.ndarray]:
    size = config.ffn_size  # of a layer without experts
    ids = np.arange(first, first + size, dtype=np.int32)
    with TensorReader(checkpoint, None) as reader:
        rows = reader.matrix((size, config.hidden_size), f"{name}.weight")
        reader.rows(f"{name}.weight", _stored_rows(config), rows, ids)
        if not config.ffn_bias:
            return rows, np.empty(0, np.float32)
        return rows, reader.vector(f"{name}.bias", (size,))


def read_ffn(
    reader: TensorReader,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    include_down_bias: bool,
    has_down: bool = True,
) -> FfnWeights:
    """`load_ffn` with a given reader; without `has_down` down has no rows."""
    ids = _checked_ids(config, neuron_ids)
    weights = _empty_ffn(reader, config, ids, include_down_bias, has_down=has_down)
    for layer in range(config.num_layers):
        _load_layer(reader, config, weights, layer, has_down)
    return weights


def ffn_layers(
    reader: TensorReader,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    layers: Sequence[int] | None = None,
) -> Iterator[FfnWeights]:
    """Yield the weights of one layer after another: its neurons, and its down bias.

    For weights that are sent on: the process never holds more than one layer. `layers`: all, or
    those given.
    Errors:  those of `load_ffn`
    """
    ids = _checked_ids(config, neuron_ids)
    none = np.empty(0, np.int32)
    for layer in range(config.num_layers) if layers is None else layers:
        alone = [ids[layer] if other == layer else none for other in range(config.num_layers)]
        weights = _empty_ffn(reader, config, alone, True)
        _load_layer(reader, config, weights, layer)
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
    has_down: bool = True,
) -> FfnWeights:
    names = tensor_names(config).of_layer(0)
    starts = _starts(config, ids)
    total, hidden, num_blocks = int(starts[-1, -1]), config.hidden_size, starts.shape[1] - 1
    num_rows = total if has_rows else 0

    def matrix(name: str, num_rows: int) -> np.ndarray:
        first = f"{name or names.gate}.weight"
        offsets = np.append(starts[:, 0], total) if num_rows else None
        return reader.matrix((num_rows, hidden), first, offsets)

    num_biases = total if config.ffn_bias else 0
    has_down_bias = include_down_bias and config.ffn_bias
    return FfnWeights(
        starts=starts,
        neuron_ids=np.concatenate(ids).astype(np.int32),
        gate=matrix(names.gate, num_rows),
        up=matrix(names.up, num_rows if config.has_gate else 0),
        down=matrix(names.down, num_rows if has_down else 0),
        gate_bias=np.empty(num_biases, np.float32),
        up_bias=np.empty(num_biases if config.has_gate else 0, np.float32),
        down_bias=np.zeros(
            (config.num_layers, num_blocks, hidden if has_down_bias else 0), np.float32
        ),
    )


def _stored_rows(config: ModelConfig) -> int:
    """Rows of the tensor that holds gate, or gate and up."""
    return config.ffn_size * (2 if config.fused_gate_up else 1)


def _first_up_row(config: ModelConfig) -> int:
    return config.ffn_size if config.fused_gate_up else 0


def _load_layer(
    reader: TensorReader,
    config: ModelConfig,
    weights: FfnWeights,
    layer: int,
    has_down: bool = True,
) -> None:
    names = tensor_names(config).of_layer(layer)
    part = weights.part(layer)
    ids = weights.neuron_ids[part]
    size = config.ffn_size
    reader.rows(f"{names.gate}.weight", _stored_rows(config), weights.gate[part], ids)
    if has_down:
        reader.columns(f"{names.down}.weight", size, weights.down[part], ids)
    if config.has_gate:
        rows = ids + np.int32(_first_up_row(config))
        reader.rows(f"{names.up}.weight", _stored_rows(config), weights.up[part], rows)
    if not config.ffn_bias:
        reader.refuse(f"{names.gate}.bias")
        return
    _load_biases(reader, config, weights, layer)


def _load_biases(
    reader: TensorReader, config: ModelConfig, weights: FfnWeights, layer: int
) -> None:
    names, size = tensor_names(config).of_layer(layer), config.ffn_size
    part = weights.part(layer)
    ids = weights.neuron_ids[part]
    weights.gate_bias[part] = reader.vector(f"{names.gate}.bias", (size,))[ids]
    if config.has_gate:
        weights.up_bias[part] = reader.vector(f"{names.up}.bias", (size,))[ids]
    if weights.down_bias.size:
        weights.down_bias[layer, 0] = reader.vector(f"{names.down}.bias", (config.hidden_size,))
