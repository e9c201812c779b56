"""Down projections with a row for each output, as files of ggml's blocks have them.

Where no predictor chooses neurons they stay so: ggml's blocks lie along these rows, so to transpose
them is to quantize again, in more bits. Each block of neurons, an expert or a dense layer, has its
own matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn_tensors import ffn_tensors
from hotcold.model.weights.tensor_reader import (
    RowPart,
    TensorReader,
    empty_blocks,
    held_dtypes,
)
from hotcold.numba_kernels.block_rows import BlockRows
from hotcold.numba_kernels.formats import QUANT_GROUP, is_blocks, is_quantized
from hotcold.numba_kernels.load.convert import to_float32

UNIT = 256  # neurons: a multiple is whole blocks of every format, where rows can be cut
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class _Tensor:
    """The tensor of a block's down rows, and which of its `count` stacked matrices they are."""

    name: str
    index: int = 0
    count: int = 0  # 0: it is not stacked


def sizes_of_blocks(config: ModelConfig) -> np.ndarray:
    """Return the neurons of each layer's blocks (L, B) int64; 0 where a layer has fewer blocks."""
    sizes = [layer.ffn.block_sizes for layer in config.layers]
    found = np.zeros((len(sizes), max(map(len, sizes))), np.int64)
    for layer, own in enumerate(sizes):
        found[layer, : len(own)] = own
    return found


def has_down_outputs(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether down projections are ggml's blocks, with a row for each output.

    Some may be floats, of whole groups: beside blocks these are in 8 bits.
    Errors:  CheckpointError for a tensor that is missing or of an unsupported format
    """
    names = {
        tensor.name: checkpoint.dtype(tensor.name)
        for layer in range(config.num_layers)
        for tensor in _tensors(checkpoint, config, layer)
    }
    sizes = {size for layer in config.layers for size in layer.ffn.block_sizes}
    return any(map(is_blocks, names.values())) and all(
        (is_blocks(dtype) or (not is_quantized(dtype) and not any(n % QUANT_GROUP for n in sizes)))
        and not checkpoint.is_by_neurons(name)
        for name, dtype in names.items()
    )


def empty_down_outputs(reader: TensorReader, config: ModelConfig, sizes: np.ndarray) -> BlockRows:
    """Return arrays for all blocks' down rows, each block in parts of sizes[l, b, i] neurons.

    Shapes:  sizes (L, B, n) int64; places of the result (L, B * n, 4)
    """
    tensors = [_tensors(reader.checkpoint, config, layer) for layer in range(config.num_layers)]
    names = [[tensor.name for tensor in of_layer] for of_layer in tensors]
    dtypes, flat = held_dtypes(reader, names, by_layer=True), sizes.reshape(len(sizes), -1)
    return empty_blocks(reader, dtypes, config.hidden_size, flat, num_parts=sizes.shape[2])


def read_down_outputs(
    reader: TensorReader,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    runs: np.ndarray | None = None,
) -> BlockRows:
    """Read the weights of neurons `neuron_ids[l]` of every layer l, a row for each output.

    Those of a block are a run, or the `runs` (L, B, n, 2) int64, which each have a matrix: first
    neuron and end within the block. These are whole blocks of the formats, or the block's ends.
    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    if runs is None:
        runs = _runs(config, neuron_ids)[:, :, None]
    num_runs = runs.shape[2]
    rows = empty_down_outputs(reader, config, runs[..., 1] - runs[..., 0])
    for layer in range(config.num_layers):
        sizes = config.layers[layer].ffn.block_sizes
        parts: dict[tuple[str, int, int], list[RowPart]] = {}
        for block, tensor in enumerate(_tensors(reader.checkpoint, config, layer)):
            for place, (first, _) in enumerate(runs[layer, block].tolist()):
                own = rows.matrix(layer, block * num_runs + place)
                if len(own):
                    key = tensor.name, sizes[block], tensor.count
                    parts.setdefault(key, []).append(RowPart(tensor.index, own, first))
        with reader.together():
            for (name, width, count), found in parts.items():
                shape = config.hidden_size, width
                reader.row_parts(name, (count, *shape) if count else shape, found)
    return rows


def down_lengths(rows: BlockRows) -> np.ndarray:
    """Return the length of each neuron's down vector, layer after layer, block after block.

    Dtypes:  float32
    """
    matrices = [rows.matrix(*index) for index in np.ndindex(*rows.places.shape[:2])]
    lengths = [column_lengths(matrix) for matrix in matrices if len(matrix)]
    return np.concatenate([np.empty(0, np.float32), *lengths])


def column_lengths(matrix: np.ndarray) -> np.ndarray:
    """Return the length of each column of rows (N, items) in any format.

    It converts a few rows at a time to float32.
    Dtypes:  float32
    """
    squares = sum(
        np.square(to_float32(matrix[first : first + _ROWS_AT_ONCE])).sum(axis=0)
        for first in range(0, len(matrix), _ROWS_AT_ONCE)
    )
    return np.sqrt(squares).astype(np.float32)


def _tensors(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> list[_Tensor]:
    """The tensors of a layer's blocks, in their order."""
    return [
        _Tensor(tensor.name, index, tensor.stack)
        for tensor in ffn_tensors(checkpoint, config, layer).down
        for index in range(tensor.num_blocks)
    ]


def _runs(config: ModelConfig, neuron_ids: Sequence[np.ndarray]) -> np.ndarray:
    """First and end of each block's run of neurons, counted within the block: (L, B, 2)."""
    runs = np.zeros((*sizes_of_blocks(config).shape, 2), np.int64)
    for layer, ids in enumerate(neuron_ids):
        begin = 0
        for block, size in enumerate(config.layers[layer].ffn.block_sizes):
            own = ids[(ids >= begin) & (ids < begin + size)] - begin
            if own.size:
                run = int(own[0]), int(own[-1]) + 1
                if (
                    own.size != run[1] - run[0]
                    or run[0] % UNIT
                    or (run[1] % UNIT and run[1] < size)
                ):
                    raise ValueError(f"neurons of block {block} of layer {layer} are no run")
                runs[layer, block] = run
            begin += size
    return runs
