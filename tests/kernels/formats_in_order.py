"""Run as a program: digests of what kernels answer for formats, met in the order that is given."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from hotcold.actors.cpu.kernel_matmul import QuantizedMatmul
from hotcold.numba_kernels.decode import rows
from hotcold.numba_kernels.prefill.block_tokens import (
    every_token,
    one_block,
    one_sum,
    weight_blocks,
)
from tests.kernels.arrays import random_floats
from tests.kernels.products import in_turn
from tests.kernels.quantized_rows import random_rows


def answers(kind: str) -> list[np.ndarray]:
    """Products with few vectors, with a prompt's, and with those of a mixture's prompt."""
    x, weights = random_floats(0, 40, 256), random_rows(1, kind, 24, 256).rows
    found = [rows.gemv(weights, x[:3].copy())]
    for put in (one_block, one_sum):
        out = np.zeros((40, 24), np.float32)
        matmul, blocks = in_turn(QuantizedMatmul, 1), weight_blocks(weights)
        matmul.linear(matmul.operand(x, blocks, every_token(40)), blocks, put(out))
        found.append(out)
    return found


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        found = (hashlib.sha256(each.tobytes()).hexdigest() for each in answers(kind))
        print(kind, *found, flush=True)
