"""Checks a checkpoint's headers before any weight is read: names, shapes and formats of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import BlockFormats, MatrixKind, ModelConfig
from hotcold.model.config.weight_formats import dtype_name, requested_dtype, require_whole_groups
from hotcold.model.errors import CheckpointError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import (
    AttentionWeights,
    empty_outputs,
    empty_projections,
    projections,
    read_attention,
)
from hotcold.model.weights.down_outputs import empty_down_outputs, sizes_of_blocks
from hotcold.model.weights.draft_layer import (
    has_draft_layer,
    read_draft_head,
    read_draft_inputs,
)
from hotcold.model.weights.embedding import HeadWeights, head_name, read_embedding, read_head
from hotcold.model.weights.expert_predictors import predictor_ranks
from hotcold.model.weights.ffn import FfnWeights, empty_gates, read_ffn
from hotcold.model.weights.ffn_tensors import ffn_tensors
from hotcold.model.weights.latent import empty_latent
from hotcold.model.weights.tensor_reader import RowPart, TensorReader
from hotcold.numba_kernels.block_rows import BlockRows
from hotcold.numba_kernels.formats import row_width


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Check every tensor that loading will read; only headers are read.

    Errors:  CheckpointError for a tensor that is missing or misshapen, or that config.json does not
             allow for
    """
    with _HeaderReader(checkpoint) as reader:
        _check_layers(reader, config)
        read_embedding(reader, config)
        read_head(reader, config)


def _check_layers(reader: TensorReader, config: ModelConfig) -> None:
    read_attention(reader, config)
    no_neurons = [np.empty(0, np.int32)] * config.num_layers
    read_ffn(reader, config, no_neurons, include_down_bias=True)


def why_no_drafts(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """Why the model has no layer that drafts; "" where it has one. Only headers are read."""
    if not has_draft_layer(checkpoint, config):
        return "the model's files have no layer that drafts (MTP)"
    layer = config.draft_layer()
    try:
        with _HeaderReader(checkpoint) as reader:
            _check_layers(reader, layer)
            read_draft_inputs(reader, layer, read_embedding(reader, config))
            read_draft_head(reader, layer, read_head(reader, config))
    except CheckpointError as problem:
        return str(problem)
    return ""


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
    (`held_dtypes`). With `down_transposed` down projections are those of `read_down_outputs`, gate
    and up rows those of `read_gates`.
    Errors:  CheckpointError where the first projection is missing or of an unsupported format;
             UsageError for an unknown dtype
    """
    layer, ffn = tensor_names(config).of_layer(0), ffn_tensors(checkpoint, config, 0)
    inputs, out = projections(layer, config.layers[0])
    firsts: dict[MatrixKind, str] = {
        "qkv": f"{inputs[0]}.weight",
        "out": f"{out}.weight",
        "gate": ffn.gate[0].name,
        "down": ffn.down[0].name,
        "head": head_name(checkpoint, config),
    }
    if config.per_layer_size:
        firsts["per_layer"] = f"{layer.per_layer_gate}.weight"
    means: dict[MatrixKind, float] = {}
    block_formats: tuple[tuple[BlockFormats, ...], ...] = ()
    with _HeaderReader(checkpoint, dtype=requested_dtype(dtype)) as reader:
        loaded = {kind: reader.loaded_dtype(name) for kind, name in firsts.items()}
        layers, sizes = range(config.num_layers), sizes_of_blocks(config)
        latent = empty_latent(reader, config, layers, by_layer)._asdict()
        of_kinds: dict[MatrixKind, list[BlockRows]] = {
            "qkv": [empty_projections(reader, config, layers, by_layer)],
            "out": [empty_outputs(reader, config, layers, by_layer)],
        }
        of_kinds |= {role: [latent[role]] for role in config.latent_shapes if latent[role].nbytes}
        if down_transposed:
            gates, ups = of_kinds["gate"] = [*empty_gates(reader, config, sizes)]
            down = empty_down_outputs(reader, config, sizes[:, :, None])
            means["down"] = down.nbytes / int(sizes.sum())
            loaded["down"] = down.dtype_of(0)
            roles = gates, ups if config.has_gate else gates, down
            block_formats = tuple(
                tuple(
                    cast(BlockFormats, tuple(dtype_name(r.dtype_of(at, block)) for r in roles))
                    for block in range(len(layer.ffn.block_sizes))
                )
                for at, layer in enumerate(config.layers)
            )
    for kind, found in of_kinds.items():
        loaded[kind] = found[0].dtype_of(0)
        if len({dtype for rows in found for dtype in rows.dtypes}) > 1:
            num_rows = sum(int(rows.heights.sum()) for rows in found)
            means[kind] = sum(rows.nbytes for rows in found) / num_rows
    if checkpoint.quantized_dtype is None:
        widths = config.matrix_widths
        for dtype_held in set(loaded.values()):
            require_whole_groups(dtype_held, *widths)
    if config.experts is not None and config.experts.has_predictors:
        ranks = predictor_ranks(checkpoint, config)
        mean = float(ranks[ranks > 0].mean())
        config = replace(config, experts=replace(config.experts, mean_predictor_rank=mean))
    own = dtype_name(loaded["qkv"])
    names = {kind: dtype_name(held) for kind, held in loaded.items()}
    others = tuple((kind, name) for kind, name in names.items() if name != own)
    return replace(
        config,
        dtype=own,
        other_dtypes=others,
        mean_row_bytes=tuple(means.items()),
        block_formats=block_formats,
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

    def mapped(self, name: str, shape: tuple[int, ...], is_checked: bool = True) -> np.ndarray:
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

    def made_rows(
        self, name: str, make: Callable[[np.ndarray], np.ndarray], dst: np.ndarray
    ) -> None:
        self.checkpoint.dtype(name)

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
