"""Random numbers for large arrays, by threads: each array depends on the seed and its key alone."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hotcold.model.limits import num_cpus

_BLOCK_ITEMS = 1 << 21


def normal_quantiles(count: int) -> torch.Tensor:
    """Return `count` numbers, spread as normal ones with mean 0 and deviation 1."""
    return torch.special.ndtri((torch.arange(count) + 0.5) / count)


class RandomSource:
    """Arrays by key: the same in any order of calls, and for any number of threads."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pool = ThreadPoolExecutor(num_cpus())

    def normal(self, key: str, shape: tuple[int, ...], std: float = 1.0) -> torch.Tensor:
        """Return a float32 tensor of normal numbers with mean 0 and deviation `std`."""
        items = np.empty(math.prod(shape), np.float32)
        blocks = np.split(items, range(_BLOCK_ITEMS, items.size, _BLOCK_ITEMS))
        seeds = self._seeds(key).spawn(len(blocks))
        list(self._pool.map(_fill, blocks, seeds, [np.float32(std)] * len(blocks)))
        return torch.from_numpy(items.reshape(shape))

    def permutation(self, key: str, num_items: int) -> torch.Tensor:
        """Return 0 .. num_items - 1 in random order, int64."""
        return torch.from_numpy(self.generator(key).permutation(num_items))

    def generator(self, key: str) -> np.random.Generator:
        """Return a generator for other things."""
        return np.random.Generator(np.random.SFC64(self._seeds(key)))

    def _seeds(self, key: str) -> np.random.SeedSequence:
        return np.random.SeedSequence([self._seed, *key.encode()])


def _fill(block: np.ndarray, seed: np.random.SeedSequence, std: np.float32) -> None:
    np.random.Generator(np.random.SFC64(seed)).standard_normal(out=block, dtype=np.float32)
    block *= std
