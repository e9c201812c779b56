"""Rows of every format times vectors, and widened, against float64; a vector has its own bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hotcold.numba_kernels.formats import ROW_FORMATS
from hotcold.numba_kernels.load.convert import to_bfloat16, to_float32
from tests.kernels import reference
from tests.kernels.arrays import BITS, random_bits, random_floats, unaligned
from tests.kernels.neurons import Matrix
from tests.kernels.quantized_rows import (
    IN_BLOCKS,
    KINDS,
    KINDS_AND_WIDTHS,
    quantized_vectors,
    random_rows,
)

pytestmark = pytest.mark.sweep
Products = Callable[..., np.ndarray]

# Rows, numbers a row, vectors: whole tiles of them of every size and some left over, parts of the
# last chunk, several blocks of rows. More vectors than a step has may go through AMX's tiles.
SHAPES = [
    (1, 1, (1, 2, 5)), (97, 3, (1, 5)), (5, 17, (3,)), (2, 100, (2,)), (27, 32, (1, 9)),
    (23, 608, range(1, 33)), (51, 704, (2, 3, 4, 5, 8, 9, 17, 32)), (97, 4096, (1, 5)),
    (51, 2848, (1, 2, 5)), (419, 608, (2, 7, 32)), (48, 512, (33,)), (77, 2304, (40,)),
]  # fmt: skip


@pytest.mark.parametrize("kind", [*BITS, *KINDS])
def test_rows_times_vectors(products: Products, request: pytest.FixtureRequest, kind: str) -> None:
    is_slow = request.node.callspec.params.get("products") == "emulated"  # a hundred times slower
    unit = ROW_FORMATS[KINDS[kind]].block_weights if kind in KINDS else 1
    for seed, (height, width, numbers) in enumerate(SHAPES):
        width = -(-width // unit) * unit
        matrix = Matrix.random(seed, kind, height, width)
        most = max(numbers)
        x, bias = random_floats(seed, most, width), random_floats(3, height)
        vectors = x.astype(np.float64) if kind in BITS else quantized_vectors(x)
        expected = vectors @ matrix.weights.T + bias
        sizes = np.abs(x.astype(np.float64)) @ matrix.sizes.T + np.abs(bias)
        alone = np.concatenate([products(matrix.rows, row[None], bias) for row in x])
        assert alone.dtype == np.float32
        assert (np.abs(alone - expected) <= 1e-6 * sizes + 1e-6 * (kind in KINDS)).all()
        for num_tokens in list(numbers)[-2:] if is_slow else numbers:
            found = products(matrix.rows, x[:num_tokens], bias)
            assert found.tobytes() == alone[:num_tokens].tobytes()
        plain = products(matrix.rows, x[:1])
        assert (np.abs(plain - (expected[:1] - bias)) <= 1e-6 * sizes[:1] + 1e-6).all()


@pytest.mark.parametrize("kind", ["f16", "q8"])
def test_strided_rows_are_not_mixed_up(products: Products, kind: str) -> None:
    rows, x = Matrix.random(1, kind, 27, 64).rows, random_floats(4, 2, 64)
    for view in (rows[::3], rows[1::3], rows[::-2]):
        found = products(view, x)
        np.testing.assert_array_equal(found, products(np.ascontiguousarray(view), x))


@pytest.mark.parametrize("kind", BITS)
def test_unaligned_arrays(products: Products, kind: str) -> None:
    weights, x, bias = (
        random_bits(1, BITS[kind], 7, 33),
        random_floats(2, 3, 33),
        random_floats(3, 7),
    )
    found = products(unaligned(weights), unaligned(x), unaligned(bias))
    np.testing.assert_array_equal(found, products(weights, x, bias))


@pytest.mark.parametrize("kind", BITS)
def test_extreme_weights_are_widened_exactly(products: Products, kind: str) -> None:
    """Every 16-bit pattern times one: subnormals, infinities and NaN included."""
    if kind == "f32":
        weights = np.array([[0.0], [-0.0], [1e-45], [3.4e38], [np.inf], [np.nan]], np.float32)
    else:
        weights = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(BITS[kind])[:, None]
    found = products(weights, np.ones((1, 1), np.float32))
    with np.errstate(invalid="ignore"):
        expected = reference.widened(weights).T.astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def test_to_bfloat16_of_floats_and_of_every_finite_half() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for weights in (random_floats(1, 3, 100), halves[np.isfinite(halves.view(np.float16))][None]):
        np.testing.assert_array_equal(to_bfloat16(weights), reference.to_bfloat16(weights))


@pytest.mark.parametrize(("kind", "width"), KINDS_AND_WIDTHS)
def test_widening(kind: str, width: int) -> None:
    rows = random_rows(4, kind, 5, width)
    assert (to_float32(rows.rows) == rows.weights.astype(np.float32)).all()
    expected = reference.narrowed(rows.weights.astype(np.float32), np.int16)
    assert (to_bfloat16(rows.rows) == expected).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(products: Products, kind: str, bad: float) -> None:
    width = 768 if kind in IN_BLOCKS else 544
    rows = random_rows(10, kind, 9, width)
    x = random_floats(11, 2, width)
    x[1, width - 1] = bad
    found = products(rows.rows, x)
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1]).any()


def test_to_bfloat16_of_nan() -> None:
    for bits in (
        np.array([0x7C01, 0x7E00, 0x7FFF, 0xFC01, 0xFFFF], np.uint16),
        np.array([0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFFF], np.uint16).view(np.int16),
        np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32),
    ):
        found = to_bfloat16(np.tile(bits, 5)[None])
        assert ((found & 0x7F80) == 0x7F80).all()
        assert (found & 0x7F).all()
