"""How much of a model's neurons a system keeps in memory, and how it reads the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

WORD_BYTES = 8  # of predictors' bits
READ_BYTES = 256 << 10  # the most of one read
MAX_GAP = 16 << 10  # between neighbours of one read: to read more takes longer than another read
ALONE = -1  # as the most bytes between neighbours of one read: none has any
# Of how neurons are read: a bundle at once, slots that keep them, products while others arrive.
PARTS = BUNDLES, CACHE, PIPELINE = "bundles", "cache", "pipeline"
_NO_RATES = np.empty(0, np.float32)


@dataclass(frozen=True)
class NeuronStorage:
    """Neurons lie in a bundle file; of all services together so many of them are in memory."""

    path: str
    num_gates: int  # of which the gate row is
    num_up_downs: int  # of which the up and down rows are
    predictors: str = ""  # file: by these the next layer's neurons are read ahead
    predictor_words: int = 0  # of their bits, where the driver's lie in the arena for services too
    without: tuple[str, ...] = ()  # of PARTS: what a benchmark leaves out, to see what it gains
    # Of the whole system, as promised: both numbers are found anew by it once it is known
    # what a GPU holds. 0: nothing was promised.
    memory_bytes: int = 0


@dataclass(frozen=True, eq=False)
class OffloadedShare:
    """What one service has of it.

    num_gates, num_up_downs: neurons of which the gate row, the up and down rows are in memory;
    rates (N,) float32: how often each neuron of the shard fires, (0,) where that is not known;
    reads_whole: a bundle is read at once where a predictor asks for its gate; spans: most bytes of
    a read, most bytes between neighbours
    For benchmarks alone: piece_bytes, unless 0, is all that a read of the file takes; forgets:
    nothing is kept from one layer to the next; waits_first: products begin when all rows are there
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
