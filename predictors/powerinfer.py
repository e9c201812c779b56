"""Predictors in PowerInfer's formats: among a checkpoint's weights, or a folder of .pt files.

TurboSparse-Mistral and PowerInfer's GGUF files have them in the checkpoint; other models have a
folder with one model_<layer>.pt a layer. A layer has two matrices, fc1 (r, d) and fc2 (n_ff, r),
applied to the residual stream before the FFN's norm. A neuron is expected to fire where
fc2 @ relu(fc1 @ residual) exceeds powerinfer.sparse_threshold, 0 where the file has none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, CheckpointError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.torch_file import TorchFile
from hotcold.model.gguf.file import open_gguf
from hotcold.model.gguf.file_names import is_gguf
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor_file import Predictors

_THRESHOLD_KEY = "powerinfer.sparse_threshold"


def has_predictors(path: Path, config: ModelConfig) -> bool:
    """Whether the model's checkpoint has predictors; those of experts are part of the model."""
    return config.experts is None and Checkpoint(path).has(_tensor_names(config, 0)[0])


def checkpoint_predictors(path: Path, config: ModelConfig) -> Predictors:
    """Return the predictors in the model's checkpoint.

    Errors:  CheckpointError for one that is missing, of another shape or not finite
    """
    checkpoint, threshold = Checkpoint(path), _threshold(path)
    layers = []
    for layer in range(config.num_layers):
        fc1, fc2 = (_of_checkpoint(checkpoint, name) for name in _tensor_names(config, layer))
        if misfit := _misfit(config, fc1, fc2):
            raise CheckpointError(
                f"{checkpoint.path}: layer {layer} has a predictor of {misfit}; download it again"
            )
        layers.append(_lowrank_layer(fc1, fc2, threshold))
    return Predictors(layers, "residual")


def import_powerinfer(folder: Path, config: ModelConfig) -> Predictors:
    """Read a folder of predictors, by layer number. Nothing in the files is executed.

    Errors:  ArtifactError where a layer is missing or has another shape; CheckpointError where a
             file is damaged or holds anything but tensors
    """
    layers = []
    for layer in range(config.num_layers):
        path = folder / f"model_{layer}.pt"
        if not path.is_file():
            raise ArtifactError(
                f"{path}: is missing; give the folder with one model_<layer>.pt a layer"
            )
        file = TorchFile(path)
        fc1, fc2 = (_of_folder(file, name) for name in ("fc1.weight", "fc2.weight"))
        if misfit := _misfit(config, fc1, fc2):
            raise ArtifactError(f"{path}: has {misfit}; it belongs to another model")
        layers.append(_lowrank_layer(fc1, fc2))
    beyond = folder / f"model_{config.num_layers}.pt"
    if beyond.exists():
        raise ArtifactError(
            f"{beyond}: is for a layer beyond this model's {config.num_layers}; the predictors "
            "belong to another model"
        )
    return Predictors(layers, "residual")


def _tensor_names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in tensor_names(config).of_layer(layer).predictor)


def _threshold(path: Path) -> float:
    if not is_gguf(path):
        return 0.0
    value = open_gguf(path).metadata.get(_THRESHOLD_KEY, 0.0)
    if not isinstance(value, float) or not np.isfinite(value):
        raise CheckpointError(f"{path}: {_THRESHOLD_KEY} is {value!r}; download it again")
    return value


def _of_checkpoint(checkpoint: Checkpoint, name: str) -> np.ndarray:
    values = to_float32(checkpoint.array(name))
    checkpoint.release(name)
    if values.ndim != 2 or not np.isfinite(values).all():
        what = "holds NaN or infinity" if values.ndim == 2 else "is no matrix"
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} {what}; download it again")
    return values


def _of_folder(file: TorchFile, name: str) -> np.ndarray:
    entry = file.entries.get(name)
    if entry is None or len(entry.shape) != 2 or entry.format_name not in ("F32", "F16", "BF16"):
        raise ArtifactError(
            f"{file.path}: has no matrix {name}; it is no predictor of PowerInfer's"
        )
    values = to_float32(file.array(name))
    if not np.isfinite(values).all():
        raise ArtifactError(f"{file.path}: {name} holds NaN or infinity; download it again")
    return values


def _misfit(config: ModelConfig, fc1: np.ndarray, fc2: np.ndarray) -> str:
    """What is wrong with the matrices' shapes; "" where they fit the model."""
    if fc1.shape[1] == config.hidden_size and fc2.shape == (config.ffn_size, fc1.shape[0]):
        return ""
    return (
        f"fc1 {fc1.shape} and fc2 {fc2.shape}, which do not fit a model of hidden size "
        f"{config.hidden_size} with {config.ffn_size} neurons a layer"
    )


def _lowrank_layer(fc1: np.ndarray, fc2: np.ndarray, threshold: float = 0.0) -> LowRankLayer:
    scales = np.ones(fc1.shape[0], np.float32)
    thresholds = np.full(fc2.shape[0], threshold, np.float32)
    return LowRankLayer(_float16(fc1), scales, _float16(fc2.T), thresholds)


def _float16(values: np.ndarray) -> np.ndarray:
    largest = np.finfo(np.float16).max
    rounded = np.clip(values, -largest, largest).astype(np.float16)
    return np.ascontiguousarray(rounded).view(np.uint16)
