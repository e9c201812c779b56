"""Where the parts of a recurrent layer's page are, and which heads belong together, compiled."""

import numpy as np

from hotcold.numba_kernels import recurrent_arrays
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.vectors import aligned_zeros
from hotcold.numba_kernels.recurrent_arrays import STATE_POSITIONS

FACTORS, SUMS = STATE_POSITIONS, 3 * STATE_POSITIONS  # of a thread's scratch, after what is kept
num_channels = njit(nogil=True, cache=True, inline="always")(recurrent_arrays.num_channels)
page_places = njit(nogil=True, cache=True, inline="always")(recurrent_arrays.page_places)


@njit(nogil=True, cache=True, inline="always")
def key_head_of(numbers, head):
    """The key head of a value head."""
    if numbers.has_tiled_heads:
        return head % numbers.num_key_heads
    return head // (numbers.num_value_heads // numbers.num_key_heads)


@njit(nogil=True, cache=True, inline="always")
def previous_token(slots, t):
    """The step's token of the same sequence before token t, which is that of the position before.

    -1: it is the sequence's first one in the step.
    """
    before = t - 1
    while before >= 0 and slots[before] != slots[t]:
        before -= 1
    return before


@njit(nogil=True, cache=True)
def head_places(numbers, head):
    """Where in a page a value head's state, keys, values and decays begin."""
    keys, values, decays, _ = page_places(numbers)
    size, positions = numbers.key_dim * numbers.value_dim, STATE_POSITIONS
    return (
        head * size,
        keys + key_head_of(numbers, head) * positions * numbers.key_dim,
        values + head * positions * numbers.value_dim,
        decays + head * positions,
    )


@njit(nogil=True, cache=True)
def scratch_places(numbers):
    """The same in a thread's scratch, for positions that have no page."""
    state = SUMS + 2 * numbers.value_dim
    keys = state + numbers.key_dim * numbers.value_dim
    values = keys + STATE_POSITIONS * numbers.key_dim
    return state, keys, values, values + STATE_POSITIONS * numbers.value_dim


def recurrent_scratch(num_threads: int, all_numbers: np.ndarray) -> np.ndarray:
    """Work space of `recurrence.recur` for layers of RECURRENT_NUMBERS: (threads, numbers)."""
    most = max(scratch_places.py_func(numbers)[-1] for numbers in all_numbers)
    return aligned_zeros((num_threads, int(most) + STATE_POSITIONS))
