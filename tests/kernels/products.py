"""Products of plain matrices as one block, of one kind of numbers."""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import NUM_PLACE_NUMBERS
from hotcold.numba_kernels.decode.vectors import QuantizedVectors
from hotcold.numba_kernels.ir.amx_ir import AMX_ITEMS
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.prefill.block_tokens import BlockTokens, ChoiceRows, CutRows, StripeSums
from hotcold.numba_kernels.prefill.float_items import num_items
from hotcold.numba_kernels.prefill.float_matmul import combine_kernel, pack_rows_kernel
from hotcold.numba_kernels.prefill.shared_rows import (
    AMX,
    FloatTokens,
    multiply_blocks,
    new_tokens,
    prepare_blocks,
)


class Products(NamedTuple):
    """Of a kind, by threads that are played one after the other."""

    kind: type
    num_threads: int


def linear(products: Products, x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """out = x @ weights.T."""
    num_tokens, width = x.shape
    tokens = new_tokens(products.kind, products.num_threads, num_tokens, width)
    end = num_tokens if isinstance(tokens, QuantizedVectors) else np.size(tokens[0])
    choices, starts = _every_token(num_tokens), np.array([0, end])
    rows = ChoiceRows(out.reshape(-1), np.array([0, out.size]))
    flat, places = _block(weights)
    for thread in range(products.num_threads):
        prepare_blocks(
            (flat,), places, x, choices, tokens, starts, thread, thread, products.num_threads
        )
    for thread in range(products.num_threads):
        multiply_blocks(
            (flat,), places, choices, tokens, starts, rows, thread, thread, products.num_threads
        )


def combine(products: Products, h: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out = h @ rows."""
    count, width = h.shape
    columns, step = np.array([[0, width]]), np.array([[0, 0, 1, 0]])
    of_tokens = CutRows(
        h.reshape(-1), np.array([0, h.size]), columns[0, 1:], columns, np.arange(count)
    )
    stride = num_items(width, products.kind) | (AMX_ITEMS if products.kind is AMX else 0)
    space = new_tokens(products.kind, products.num_threads, count + LANES, width + 2 * LANES)
    assert isinstance(space, FloatTokens)
    choices, starts = _every_token(count), np.array([0, count * stride])
    sums = StripeSums(out, np.empty((0, *out.shape), np.float32), step)
    flat, places = _block(rows)
    for thread in range(products.num_threads):
        pack_rows_kernel(of_tokens, choices, space.packed, starts, thread, products.num_threads)
    for thread in range(products.num_threads):
        combine_kernel(
            flat, places, choices, space.packed, starts, space.buffers[thread],
            space.sums[thread], sums, thread, products.num_threads,
        )  # fmt: skip


def _every_token(num_tokens: int) -> BlockTokens:
    """One block that all tokens chose."""
    ids = np.arange(num_tokens, dtype=np.int64)
    return BlockTokens(ids, np.array([0, num_tokens]), ids)


def _block(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix's items, and its place as the only block."""
    places = np.zeros((1, NUM_PLACE_NUMBERS), np.int64)
    places[0, 2:] = matrix.size, matrix.shape[1]
    return matrix.reshape(-1), places
