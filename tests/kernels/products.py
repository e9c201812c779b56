"""Products of plain matrices as one block, of one kind of numbers."""

from collections.abc import Callable

import numpy as np

from hotcold.actors.cpu.matmul import BlockProducts
from hotcold.numba_kernels.prefill.block_tokens import (
    ChoiceRows,
    CutRows,
    StripeSums,
    every_token,
    weight_blocks,
)


def in_turn(kind: type, num_threads: int) -> BlockProducts:
    """Products of that kind, with threads that are played one after the other."""

    def each_thread(phase: Callable[[int], None]) -> None:
        for thread in range(num_threads):
            phase(thread)

    return BlockProducts(kind, num_threads, each_thread)


def linear(matmul: BlockProducts, x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """out = x @ weights.T."""
    blocks, rows = weight_blocks(weights), ChoiceRows(out.reshape(-1), np.array([0, out.size]))
    matmul.linear(matmul.operand(x, blocks, every_token(len(x))), blocks, rows)


def combine(matmul: BlockProducts, h: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out = h @ rows."""
    count, width = h.shape
    ends, columns, step = np.array([0, h.size]), np.array([[0, width]]), np.array([[0, 0, 1, 0]])
    of_tokens = CutRows(h.reshape(-1), ends, columns[0, 1:], columns, np.arange(count))
    sums = StripeSums(out, np.empty((0, *out.shape), np.float32), step)
    matmul.combine(of_tokens, every_token(count), weight_blocks(rows), sums)
