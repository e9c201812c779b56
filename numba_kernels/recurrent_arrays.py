"""What recurrent layers have beside their projections, as kernels read it; their pages.

A page of one layer is one row of float32 numbers, of 16 positions:
    states (Hv, dk, dv)     the state before the page's first position
    keys   (Hk, 16, dk)     of its positions, convolved and normed
    values (Hv, 16, dv)     what the position adds to the state, an outer product with its key
    decays (Hv, 16)         logarithms: how much of the state a position keeps
    inputs (16, channels)   of the convolution, as projected
Of a convolution alone it has the last of these, of what it convolves.

A position's row is written when its token is computed, the state when the first one's is. Nothing
that a step reads is changed by it, so a step may be repeated, and tokens that were drafted and
refused are written over. A sequence needs the page of its next token, and the page before while
that is one of the first of its page: a window of `window_size` positions. What is within a step
alone needs no page (NO_PAGE in its table): of a chunk those that later tokens see, and those at
whose end another prompt may go on.
"""

from typing import Any, NamedTuple

import numpy as np

STATE_POSITIONS = 16  # of a page: few, as rows take more memory than the state, and many, as the
# state is written anew with each page; a page of keys and values has a multiple of them
NO_PAGE = -1
NO_RECURRENCE, DELTA, MAMBA, CONV = range(4)  # `kind`
KINDS = {"delta": DELTA, "mamba": MAMBA, "conv": CONV}  # of a RecurrentSpec

# Fields of a RecurrentSpec, but for `kind` and `place`.
RECURRENT_NUMBERS = np.dtype(
    (
        np.record,
        np.dtype(
            [
                ("kind", np.int32),
                ("place", np.int32),  # of the layer's arrays among those of all such layers
                ("num_key_heads", np.int32),  # Hk
                ("num_value_heads", np.int32),  # Hv, a multiple of Hk
                ("key_dim", np.int32),  # dk
                ("value_dim", np.int32),  # dv
                ("conv_size", np.int32),  # positions that the convolution reads, its own included
                # Whether value head h has the key head h % Hk, not h // (Hv / Hk).
                ("has_tiled_heads", np.bool_),
            ],
            align=True,
        ),
    )
)


class RecurrentVectors(NamedTuple):
    """Learned numbers of the recurrent layers alone, float32, stacked; L of them.

    gates (L, 2 Hv, d): rows that give b of each value head, then a; Mamba's (L, Hv, d), dt
    conv_weight (L, conv_size, channels), the last tap of a position itself; conv_bias (L, channels)
    or (L, 0); decay_rate (L, Hv), negative; step_bias (L, Hv)
    norm_weight (L, dv); Mamba's (L, Hv dv), and skip (L, Hv), else (L, 0)
    A convolution alone has conv_weight and conv_bias, the others are empty.
    """

    gates: np.ndarray
    conv_weight: np.ndarray
    conv_bias: np.ndarray
    decay_rate: np.ndarray
    step_bias: np.ndarray
    norm_weight: np.ndarray
    skip: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(array.nbytes for array in self)


def window_size(conv_size: int) -> int:
    """Positions whose pages a sequence needs, its own included."""
    return max(conv_size, 2)


def num_channels(numbers: Any) -> int:
    """Channels of the convolution: queries, keys and values of all heads."""
    keys, values = numbers.num_key_heads, numbers.num_value_heads
    return 2 * keys * numbers.key_dim + values * numbers.value_dim


def page_places(numbers: Any) -> tuple[int, int, int, int]:
    """Where in a page keys, values, decays and inputs begin; states do at 0."""
    if numbers.key_dim == 0:
        return 0, 0, 0, 0
    keys = numbers.num_value_heads * numbers.key_dim * numbers.value_dim
    values = keys + numbers.num_key_heads * STATE_POSITIONS * numbers.key_dim
    decays = values + numbers.num_value_heads * STATE_POSITIONS * numbers.value_dim
    return keys, values, decays, decays + numbers.num_value_heads * STATE_POSITIONS


def page_items(numbers: Any) -> int:
    """Numbers of a layer's page."""
    return page_places(numbers)[-1] + STATE_POSITIONS * num_channels(numbers)
