"""Columns cut out of rows in every format: the bytes of such columns that were loaded alone."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.numba_kernels.block_rows import END, NUM_PLACE_NUMBERS, ROW_ITEMS
from hotcold.numba_kernels.formats import BLOCK_FORMATS, block_dtype, row_items
from hotcold.numba_kernels.load.blocks import blocks_into
from hotcold.numba_kernels.load.quantize import DONE
from hotcold.numba_kernels.storage.output_rows import (
    OutputRows,
    copy_outputs,
    new_cut,
    place_unit,
)
from tests.gguf_files import random_blocks

HEIGHT, ROWS = 11, 4  # of a matrix, of a bundle
# Whole chunks of 512 columns, parts of one, what is left at a row's end.
PARTS = [(1024, 0, 512), (1024, 256, 768), (768, 512, 256), (1280, 256, 1024), (768, 0, 768)]
HALVES = [(768, 0, 384), (768, 384, 384)]  # of blocks of one group
KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "MXFP4", "NVFP4", "IQ4_XS"]
KINDS += ["IQ2_S"]
CASES = [
    (kind, *part)
    for kind in KINDS
    for part in (*PARTS, *HALVES)
    if part[-1] % BLOCK_FORMATS[block_dtype(kind)].weights == 0
]


def rows_of(blocks: np.ndarray) -> np.ndarray:
    """Rows of blocks as rows in memory, as they are loaded."""
    block = BLOCK_FORMATS[blocks.dtype]
    width = blocks.shape[1] // block.num_bytes * block.weights
    out = np.zeros((len(blocks), row_items(block.loaded_as, width)), block.loaded_as)
    assert blocks_into(blocks, np.arange(len(blocks)), out) == DONE
    return out


@pytest.mark.parametrize(("kind", "width", "first", "count"), CASES)
def test_columns_of_a_matrix_from_its_bundles(
    kind: str, width: int, first: int, count: int
) -> None:
    dtype = block_dtype(kind)
    block = BLOCK_FORMATS[dtype]
    blocks = random_blocks((HEIGHT, width), kind).view(dtype)
    at, size = (number // block.weights * block.num_bytes for number in (first, count))
    whole, wanted = rows_of(blocks), rows_of(np.ascontiguousarray(blocks[:, at : at + size]))
    places = np.zeros((2, 1, NUM_PLACE_NUMBERS), np.int64)
    places[1, 0, [END, ROW_ITEMS]] = wanted.size, wanted.shape[1]
    bundles = [whole[at : at + ROWS] for at in range(0, HEIGHT, ROWS)]
    outputs = OutputRows(
        rows=np.full(wanted.size + 192, 0xA5, np.uint8),
        gates=np.zeros_like(places[:, 0]),
        ups=np.zeros_like(places[:0, 0]),
        item_bytes=np.ones(2, np.int64),
        places=places,
        begins=np.zeros(0, np.int64),
        cuts=np.array(
            [[[0] * 8], [new_cut(block.loaded_as, width, first, count, ROWS, HEIGHT)]], np.int64
        ),
        turns=np.arange(len(bundles), dtype=np.int32),
    )
    place_unit(outputs, 1, 64)
    for number, rows in enumerate(bundles):
        part = np.zeros(ROWS * whole.shape[1] + 100, np.uint8)
        part[: rows.size] = rows.view(np.uint8).reshape(-1)
        copy_outputs(part, 1, outputs.turns[number], outputs)
    assert outputs.rows[64 : 64 + wanted.size].tobytes() == wanted.tobytes()
    outside = np.delete(outputs.rows, np.arange(64, 64 + wanted.size))
    assert (outside == 0xA5).all()
