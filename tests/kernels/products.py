"""Products of plain matrices by one of the classes of `actors/cpu`, as one block."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hotcold.numba_kernels.prefill.block_tokens import (
    every_token,
    one_block,
    one_sum,
    weight_blocks,
    whole_rows,
)


def in_turn(kind: Callable[..., Any], num_threads: int) -> Any:
    """A matmul of that class, with threads that are played one after the other."""

    def each_thread(phase: Callable[[int], None]) -> None:
        for thread in range(num_threads):
            phase(thread)

    return kind(num_threads, each_thread)


def linear(matmul: Any, x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """out = x @ weights.T."""
    blocks = weight_blocks(weights)
    matmul.linear(matmul.operand(x, blocks, every_token(len(x))), blocks, one_block(out))


def combine(matmul: Any, h: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out = h @ rows."""
    matmul.combine(whole_rows(h), every_token(len(h)), weight_blocks(rows), one_sum(out))
