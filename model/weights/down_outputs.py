"""Down projections as files have them, a row for each output: where no neuron is chosen before.

By neurons (`model.weights.ffn`) the numbers of ggml's blocks have to be quantized again, because
blocks lie along outputs' rows. As they are, they keep their bits and take no more of them.
"""

from __future__ import annotations

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.layer_rows import empty_rows, tensor_places
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.formats import is_blocks
from hotcold.numba_kernels.layer_rows import LayerRows
from hotcold.numba_kernels.load.convert import to_float32

UNIT = 256  # neurons, at multiples of which rows are cut: whole blocks of every format
_ROWS_AT_ONCE = 64


def num_units(config: ModelConfig) -> int:
    """Return how many parts a layer's neurons can be cut into at most."""
    return -(-config.ffn_size // UNIT)


def has_down_outputs(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether the model's down projections are rows of blocks for outputs.

    Errors:  CheckpointError for a tensor that is missing or of an unsupported format
    """
    names = [_name(config, layer) for layer in range(config.num_layers)]
    return all(
        is_blocks(checkpoint.dtype(name)) and not checkpoint.is_by_neurons(name) for name in names
    )


def empty_down_outputs(reader: TensorReader, config: ModelConfig, num_neurons: int) -> LayerRows:
    """Return arrays for all layers' rows of so many neurons' weights."""
    tensors = [[(_name(config, layer), config.hidden_size)] for layer in range(config.num_layers)]
    return empty_rows(reader, tensors, num_neurons, by_layer=True)


def read_down_outputs(
    reader: TensorReader, config: ModelConfig, first: int, last: int
) -> LayerRows:
    """Read what the neurons first..last-1 of every layer add to each output.

    `first` is a multiple of UNIT, `last` too or the number of neurons.
    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    rows = empty_down_outputs(reader, config, last - first)
    for layer in range(config.num_layers):
        (place,) = tensor_places(rows, layer, [config.hidden_size])
        reader.row_parts(_name(config, layer), config.ffn_size, place, first)
    return rows


def down_lengths(rows: LayerRows) -> np.ndarray:
    """Return the lengths of what neurons weigh in all outputs, layer after layer, (L * N,) float32.

    Takes the floats of a few rows at a time.
    """
    lengths = []
    for layer in range(len(rows.first_rows)):
        (matrix,) = rows.parts(layer)
        squares = sum(
            np.square(to_float32(matrix[first : first + _ROWS_AT_ONCE])).sum(axis=0)
            for first in range(0, len(matrix), _ROWS_AT_ONCE)
        )
        lengths.append(np.sqrt(squares))
    return np.concatenate(lengths).astype(np.float32)


def _name(config: ModelConfig, layer: int) -> str:
    return f"{tensor_names(config).of_layer(layer).down}.weight"
