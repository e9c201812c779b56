"""How often each expert of a mixture was chosen, and had to be read from storage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.numba_kernels.loops.layer_loop import CHOSEN, READ


@dataclass(frozen=True, eq=False)
class ExpertCounts:
    """Counts of each layer's experts; a shared one comes after those that its router chooses.

    num_experts: those that a layer's router chooses from, 0 of a dense layer
    num_chosen: how many of them each token has
    chosen: tokens that had it; read: steps, or chunks of prompts, that had it for some token;
    missed: those of them for which it was not in memory, None where no neurons are on storage, or
        services elsewhere count them
    Shapes:  num_experts (L,), chosen, read, missed (L, B)
    Dtypes:  int64
    """

    num_experts: np.ndarray
    num_chosen: int
    chosen: np.ndarray
    read: np.ndarray
    missed: np.ndarray | None = None

    @property
    def rates(self) -> np.ndarray:
        """The share of tokens that had each expert: (L, B) float64, 0 where none was counted."""
        num_tokens = (self.chosen * self._is_routed).sum(axis=1) / self.num_chosen
        return self.chosen / np.maximum(num_tokens, 1)[:, None]

    @property
    def _is_routed(self) -> np.ndarray:
        """Which of the entries are experts that a router chooses from: (L, B) bool."""
        found: np.ndarray = np.arange(self.chosen.shape[1]) < self.num_experts[:, None]
        return found

    def since(self, earlier: ExpertCounts) -> ExpertCounts:
        """The counts since an earlier moment."""
        missed = None
        if self.missed is not None and earlier.missed is not None:
            missed = np.maximum(self.missed - earlier.missed, 0)
        chosen, read = self.chosen - earlier.chosen, self.read - earlier.read
        return ExpertCounts(self.num_experts, self.num_chosen, chosen, read, missed)

    @property
    def hit_rate(self) -> float | None:
        """Of what was read the share that was in memory; None without storage, or reads."""
        num_read = int(self.read[self._is_routed].sum())
        if self.missed is None or num_read == 0:
            return None
        return max(0.0, 1 - float(self.missed[self._is_routed].sum()) / num_read)


def new_block_counts(config: ModelConfig) -> np.ndarray:
    """Zeros for `LayerFacts.block_counts`; without experts there is nothing to count."""
    num_blocks = neurons.weighed_blocks(config)
    return np.zeros((config.num_layers, num_blocks, 2), np.int64)


def expert_counts(
    config: ModelConfig, block_counts: np.ndarray, misses: np.ndarray | None = None
) -> ExpertCounts | None:
    """The counts so far of `LayerFacts.block_counts`, copied; None without experts.

    misses (S, L, B): by services, each of which has a part of every expert; None if not known
    """
    if config.experts is None:
        return None
    routers = [layer.ffn.router for layer in config.layers]
    return ExpertCounts(
        np.array([0 if router is None else router.num_experts for router in routers], np.int64),
        config.experts.router.num_chosen,
        block_counts[:, :, CHOSEN].copy(),
        block_counts[:, :, READ].copy(),
        None if misses is None else misses.max(axis=0).astype(np.int64),
    )
