"""ggml's blocks against the gguf package: every type, any bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    IQ2,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q3_K,
    Q4,
    Q4_1,
    Q4_K,
    Q5,
    Q5_K,
    Q6,
    Q8,
    QUANTIZED,
    ROW_FORMATS,
    block_dtype,
    row_items,
)
from hotcold.numba_kernels.load.blocks import (
    COLUMNS_AT_ONCE,
    PairedBlocks,
    block_columns,
    blocks_into,
    blocks_status,
    dequantize_rows,
)
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.numba_kernels.load.quantize import (
    DONE,
    NOT_FINITE,
    TOO_LARGE,
    copy_quantized,
    quantize_rows,
)
from hotcold.numba_kernels.load.stored_rows import StoredRows
from tests.gguf_files import BLOCKS, dequantized, random_blocks

pytestmark = pytest.mark.sweep(name=["Q4_0", "Q6_K"])

NAMES = [block.name for block in BLOCKS]
FROM_FLOATS = [dtype for dtype in QUANTIZED if ROW_FORMATS[dtype].is_summed]
WIDTH, HEIGHT = 1280, 7


def blocks(name: str, seed: int = 0, height: int = HEIGHT) -> tuple[np.ndarray, np.ndarray]:
    """Rows of blocks, and their values as the gguf package has them."""
    raw = random_blocks((height, WIDTH), name, seed)
    return raw.view(block_dtype(name)), dequantized(raw, name)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_ggmls_to_the_bit_for_any_bytes(name: str) -> None:
    rng = np.random.default_rng(1)
    num_bytes = BLOCK_FORMATS[block_dtype(name)].num_bytes
    raw = rng.integers(0, 256, (HEIGHT, 6 * num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = dequantized(raw, name)
        if name == "MXFP4":  # 255 is NaN: OCP Microscaling Formats 1.0, E8M0
            wanted = np.where((raw[:, ::num_bytes] == 255).repeat(32, axis=1), np.nan, wanted)
    found = dequantize_rows(raw.view(block_dtype(name)), np.arange(HEIGHT))
    same = np.isfinite(wanted)
    assert same.mean() > 0.5
    assert np.array_equal(np.isfinite(found), same)
    assert np.array_equal(found[same].view(np.uint32), wanted[same].view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_stay_exact_is_quantized_as_floats_are(name: str) -> None:
    rows, values = blocks(name)
    ids = np.array([3, 3, 0, 6, 1, 2, 4, 5])
    for dtype in FROM_FLOATS:
        if (name, dtype) == ("Q4_K", Q4_1):
            continue
        out = np.zeros((ids.size, row_items(dtype, WIDTH)), dtype)
        assert blocks_into(rows, ids, out) == DONE
        if dtype in BLOCK_FORMATS[rows.dtype].exact:
            assert np.array_equal(to_float32(out), values[ids])
        else:
            assert np.array_equal(out, quantize_rows(values[ids], dtype))


@pytest.mark.parametrize("width", [256, 512, WIDTH])
@pytest.mark.parametrize(
    ("name", "dtype", "factors"),
    [
        ("Q6_K", Q6, [208]),
        ("Q5_K", Q5_K, [0, 2]),
        ("Q4_K", Q4_K, [0, 2]),
        ("Q5_0", Q5, [0]),
        ("Q3_K", Q3_K, [108]),
        ("NVFP4", NVFP4, []),
        ("IQ4_NL", IQ4_NL, [0]),
        ("IQ4_XS", IQ4_XS, [0]),
        ("IQ3_S", IQ3_S, [0]),
        ("IQ3_XXS", IQ3_XXS, [0]),
        *((f"IQ2_{name}", IQ2, [0]) for name in ("XXS", "XS", "S")),
        ("IQ1_S", IQ2, [0]),
        ("IQ1_M", IQ2, [54]),  # of whose byte 55 the upper half is a float16's highest
        ("TQ1_0", Q4, [52]),
        ("TQ2_0", Q4, [64]),
        ("Q1_0", Q4, [0]),
        ("Q2_0", Q4, [0]),
    ],
)
def test_what_has_a_format_of_its_own(
    name: str, dtype: np.dtype, factors: list[int], width: int
) -> None:
    """Every value, factors of both signs, last chunks of one block and of two."""
    block = BLOCK_FORMATS[block_dtype(name)]
    shape = (HEIGHT, width // block.weights, block.num_bytes)
    raw = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    for at in factors:
        raw[..., at + 1] &= 0xBB  # no infinite ones
    raw = raw.reshape(HEIGHT, -1)
    rows, values = raw.view(block_dtype(name)), dequantized(raw, name)
    assert dtype in BLOCK_FORMATS[rows.dtype].exact
    ids = np.array([3, 3, 0, 6])
    out = np.zeros((4, row_items(dtype, width)), dtype)
    assert blocks_into(rows, ids, out) == DONE
    assert np.array_equal(to_float32(out), values[ids])
    copied = np.zeros_like(out)
    assert copy_quantized(out, np.arange(4), copied) and np.array_equal(copied, out)
    for at in factors:
        spoilt = raw.copy()
        spoilt[3, [at + 1, at - 1] if name == "IQ1_M" else at + 1] |= 0xFC
        assert blocks_into(spoilt.view(rows.dtype), ids, np.zeros_like(out)) == NOT_FINITE
    out.view(np.uint8)[1, -1] |= 0x7C
    assert not copy_quantized(out, np.arange(4), copied)


@pytest.mark.parametrize("width", [32, 96, 576])
def test_mxfp4_of_safetensors(width: int) -> None:
    """Values beside scales, two neighbours a byte, as transformers dequantizes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(width)
    values = rng.integers(0, 256, (3, 5, width // 32, 16), np.uint8)
    scales = rng.integers(1, 252, values.shape[:-1], np.uint8)
    tensors = map(torch.from_numpy, (values, scales))
    wanted = convert_moe_packed_tensors(*tensors, dtype=torch.float32).numpy().swapaxes(1, 2)
    pairs = PairedBlocks(values.reshape(15, -1, 16), scales.reshape(15, -1))
    stacked = StoredRows.of(pairs, 3)
    assert stacked.shape == (3, 5, width // 32 * 17)
    assert np.array_equal(to_float32(np.asarray(stacked)), wanted)
    rows, matrix = stacked.reshape(-1, stacked.shape[-1]), wanted.reshape(15, width)
    ids = np.array([14, 0, 3, 3])
    assert np.array_equal(dequantize_rows(rows, ids), matrix[ids])
    assert np.array_equal(dequantize_rows(rows, ids, width // 32 - 1, 1), matrix[ids, -32:])
    for part, expected in ((rows, matrix), (stacked[2], wanted[2]), (rows[:, 17:], matrix[:, 32:])):
        row_ids = ids % len(expected)
        out = np.zeros((4, row_items(MXFP4, expected.shape[1])), MXFP4)
        assert blocks_into(part, row_ids, out) == DONE
        assert np.array_equal(to_float32(out), expected[row_ids])
    values, scales = values[0], scales[0]
    for wrong in ((values, scales[1:]), (values.view(np.int8), scales), (scales, scales)):
        with pytest.raises(ValueError, match="beside"):
            PairedBlocks(*wrong)


@pytest.mark.parametrize("at", [0, 2], ids=["scale", "minimum"])
def test_q4_k_beyond_float16_is_refused(at: int) -> None:
    rows, _ = blocks("Q4_K")
    rows.view(np.uint8)[1, at : at + 2] = np.array([60000], np.float16).view(np.uint8)
    rows.view(np.uint8)[1, 4:16] = 63
    out = np.zeros((HEIGHT, row_items(Q4_1, WIDTH)), Q4_1)
    assert blocks_into(rows, np.arange(HEIGHT), out) == TOO_LARGE


@pytest.mark.parametrize("name", NAMES)
def test_columns_become_rows(name: str) -> None:
    rows, values = blocks(name, height=64)
    rng = np.random.default_rng(2)
    for ids in (
        np.arange(WIDTH),
        rng.permutation(WIDTH)[:100],
        np.array([], np.int32),
        np.array([COLUMNS_AT_ONCE - 1, COLUMNS_AT_ONCE, WIDTH - 1, 0]),
    ):
        assert np.array_equal(block_columns(rows, ids.astype(np.int32)), values[:, ids].T)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "NVFP4"])
def test_infinite_scales_are_found(name: str) -> None:
    rows, _ = blocks(name)
    assert blocks_status(rows) == DONE
    at = {"Q2_K": [81], "Q3_K": [109], "Q6_K": [209], "TQ1_0": [53], "TQ2_0": [65], "MXFP4": [0]}
    at["IQ1_M"] = [53, 55]
    rows.view(np.uint8)[4, at.get(name, [1])] = 255 if name == "MXFP4" else 0xFC
    assert blocks_status(rows) == NOT_FINITE
    out = np.zeros((HEIGHT, row_items(Q8, WIDTH)), Q8)
    assert blocks_into(rows, np.arange(HEIGHT), out) == NOT_FINITE
