"""Predictors within experts, which are a part of the model (TurboSparse-Mixtral)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import require_whole_groups
from hotcold.model.errors import CheckpointError, shown
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn_tensors import expert_layout
from hotcold.model.weights.tensor_reader import TensorReader, empty_blocks
from hotcold.numba_kernels.ffn_arrays import ExpertPredictors, no_predictors
from hotcold.numba_kernels.formats import Q8, is_quantized


def predictor_ranks(checkpoint: Checkpoint, config: ModelConfig) -> np.ndarray:
    """Return the rows of each expert's fc1: (L, E) int64, 0 in layers without experts.

    Errors:  CheckpointError for a tensor that is missing or is no matrix
    """
    assert config.experts is not None
    ranks = np.zeros((config.num_layers, config.experts.router.num_experts), np.int64)
    for layer in range(config.num_layers):
        for expert, (first, _) in enumerate(_names(checkpoint, config, layer)):
            shape = checkpoint.shape(first)
            if len(shape) != 2 or shape[0] == 0:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {checkpoint.shown_name(first)} has shape "
                    f"{shown(list(shape))}, and is no matrix; download it again"
                )
            ranks[layer, expert] = shape[0]
    return ranks


def read_predictors(
    reader: TensorReader,
    config: ModelConfig,
    neuron_ids: Sequence[np.ndarray],
    starts: np.ndarray,
) -> ExpertPredictors:
    """Read the predictors of a shard's neurons; blocks without neurons have none.

    In a quantized model they have 8 bits: what counts is the sign of a sum.

    Shapes:  neuron_ids[l] ids within layer l, block after block; starts as of `FfnWeights`
    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite;
             UsageError where rows are no whole groups
    """
    if config.experts is None or not config.experts.has_predictors:
        return no_predictors(config.num_layers)
    counts = np.diff(starts, axis=1)
    ranks = np.zeros(counts.shape, np.int64)
    found = predictor_ranks(reader.checkpoint, config)
    ranks[:, : found.shape[1]] = found
    held = np.where(counts > 0, ranks, 0)
    predictors = _empty(reader, config, held, counts)
    for layer, ids in enumerate(neuron_ids):
        size, first = config.experts.size, starts[layer, 0]
        with reader.together():
            for expert, names in enumerate(_names(reader.checkpoint, config, layer)):
                rank = int(ranks[layer, expert])
                part = slice(*predictors.inner_starts[layer, expert : expert + 2])
                reader.rows(names[0], rank, predictors.inner[part])
                own = ids[slice(*(starts[layer, expert : expert + 2] - first))]
                outer = predictors.outer.matrix(layer, expert)
                reader.require_rows(names[1], size, rank)
                if len(own):
                    reader.rows(names[1], size, outer, own - np.int32(expert * size))
    return predictors


def _empty(
    reader: TensorReader, config: ModelConfig, ranks: np.ndarray, counts: np.ndarray
) -> ExpertPredictors:
    """Arrays for predictors of ranks[l, b], of counts[l, b] neurons each."""
    ends = np.cumsum(ranks).reshape(ranks.shape)
    starts = np.concatenate([ends[:, :1] - ranks[:, :1], ends], axis=1)
    name = next(first for layer in range(config.num_layers)
                for first, _ in _names(reader.checkpoint, config, layer))  # fmt: skip
    dtype = reader.loaded_dtype(name)
    dtype = Q8 if is_quantized(dtype) else dtype
    require_whole_groups(dtype, *map(int, np.unique(ranks)))
    offsets = np.append(0, ends[:, -1])
    inner = reader.matrix((int(offsets[-1]), config.hidden_size), name, offsets, dtype)
    outer = empty_blocks(reader, [[dtype] * ranks.shape[1]] * len(ranks), counts, ranks)
    return ExpertPredictors(inner, starts.astype(np.int64), outer)


def _names(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> list[tuple[str, str]]:
    """The tensors fc1 and fc2 of each expert of a layer."""
    router = config.layers[layer].ffn.router
    if router is None:
        return []
    first, second = expert_layout(checkpoint, tensor_names(config).of_layer(layer)).predictor
    return [(first.format(e), second.format(e)) for e in range(router.num_experts)]
