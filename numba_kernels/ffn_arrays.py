"""A shard of neurons of every layer, stacked, each layer's in blocks."""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import NUM_PLACE_NUMBERS, BlockRows

NO_NORMS = np.empty(0, np.float32)
NO_STRIPES = np.empty((1, 0, 0), np.int64)


class ShardStripes(NamedTuple):
    """A shard's stripes: the last three fields of `FfnArrays` and of `TransposedArrays`.

    As a default each thread's part of the rows is a stripe.
    """

    ends: np.ndarray = NO_STRIPES
    first: int = 0
    at_once: int = 1


class FfnArrays(NamedTuple):
    """A shard of cold neurons, all layers stacked, each layer in B blocks.

    starts (L, B + 1) int64: block b of layer l has rows starts[l, b]:starts[l, b + 1], and layers
    follow each other; gate, up, down (N, d) weights, up (0, d) in a two-matrix FFN;
    gate_bias, up_bias (N,) or (0,), down_bias (L, B, d) or (L, B, 0) float32;
    down_norms (N,) or (0,) float32: norms of the down rows, for product thresholds
    stripes (L, B, n + 1) int64: first rows of the shard's n stripes in each block
    (`decode.stripes`), and ends; NO_STRIPES: each thread's part of the rows is one. first_stripe:
    the first one's number
    stripes_at_once: so many neighbours are one stripe in prompts; first_stripe and n are multiples
    """

    starts: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray
    down_norms: np.ndarray = NO_NORMS
    stripes: np.ndarray = NO_STRIPES
    first_stripe: int = 0
    stripes_at_once: int = 1


def most_rows(starts: np.ndarray) -> int:
    """Rows of the largest layer."""
    return int((starts[:, -1] - starts[:, 0]).max(initial=0))


class TransposedArrays(NamedTuple):
    """`FfnArrays` whose down is transposed: d rows for each block, of its neurons' weights.

    gate, up: `BlockRows`, up without blocks in a two-matrix FFN
    A block has a down matrix for each stripe of the shard, its own weights of each row: down's
    place b * n + i is of stripe i. Stripes are whole numbers of groups of each format, or end with
    the block. Of experts in slots places follow what is in them.
    down_norms: norms of down's columns; stripes: none, so that threads share other work evenly
    cuts (L, B, n + 1) int64: first rows of the shard's n stripes in each block, and ends;
    NO_STRIPES: a block is one
    """

    starts: np.ndarray
    gate: BlockRows
    up: BlockRows
    down: BlockRows
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray
    down_norms: np.ndarray = NO_NORMS
    stripes: np.ndarray = NO_STRIPES
    cuts: np.ndarray = NO_STRIPES
    first_stripe: int = 0
    stripes_at_once: int = 1


class ExpertPredictors(NamedTuple):
    """Networks that say which neurons of a block count for a token (TurboSparse).

    Neuron n of block b counts where outer[n] . relu(inner_b . x) > 0; the others' activations are
    zero. A block without rows of `inner` has no network: all of its neurons count.

    inner (R, d): fc1; inner_starts (L, B + 1) int64: block b of layer l has rows
    inner_starts[l, b]:inner_starts[l, b + 1], all of them in every shard
    outer: fc2; a row of as many weights for each of the shard's neurons, block by block, in inner's
    format
    """

    inner: np.ndarray
    inner_starts: np.ndarray
    outer: BlockRows

    @property
    def nbytes(self) -> int:
        """Bytes of both networks' weights."""
        return int(self.inner.nbytes + self.outer.nbytes)


def no_predictors(num_layers: int) -> ExpertPredictors:
    """Return the predictors of a model without any."""
    nothing = np.empty(0, np.float32)
    return ExpertPredictors(
        inner=np.empty((0, 0), np.float32),
        inner_starts=np.zeros((num_layers, 2), np.int64),
        outer=BlockRows((nothing,), np.zeros((num_layers, 1, NUM_PLACE_NUMBERS), np.int64)),
    )


def starts_of(sizes: np.ndarray) -> np.ndarray:
    """First row of each layer's blocks, and the end, where layers follow each other.

    Shapes:  sizes (L, B); starts (L, B + 1), starts[l, B] == starts[l + 1, 0]
    Dtypes:  int64
    """
    ends = np.cumsum(sizes, dtype=np.int64).reshape(sizes.shape)
    return np.concatenate([ends[:, :1] - sizes[:, :1], ends], axis=1)
