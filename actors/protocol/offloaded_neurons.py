"""How much of a model's neurons a system keeps in memory, and how it reads the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

WORD_BYTES = 8  # of predictors' bits
READ_BYTES = 256 << 10  # the most of one read
MAX_GAP = 16 << 10  # between neighbours of one read; a larger gap takes longer than another read
ALONE = -1  # as `most_gap`: one neighbour a read
# Of how neurons are read: a bundle at once, slots that cache them, filled by the profile at first,
# matmul while others arrive, reading ahead.
PARTS = BUNDLES, CACHE, WARM, PIPELINE, AHEAD = "bundles", "cache", "warm", "pipeline", "ahead"
_NO_RATES = np.empty(0, np.float32)


@dataclass(frozen=True)
class NeuronStorage:
    """Neurons in a bundle file, and how many of them all services together keep in memory."""

    path: str
    num_gates: int  # of which the gate row is
    num_up_downs: int  # of which the up and down rows are
    predictors: str = ""  # file of those by which the next layer's neurons are read ahead
    predictor_words: int = 0  # of their bits, where they are in the arena for driver and services
    without: tuple[str, ...] = ()  # of PARTS: left out by benchmarks, to measure their gain
    # Promised for the whole system: both numbers are computed again from it once it is known what a
    # GPU holds. 0: nothing was promised.
    memory_bytes: int = 0


@dataclass(frozen=True, eq=False)
class OffloadedShare:
    """One service's part of `NeuronStorage`.

    num_gates, num_up_downs: neurons of which the gate row, the up and down rows are in memory
    rates (N,) float32: how often each neuron of the shard fires; (0,) where unknown
    reads_whole: a bundle is read at once where a predictor wants its gate
    most_bytes, most_gap: of a read, and between neighbours of one read
    For benchmarks alone: piece_bytes, unless 0, limits each read of the file; forgets: nothing is
    kept from one layer to the next; waits_first: matmul begins when all rows are there
    """

    num_gates: int
    num_up_downs: int
    rates: np.ndarray = field(default_factory=lambda: _NO_RATES)
    reads_whole: bool = True
    most_bytes: int = READ_BYTES
    most_gap: int = MAX_GAP
    piece_bytes: int = 0
    forgets: bool = False
    waits_first: bool = False
