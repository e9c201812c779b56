"""Imports predictors as PowerInfer publishes them: a folder with one model_<layer>.pt a layer.

Each holds fc1.weight (r, d) and fc2.weight (n_ff, r), applied to the residual stream before the
FFN's norm; a neuron is expected to fire where fc2 @ relu(fc1 @ residual) is above zero.
"""

from pathlib import Path

import numpy as np
import torch

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.torch_file import TorchFile
from hotcold.predictors.in_checkpoint import lowrank_layer
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor_file import Predictors


def import_powerinfer(folder: Path, config: ModelConfig) -> Predictors:
    """Read the folder, by layer number. Nothing in the files is executed.

    Errors:  ArtifactError where a layer is missing or has another shape; CheckpointError where a
             file is damaged or holds anything but tensors
    """
    layers = [_layer(folder / f"model_{i}.pt", config) for i in range(config.num_layers)]
    beyond = folder / f"model_{config.num_layers}.pt"
    if beyond.exists():
        raise ArtifactError(
            f"{beyond}: is for a layer that this model of {config.num_layers} layers has not; "
            "the predictors belong to another model"
        )
    return Predictors(layers, "residual")


def _layer(path: Path, config: ModelConfig) -> LowRankLayer:
    if not path.is_file():
        raise ArtifactError(
            f"{path}: is missing; give the folder with one model_<layer>.pt a layer"
        )
    file = TorchFile(path)
    down, up = (_matrix(file, name) for name in ("fc1.weight", "fc2.weight"))
    if down.shape[1] != config.hidden_size or up.shape != (config.ffn_size, down.shape[0]):
        raise ArtifactError(
            f"{path}: has fc1 {down.shape} and fc2 {up.shape}, which do not fit a model of hidden "
            f"size {config.hidden_size} with {config.ffn_size} neurons a layer; it belongs to "
            "another model"
        )
    return lowrank_layer(down, up)


def _matrix(file: TorchFile, name: str) -> np.ndarray:
    entry = file.entries.get(name)
    if entry is None or len(entry.shape) != 2 or entry.format_name not in ("F32", "F16", "BF16"):
        raise ArtifactError(
            f"{file.path}: has no matrix {name}; it is no predictor of PowerInfer's"
        )
    bits = file.array(name)
    if bits.dtype == np.float32:
        found = bits
    elif bits.dtype == np.uint16:
        found = bits.view(np.float16).astype(np.float32)
    else:
        found = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    if not np.isfinite(found).all():
        raise ArtifactError(f"{file.path}: {name} holds NaN or infinity; download it again")
    return found
