"""The table of formats: what repeats a part of it agrees, and rows are as large as blocks."""

from __future__ import annotations

import pytest

from hotcold.actors.protocol import options
from hotcold.model.config.weight_formats import CAST_NAMES, QUANTIZED_NAMES
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    ROW_FORMATS,
    BlockFormat,
)


def test_a_command_line_offers_what_weights_are_cast_and_quantized_to() -> None:
    assert options.QUANTIZED == QUANTIZED_NAMES  # which it does not import, to be read at once
    assert (*CAST_NAMES, *QUANTIZED_NAMES) == options.DTYPES


@pytest.mark.parametrize("block", BLOCK_FORMATS.values(), ids=lambda block: block.name)
def test_rows_that_hold_blocks_take_as_many_bytes(block: BlockFormat) -> None:
    """But for those that no format of rows holds in as many bits."""
    if block.is_as_stored(block.kept_as):
        row_format = ROW_FORMATS[block.kept_as]
        num_blocks = block.weights // row_format.block_weights
        assert num_blocks * row_format.block_bytes == block.num_bytes
    else:
        assert block.name in ("IQ4_NL", "Q5_1", "Q2_K", "Q3_K")
