"""Products of plain matrices by one of the classes of `actors/cpu`, as one block."""

from typing import Any

import numpy as np

from hotcold.numba_kernels.prompt.block_tokens import (
    every_token,
    one_block,
    one_sum,
    weight_blocks,
    whole_rows,
)


def linear(matmul: Any, x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """out = x @ weights.T."""
    blocks = weight_blocks(weights)
    matmul.linear(matmul.operand(x, blocks, every_token(len(x))), blocks, one_block(out))


def combine(matmul: Any, h: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out = h @ rows."""
    matmul.combine(whole_rows(h), every_token(len(h)), weight_blocks(rows), one_sum(out))
