"""Weights of norms, as they are multiplied with."""

from __future__ import annotations

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.tensor_reader import TensorReader


def norm_weight(reader: TensorReader, config: ModelConfig, name: str, size: int) -> np.ndarray:
    """Return a norm's weights (size,) float32: the tensor's + config.norm_offset, or all ones.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    if not config.norm_affine:
        return np.ones(size, np.float32)
    weight = reader.vector(f"{name}.weight", (size,))
    return weight + np.float32(config.norm_offset) if config.norm_offset else weight
