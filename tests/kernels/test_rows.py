"""Rows times vectors, and rounding to bfloat16, against the reference."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.kernels import reference
from tests.kernels.arrays import BITS, bundled, random_bits, random_floats, unaligned

pytestmark = pytest.mark.sweep(kind=["f32", "f16"])

WIDTHS = [1, 3, 16, 17, 100, 4096]
HEIGHTS = [1, 2, 5, 97]


def assert_rows_right(
    backend: SimpleNamespace, weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None
) -> None:
    found = backend.gemv(weights, x, bias)
    assert found.dtype == np.float32 and found.shape == (x.shape[0], weights.shape[0])
    sizes = np.abs(x.astype(np.float64)) @ np.abs(reference.widened(weights)).T
    sizes += 0 if bias is None else np.abs(bias)
    expected = reference.gemv(weights, x, bias)
    assert (np.abs(found - expected) <= 1e-6 * sizes).all()


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_times_vectors(backend: SimpleNamespace, kind: str, width: int) -> None:
    for height in HEIGHTS:
        weights = random_bits(height, BITS[kind], height, width)
        bias = random_floats(2, height)
        for num_tokens in (1, 2, 5):
            x = random_floats(num_tokens, num_tokens, width)
            assert_rows_right(backend, weights, x)
            assert_rows_right(backend, weights, x, bias)


@pytest.mark.parametrize("kind", BITS)
def test_unaligned_arrays(backend: SimpleNamespace, kind: str) -> None:
    weights, x, bias = (
        random_bits(1, BITS[kind], 7, 33),
        random_floats(2, 3, 33),
        random_floats(3, 7),
    )
    found = backend.gemv(unaligned(weights), unaligned(x), unaligned(bias))
    np.testing.assert_array_equal(found, backend.gemv(weights, x, bias))


def test_strided_rows_are_not_mixed_up(backend: SimpleNamespace) -> None:
    matrices = [random_bits(seed, np.uint16, 9, 35) for seed in range(3)]
    for view in bundled(*matrices):
        assert not view.flags.c_contiguous
        assert_rows_right(backend, view, random_floats(4, 2, 35))
    assert_rows_right(backend, matrices[0][::-2], random_floats(4, 2, 35))


def test_strided_columns_and_vectors(backend: SimpleNamespace) -> None:
    weights, x = random_bits(1, np.float32, 9, 70), random_floats(2, 3, 70)
    assert_rows_right(backend, weights[:, ::2], x[:, 1::2])
    assert_rows_right(backend, weights.T[:9], random_floats(2, 3, 9))


def test_read_only_weights(backend: SimpleNamespace) -> None:
    weights = random_bits(1, np.uint16, 5, 20)
    weights.flags.writeable = False
    assert_rows_right(backend, weights, random_floats(2, 1, 20))


@pytest.mark.parametrize("kind", BITS)
def test_extreme_weights_are_widened_exactly(backend: SimpleNamespace, kind: str) -> None:
    """Every 16-bit pattern times one: subnormals, infinities and NaN included."""
    if kind == "f32":
        weights = np.array([[0.0], [-0.0], [1e-45], [3.4e38], [np.inf], [np.nan]], np.float32)
    else:
        weights = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(BITS[kind])[:, None]
    found = backend.gemv(weights, np.ones((1, 1), np.float32))
    with np.errstate(invalid="ignore"):
        expected = reference.widened(weights).T.astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def test_nothing_to_compute(backend: SimpleNamespace) -> None:
    weights, x = random_bits(1, np.float32, 5, 20), random_floats(2, 2, 20)
    assert backend.gemv(weights[:0], x).shape == (2, 0)
    assert backend.gemv(weights, x[:0]).shape == (0, 5)


@pytest.mark.parametrize(
    ("weights", "x", "bias"),
    [
        (np.zeros((3, 4), np.float64), np.zeros((1, 4), np.float32), None),
        (np.zeros((3, 4), np.float16), np.zeros((1, 4), np.float32), None),
        (np.zeros((3, 4), np.int32), np.zeros((1, 4), np.float32), None),
        (np.zeros((3, 4), ">f4"), np.zeros((1, 4), np.float32), None),
        (np.zeros(4, np.float32), np.zeros((1, 4), np.float32), None),
        (np.zeros((3, 4, 1), np.float32), np.zeros((1, 4), np.float32), None),
        (np.zeros((3, 4), np.float32), np.zeros((1, 5), np.float32), None),
        (np.zeros((3, 4), np.float32), np.zeros(4, np.float32), None),
        (np.zeros((3, 4), np.float32), np.zeros((1, 4), np.float64), None),
        (np.zeros((3, 4), np.float32), np.zeros((1, 4), np.float32), np.zeros(4, np.float32)),
        (np.zeros((3, 4), np.float32), np.zeros((1, 4), np.float32), np.zeros(3, np.float64)),
        (np.zeros((3, 4), np.float32), np.zeros((1, 4), np.float32), np.zeros((1, 3), np.float32)),
    ],
)
def test_rows_refuses(
    backend: SimpleNamespace, weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None
) -> None:
    with pytest.raises(ValueError):
        backend.gemv(weights, x, bias)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 16), (5, 17), (3, 100)])
def test_to_bfloat16(cpu_backend: SimpleNamespace, kind: str, shape: tuple[int, int]) -> None:
    weights = random_bits(1, BITS[kind], *shape)
    for view in (weights, unaligned(weights)):
        found = cpu_backend.to_bfloat16(view)
        assert found.dtype == np.int16
        np.testing.assert_array_equal(found, reference.to_bfloat16(weights))


def test_to_bfloat16_ties_and_limits(cpu_backend: SimpleNamespace) -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x00000001])
    values = np.concatenate([bits.astype(np.uint32).view(np.float32), [np.inf, -np.inf, -0.0]])
    values = values.astype(np.float32)[None].repeat(17, axis=0).reshape(1, -1)
    np.testing.assert_array_equal(cpu_backend.to_bfloat16(values), reference.to_bfloat16(values))


def test_to_bfloat16_of_every_finite_half(cpu_backend: SimpleNamespace) -> None:
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))][None]
    np.testing.assert_array_equal(cpu_backend.to_bfloat16(halves), reference.to_bfloat16(halves))


def test_to_bfloat16_of_nan(cpu_backend: SimpleNamespace) -> None:
    for bits in (
        np.array([0x7C01, 0x7E00, 0x7FFF, 0xFC01, 0xFFFF], np.uint16),
        np.array([0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFFF], np.uint16).view(np.int16),
        np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32),
    ):
        found = cpu_backend.to_bfloat16(np.tile(bits, 5)[None])
        assert ((found & 0x7F80) == 0x7F80).all()
        assert (found & 0x7F).all()


@pytest.mark.parametrize(
    "weights", [np.zeros((2, 3), np.float64), np.zeros(3, np.float32), np.zeros((0, 3), np.float32)]
)
def test_to_bfloat16_refuses(cpu_backend: SimpleNamespace, weights: np.ndarray) -> None:
    with pytest.raises(ValueError):
        cpu_backend.to_bfloat16(weights)
