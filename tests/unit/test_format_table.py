"""The table of formats: what repeats a part of it agrees, and rows are as large as blocks."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from hotcold.actors.protocol import options
from hotcold.cuda_kernels.format_header import format_header
from hotcold.model.config.weight_formats import CAST_NAMES, QUANTIZED_NAMES
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    FORMATS,
    ROW_FORMATS,
    BlockFormat,
    WeightDtype,
    is_quantized,
    summed_dtype,
)


def test_names_are_those_of_the_table() -> None:
    assert set(get_args(WeightDtype)) == {kind.name for kind in FORMATS.values()}


def test_a_command_line_offers_what_weights_are_cast_and_quantized_to() -> None:
    assert options.QUANTIZED == QUANTIZED_NAMES  # which it does not import, to be read at once
    assert (*CAST_NAMES, *QUANTIZED_NAMES) == options.DTYPES


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: FORMATS[dtype].name)
def test_down_rows_are_in_a_format_that_is_summed(dtype: np.dtype) -> None:
    summed = summed_dtype(dtype)
    assert not is_quantized(summed) or ROW_FORMATS[summed].is_summed
    assert summed_dtype(summed) == summed
    assert not is_quantized(dtype) or ROW_FORMATS[dtype].is_summed == (summed == dtype)


@pytest.mark.parametrize("block", BLOCK_FORMATS.values(), ids=lambda block: block.name)
def test_rows_that_hold_blocks_take_as_many_bytes(block: BlockFormat) -> None:
    """But for those that no format of rows holds in as many bits."""
    if block.is_as_stored(block.kept_as):
        row_format = ROW_FORMATS[block.kept_as]
        num_blocks = block.weights // row_format.block_weights
        assert num_blocks * row_format.block_bytes == block.num_bytes
    else:
        assert block.name in ("IQ4_NL", "Q5_1", "Q2_K", "Q3_K")


def test_cudas_header_numbers_every_format() -> None:
    first = format_header().splitlines()[0]
    names = first.removeprefix("enum Format { ").removesuffix(" };").split(", ")
    assert names == [kind.short.upper() for kind in FORMATS.values()]
