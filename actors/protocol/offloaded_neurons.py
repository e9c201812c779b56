"""How much of a model's neurons a system keeps in memory, and how it reads the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

WORD_BYTES = 8  # of predictors' bits
_NO_RATES = np.empty(0, np.float32)


@dataclass(frozen=True)
class NeuronStorage:
    """Neurons in a bundle file, and how many of them all services together keep in memory."""

    path: str
    num_gates: int  # of which the gate row is
    num_up_downs: int  # of which the up and down rows are
    predictors: str = ""  # file of those by which the next layer's neurons are read ahead
    predictor_words: int = 0  # of their bits, where they are in the arena for driver and services
    # Promised for the whole system: both numbers are computed again from it once it is known what a
    # GPU holds. 0: nothing was promised.
    memory_bytes: int = 0


@dataclass(frozen=True, eq=False)
class OffloadedShare:
    """One service's part of `NeuronStorage`.

    num_gates, num_up_downs: neurons of which the gate row, the up and down rows are in memory
    rates (N,) float32: how often each neuron of the shard fires; (0,) where unknown
    reads_whole: a bundle is read at once where a predictor wants its gate
    """

    num_gates: int
    num_up_downs: int
    rates: np.ndarray = field(default_factory=lambda: _NO_RATES)
    reads_whole: bool = True
