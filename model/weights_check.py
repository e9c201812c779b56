"""What a checkpoint's headers tell before any weight is read: whether all tensors are there, in
the shapes that config.json asks for, and in which format they are stored.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model.checkpoint import Checkpoint
from model.config import ModelConfig, WeightDtype
from model.tensor_names import tensor_names
from model.tensor_reader import TensorReader
from model.weights_attention import read_attention
from model.weights_embedding import read_embedding, read_head
from model.weights_ffn import read_ffn

_DTYPE_NAMES: dict[np.dtype, WeightDtype] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.uint16): "float16",
    np.dtype(np.int16): "bfloat16",
}


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Ask for every tensor that loading will ask for; only headers are read.

    Errors:  CheckpointError for a tensor that is missing or misshapen, or that config.json leaves
             no place for
    """
    with _HeaderReader(checkpoint) as reader:
        read_attention(reader, config)
        no_neurons = [np.empty(0, np.int32)] * config.num_layers
        read_ffn(reader, config, no_neurons, include_down_bias=True)
        read_embedding(reader, config)
        read_head(reader, config)


def stored_config(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Return `config` with the dtype of the checkpoint's first projection.

    config.json may name another one, or none, and is then read as float32.
    Errors:  CheckpointError where that tensor is missing or of an unsupported format
    """
    names = tensor_names(config)
    dtype = checkpoint.dtype(f"{names.layer.format(0)}{names.qkv[0]}.weight")
    return replace(config, dtype=_DTYPE_NAMES[dtype])


class _HeaderReader(TensorReader):
    """Checks names and shapes as `TensorReader` does; its arrays are zeros without memory."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def vector(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.require(name, shape)
        return self.empty(shape, np.dtype(np.float32))

    def mapped(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.require(name, shape)
        return self.empty(shape, self.dtype(name))

    def rows(
        self, name: str, num_rows: int, dst: np.ndarray, row_ids: np.ndarray | None = None
    ) -> None:
        self.require(name, (num_rows, dst.shape[1]))

    def columns(self, name: str, num_columns: int, dst: np.ndarray, column_ids: np.ndarray) -> None:
        self.require(name, (dst.shape[1], num_columns))
