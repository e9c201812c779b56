"""Normal random numbers for large arrays, by threads: the same for any number of threads."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hotcold.model.limits import num_cpus

_BLOCK_ITEMS = 1 << 21


class NormalSource:
    """A stream of random tensors, determined by `seed` and the order of calls."""

    def __init__(self, seed: int) -> None:
        self._seeds = np.random.SeedSequence(seed)
        self._pool = ThreadPoolExecutor(num_cpus())

    def normal(self, shape: tuple[int, ...], std: float = 1.0) -> torch.Tensor:
        """Return a float32 tensor of normal numbers with mean 0 and deviation `std`."""
        items = np.empty(math.prod(shape), np.float32)
        blocks = np.split(items, range(_BLOCK_ITEMS, items.size, _BLOCK_ITEMS))
        seeds = self._seeds.spawn(len(blocks))
        list(self._pool.map(_fill, blocks, seeds, [np.float32(std)] * len(blocks)))
        return torch.from_numpy(items.reshape(shape))

    def permutation(self, num_items: int) -> torch.Tensor:
        """Return 0 .. num_items - 1 in random order, int64."""
        return torch.from_numpy(self._generator().permutation(num_items))

    def token_ids(self, shape: tuple[int, ...], vocab: int) -> torch.Tensor:
        """Return uniform ids below `vocab`, int64."""
        return torch.from_numpy(self._generator().integers(vocab, size=shape))

    def _generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(self._seeds.spawn(1)[0]))


def _fill(block: np.ndarray, seed: np.random.SeedSequence, std: np.float32) -> None:
    np.random.Generator(np.random.SFC64(seed)).standard_normal(out=block, dtype=np.float32)
    block *= std
