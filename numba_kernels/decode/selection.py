"""Which neurons of a shard a request computes, and with which weights.

A layer's neurons stand in B blocks: one block of a dense FFN, one for each expert of a mixture.
"""

from typing import NamedTuple

import numpy as np

NO_IDS = np.empty(0, np.int32)
NO_MASKS = np.empty(0, np.uint32)
NO_WEIGHTS = np.empty((0, 0), np.float32)


class Selection(NamedTuple):
    """The neurons of one layer that a request of T tokens computes.

    is_listed: whether `ids` lists them; otherwise they are all neurons of the chosen blocks
    ids (A,) int32: ascending rows of the layer's shard, counted from its first
    token_masks (A,) uint32: bit t is set where row ids[i] is computed for token t; (0,): for all
    block_weights (T, B) float32: the factor of token t's activations in block b, applied before
    down; 0 where the block is not chosen for t, whose neurons there are not computed even if
    listed. (0, 0): all blocks, with factor one
    """

    is_listed: bool
    ids: np.ndarray
    token_masks: np.ndarray
    block_weights: np.ndarray


EVERYTHING = Selection(False, NO_IDS, NO_MASKS, NO_WEIGHTS)


def starts_of(sizes: np.ndarray) -> np.ndarray:
    """First row of each layer's blocks, and the end, where layers follow each other.

    Shapes:  sizes (L, B); starts (L, B + 1), starts[l, B] == starts[l + 1, 0]
    Dtypes:  int64
    """
    ends = np.cumsum(sizes, dtype=np.int64).reshape(sizes.shape)
    return np.concatenate([ends[:, :1] - sizes[:, :1], ends], axis=1)
