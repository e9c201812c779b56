"""Checks a checkpoint's headers before any weight is read: names, shapes and formats of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import MatrixKind, ModelConfig
from hotcold.model.config.weight_formats import dtype_name, requested_dtype, require_whole_groups
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import AttentionWeights, empty_projections, read_attention
from hotcold.model.weights.down_outputs import empty_down_outputs, sizes_of_blocks
from hotcold.model.weights.embedding import HeadWeights, head_name, read_embedding, read_head
from hotcold.model.weights.expert_predictors import predictor_ranks
from hotcold.model.weights.ffn import FfnWeights, read_ffn
from hotcold.model.weights.ffn_tensors import ffn_tensors
from hotcold.model.weights.tensor_reader import RowPart, TensorReader
from hotcold.numba_kernels.formats import WeightDtype, row_width


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Check every tensor that loading will read; only headers are read.

    Errors:  CheckpointError for a tensor that is missing or misshapen, or that config.json does not
             allow for
    """
    with _HeaderReader(checkpoint) as reader:
        read_attention(reader, config)
        no_neurons = [np.empty(0, np.int32)] * config.num_layers
        read_ffn(reader, config, no_neurons, include_down_bias=True)
        read_embedding(reader, config)
        read_head(reader, config)


def stored_config(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: str = "",
    by_layer: bool = True,
    down_transposed: bool = False,
) -> ModelConfig:
    """Return `config` with the dtypes that matrices are loaded in: `dtype`, or as they are stored.

    The dtype is that of the checkpoint's first projection, whatever config.json says. Each kind of
    matrices may have another, and with `by_layer`, which a GPU cannot use, each layer's matrices
    (`empty_rows`). With `down_transposed` down projections are those of `read_down_outputs`.
    Errors:  CheckpointError where the first projection is missing or of an unsupported format;
             UsageError for an unknown dtype
    """
    layer, ffn = tensor_names(config).of_layer(0), ffn_tensors(checkpoint, config, 0)
    firsts: dict[MatrixKind, str] = {
        "qkv": f"{layer.qkv[0]}.weight",
        "out": f"{layer.out}.weight",
        "gate": ffn.gate[0].name,
        "down": ffn.down[0].name,
        "head": head_name(checkpoint, config),
    }
    means: dict[MatrixKind, float] = {}
    down_formats: tuple[tuple[WeightDtype, ...], ...] = ()
    with _HeaderReader(checkpoint, dtype=requested_dtype(dtype)) as reader:
        loaded = {kind: reader.loaded_dtype(name) for kind, name in firsts.items()}
        projections = empty_projections(reader, config, range(config.num_layers), by_layer)
        loaded["qkv"] = projections.first.dtype
        if down_transposed:
            sizes = sizes_of_blocks(config)
            down = empty_down_outputs(reader, config, sizes[:, :, None])
            means["down"] = down.nbytes / int(sizes.sum())
            loaded["down"] = down.first.dtype
            down_formats = tuple(
                tuple(
                    dtype_name(down.dtype_of(at, block))
                    for block in range(len(layer.ffn.block_sizes))
                )
                for at, layer in enumerate(config.layers)
            )
    if checkpoint.quantized_dtype is None:
        widths = config.hidden_size, config.attention_size, config.embed_size
        for found in set(loaded.values()):
            require_whole_groups(found, *widths)
    if config.experts is not None and config.experts.has_predictors:
        ranks = predictor_ranks(checkpoint, config)
        mean = float(ranks[ranks > 0].mean())
        config = replace(config, experts=replace(config.experts, mean_predictor_rank=mean))
    own = dtype_name(loaded["qkv"])
    names = {kind: dtype_name(found) for kind, found in loaded.items()}
    others = tuple((kind, name) for kind, name in names.items() if name != own)
    if projections.second.size:
        means["qkv"] = projections.nbytes / (config.num_layers * config.qkv_rows)
    return replace(
        config,
        dtype=own,
        other_dtypes=others,
        mean_row_bytes=tuple(means.items()),
        down_formats=down_formats,
    )


def weight_shapes(
    checkpoint: Checkpoint, config: ModelConfig, neuron_ids: Sequence[np.ndarray], dtype: str = ""
) -> tuple[AttentionWeights, HeadWeights, FfnWeights]:
    """Return a GPU's weights in shape and dtype: zeros that take no memory.

    Errors:  CheckpointError, UsageError as of loading
    """
    with _HeaderReader(checkpoint, dtype=requested_dtype(dtype)) as reader:
        ffn = read_ffn(reader, config, neuron_ids, include_down_bias=True)
        attention = read_attention(reader, config, by_layer=False)
        return attention, read_head(reader, config), ffn


class _HeaderReader(TensorReader):
    """Checks names and shapes as `TensorReader` does, and returns zeros that take no memory."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def vector(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.require_floats(name, shape)
        return self.empty(shape, np.dtype(np.float32))

    def mapped(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.require_floats(name, shape)
        return self.empty(shape, self.checkpoint.dtype(name))

    def rows(
        self,
        name: str,
        num_rows: int,
        dst: np.ndarray,
        row_ids: np.ndarray | None = None,
        stack: int = 0,
    ) -> None:
        self.require_rows(name, num_rows, row_width(dst.dtype, dst.shape[1]), stack)

    def row_parts(self, name: str, shape: tuple[int, ...], parts: Sequence[RowPart]) -> None:
        self.require_matrices(name, shape)

    def columns(
        self,
        name: str,
        num_columns: int,
        dst: np.ndarray,
        column_ids: np.ndarray,
        stack: int = 0,
        index: int = 0,
    ) -> None:
        self.require_columns(name, row_width(dst.dtype, dst.shape[1]), num_columns, stack)
