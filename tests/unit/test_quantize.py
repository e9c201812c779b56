"""Quantized rows: gguf's values and scales, in the layout of formats.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hotcold.actors.protocol import options
from hotcold.model.config.weight_formats import CAST_NAMES, QUANTIZED_NAMES
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    MXFP4,
    Q4,
    Q4_1,
    Q8,
    ROW_FORMATS,
    UNPACKED_FORMATS,
    BlockFormat,
    row_items,
    row_width,
)
from hotcold.numba_kernels.load.convert import from_float32, to_float32, widen_kernel
from hotcold.numba_kernels.load.quantize import (
    DONE,
    NOT_FINITE,
    TOO_LARGE,
    copy_quantized,
    quantize_into,
    quantize_rows,
)
from tests.quantized_models import dequantized, laid_out

NAMES: list[tuple[np.dtype, str]] = [(Q8, "q8"), (Q4, "q4"), (Q4_1, "q4_1"), (MXFP4, "mxfp4")]


def random_bits(shape: tuple[int, int], dtype: Any, scale: float = 0.02) -> np.ndarray:
    rng = np.random.default_rng(shape[1])
    values = (rng.normal(size=shape) * scale).astype(np.float32)
    return from_float32(values, np.dtype(dtype))


@pytest.mark.parametrize(("dtype", "name"), NAMES)
@pytest.mark.parametrize(
    ("source", "width"), [(np.float32, 1504), (np.uint16, 32), (np.int16, 544)]
)
def test_bytes_and_values_are_ggufs(dtype: np.dtype, name: str, source: Any, width: int) -> None:
    bits = random_bits((6, width), source)
    rows, exact = quantize_rows(bits, dtype), to_float32(bits)
    assert rows.dtype == dtype and row_width(dtype, rows.shape[1]) == width
    np.testing.assert_array_equal(rows.view(np.uint8), laid_out(exact, name))
    expected = dequantized(exact, name)
    np.testing.assert_array_equal(to_float32(rows.reshape(2, 3, -1)).reshape(6, -1), expected)
    part = np.full((6, width), np.nan, np.float32)
    widen_kernel(rows, part, 2, 5)
    np.testing.assert_array_equal(part[2:5], expected[2:5])
    assert np.isnan(part[[0, 1, 5]]).all()


@pytest.mark.parametrize(("dtype", "name"), NAMES)
def test_extreme_groups(dtype: np.dtype, name: str) -> None:
    """Equal magnitudes of both signs, halves, one value alone, scales below float16."""
    rng = np.random.default_rng(4)
    groups = rng.integers(-8, 9, (40, 32)).astype(np.float32)
    groups[0] = 0.5
    groups[1, 5:] = 0
    groups[2] = np.arange(32) * np.float32(-4.0)
    groups[3] = np.tile([127, -63.5, 0.5, -0.5, 1.5, 63.5, 2.5, -127], 4)
    groups[4] = np.tile([-8, 7.5, 8, -7.5], 8)
    groups[5] *= np.float32(1e-9)
    groups[6] *= np.float32(6e-8)
    groups[7] *= np.float32(8000)
    rows = quantize_rows(groups, dtype)
    np.testing.assert_array_equal(rows.view(np.uint8), laid_out(groups, name))


@pytest.mark.parametrize("dtype", [Q8, Q4, Q4_1, MXFP4])
def test_not_finite(dtype: np.dtype) -> None:
    cases = itertools.product((np.float32, np.uint16, np.int16), (np.nan, -np.inf), (0, 31, 45, 63))
    for source, bad, place in cases:
        values = np.ones((3, 64), np.float32)
        values[1, place] = bad
        bits = from_float32(values, np.dtype(source))
        rows = np.empty((3, row_items(dtype, 64)), dtype)
        assert quantize_into(bits, np.arange(3), rows) == NOT_FINITE
        assert quantize_into(bits, np.array([0, 2, 2]), rows) == DONE
        with pytest.raises(ValueError, match="not finite"):
            quantize_rows(bits, dtype)


@pytest.mark.parametrize(
    ("dtype", "most"), [(Q8, 127 * 65504.0), (Q4, 8 * 65504.0), (Q4_1, 65504.0)]
)
def test_scales_beyond_float16(dtype: np.dtype, most: float) -> None:
    for sign in (1, -1):
        weights = np.full((1, 32), sign * most, np.float32)
        assert np.isfinite(to_float32(quantize_rows(weights, dtype))).all()
        weights *= np.float32(1.001)
        rows = np.empty((1, row_items(dtype, 32)), dtype)
        assert quantize_into(weights, np.zeros(1, int), rows) == TOO_LARGE
        with pytest.raises(ValueError, match="too large"):
            quantize_rows(weights, dtype)


@pytest.mark.parametrize("dtype", [Q8, Q4, Q4_1, MXFP4])
def test_copies_find_damage(dtype: np.dtype) -> None:
    rows = quantize_rows(random_bits((5, 96), np.float32), dtype)
    copy, ids = np.zeros((3, rows.shape[1]), dtype), np.array([4, 0, 2], np.int32)
    assert copy_quantized(rows, ids, copy)
    np.testing.assert_array_equal(copy, rows[ids])
    wrong = [253, 254, 255] if dtype == MXFP4 else [np.inf, -np.inf, np.nan]
    kind = np.uint8 if dtype == MXFP4 else np.float16
    for scale in wrong:
        for group in range(3):
            damaged = rows.copy()
            scales = damaged.view(np.uint8)[2, -3 * np.dtype(kind).itemsize :].view(kind)
            scales[group] = scale
            assert not copy_quantized(damaged, ids, copy)
            assert copy_quantized(damaged, np.array([0, 1, 3]), copy)


def test_mxfp4_has_a_power_of_two_for_any_weight() -> None:
    """Of the largest float32 and of subnormal ones too; halves go to the smaller value."""
    sizes = np.array([[3.4028235e38], [1.0], [2.0**-125], [2.0**-126], [3e-39]], np.float32)
    weights = sizes * np.linspace(-1, 1, 32, dtype=np.float32)
    found = to_float32(quantize_rows(weights, MXFP4))
    steps = np.maximum(np.abs(weights) / 4, np.exp2(np.floor(np.log2(sizes)) - 3))
    assert (np.abs(found - weights) <= steps + np.float32(2.0**-128)).all()
    halves = np.array([[6, 2.5, -2.5, 5, -0.25, 0.25, 1.75, 0.75] * 4], np.float32)
    expected = np.array([[6, 2, -2, 4, 0, 0, 1.5, 0.5] * 4], np.float32)
    np.testing.assert_array_equal(to_float32(quantize_rows(halves, MXFP4)), expected)


def test_a_command_line_offers_what_weights_are_cast_and_quantized_to() -> None:
    assert options.QUANTIZED == QUANTIZED_NAMES  # which it does not import, to be read at once
    assert (*CAST_NAMES, *QUANTIZED_NAMES) == options.DTYPES


@pytest.mark.parametrize(
    "block",
    [block for dtype, block in BLOCK_FORMATS.items() if dtype not in UNPACKED_FORMATS],
    ids=lambda block: block.name,
)
def test_rows_that_hold_blocks_take_as_many_bytes(block: BlockFormat) -> None:
    """But for those that no format of rows holds in as many bits."""
    if block.is_as_stored(block.loaded_as):
        row_format = ROW_FORMATS[block.loaded_as]
        num_blocks = block.weights // row_format.block_weights
        # Scales of 6 bits; a scale of more than one block.
        spare = {"IQ4_XS": 2, "NVFP4": 4}.get(block.name, 0)
        assert num_blocks * row_format.block_bytes == block.num_bytes + spare
    else:
        assert block.name == "Q5_1" or 8 * block.num_bytes < 4 * block.weights
