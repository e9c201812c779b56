"""Predictors that lie in a checkpoint, as PowerInfer's models bring theirs.

TurboSparse-Mistral has them among its weights, PowerInfer's GGUF files beside them: a layer's fc1
(r, d) and fc2 (n_ff, r), as of `predictors/powerinfer.py`. A neuron is expected to fire where
fc2 @ relu(fc1 @ residual) reaches powerinfer.sparse_threshold, 0 where nothing says otherwise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import CheckpointError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.gguf.file import open_gguf
from hotcold.model.gguf.names import is_gguf
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor_file import Predictors

_THRESHOLD_KEY = "powerinfer.sparse_threshold"


def has_predictors(path: Path, config: ModelConfig) -> bool:
    """Whether the model's checkpoint brings predictors of its first layer."""
    return Checkpoint(path).has(_names(config, 0)[0])


def checkpoint_predictors(path: Path, config: ModelConfig) -> Predictors:
    """The predictors in the model's checkpoint, one a layer.

    Errors:  CheckpointError for one that is missing, of another shape or not finite
    """
    checkpoint, threshold = Checkpoint(path), _threshold(path)
    layers = [_layer(checkpoint, config, i, threshold) for i in range(config.num_layers)]
    return Predictors(layers, "residual")


def _names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in tensor_names(config).of_layer(layer).predictor)


def _layer(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, threshold: float
) -> LowRankLayer:
    down, up = (_matrix(checkpoint, name) for name in _names(config, layer))
    if down.shape[1] != config.hidden_size or up.shape != (config.ffn_size, down.shape[0]):
        raise CheckpointError(
            f"{checkpoint.path}: layer {layer} has a predictor of fc1 {down.shape} and fc2 "
            f"{up.shape}, which do not fit a model of hidden size {config.hidden_size} with "
            f"{config.ffn_size} neurons a layer; download it again"
        )
    return lowrank_layer(down, up, threshold)


def _matrix(checkpoint: Checkpoint, name: str) -> np.ndarray:
    values = to_float32(checkpoint.array(name))
    checkpoint.release(name)
    if values.ndim != 2 or not np.isfinite(values).all():
        what = "holds NaN or infinity" if values.ndim == 2 else "is no matrix"
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} {what}; download it again")
    return values


def _threshold(path: Path) -> float:
    if not is_gguf(path):
        return 0.0
    value = open_gguf(path).metadata.get(_THRESHOLD_KEY, 0.0)
    if not isinstance(value, float) or not np.isfinite(value):
        raise CheckpointError(f"{path}: {_THRESHOLD_KEY} is {value!r}; download it again")
    return value


def lowrank_layer(down: np.ndarray, up: np.ndarray, threshold: float = 0.0) -> LowRankLayer:
    """PowerInfer's two matrices as a layer's predictor, in float16.

    Shapes:  down, its fc1, (r, d); up, its fc2, (N, r); float32
    """
    scales = np.ones(down.shape[0], np.float32)
    thresholds = np.full(up.shape[0], threshold, np.float32)
    return LowRankLayer(_float16(down), scales, _float16(up.T), thresholds)


def _float16(values: np.ndarray) -> np.ndarray:
    largest = np.finfo(np.float16).max
    rounded = np.clip(values, -largest, largest).astype(np.float16)
    return np.ascontiguousarray(rounded).view(np.uint16)
