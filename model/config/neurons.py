"""Arrays over layers and neurons of a model whose layers may differ in size.

They are (L, N), of N neurons in the largest layer; what a smaller one lacks is no neuron.
"""

from __future__ import annotations

import numpy as np

from hotcold.model.config.model_config import ModelConfig


def shape(config: ModelConfig) -> tuple[int, int]:
    """Layers, and neurons of the largest one."""
    return config.num_layers, config.largest_ffn


def exists(config: ModelConfig) -> np.ndarray:
    """Which of the entries are neurons: (L, N) bool."""
    found: np.ndarray = np.arange(config.largest_ffn) < np.array(config.ffn_sizes)[:, None]
    return found


def most_blocks(config: ModelConfig) -> int:
    """Blocks of the layer that has most of them; 1 where no layer has experts."""
    return max(len(layer.ffn.block_sizes) for layer in config.layers)


def weighed_blocks(config: ModelConfig) -> int:
    """Blocks that a step has weights for: those of `most_blocks`; 0 in a dense model."""
    return 0 if config.experts is None else most_blocks(config)


def blocks(config: ModelConfig) -> np.ndarray:
    """The block of each neuron: (L, N) int32, -1 where there is none."""
    found = np.full(shape(config), -1, np.int32)
    for row, layer in zip(found, config.layers, strict=True):
        sizes = layer.ffn.block_sizes
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return found
