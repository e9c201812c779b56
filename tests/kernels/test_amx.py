"""The tiles of AMX against the same sums in plain loops, to the bit, and these against float64."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from hotcold.numba_kernels.decode.vectors import activation_space
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.numba_kernels.measure import dense_part
from hotcold.numba_kernels.prefill.shared_rows import AMX
from tests.kernels.arrays import BITS, random_floats
from tests.kernels.cpu_calls import gemv
from tests.kernels.products import Products, combine, linear
from tests.kernels.quantized_rows import SUMMED, random_matrix, random_rows

pytestmark = pytest.mark.sweep
SIZES = [(5, 37, 71), (33, 101, 1027), (40, 600, 96)]
needs_amx = pytest.mark.skipif(not has_feature("amx-bf16"), reason="a CPU with AMX")


_STEP = 32  # numbers of a row of a tile
_LEAST = np.float32(np.finfo(np.float32).tiny)


def tile_products(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left (M, K) @ right (K, N), bfloat16 numbers as float32, as TDPBF16PS adds them up.

    Of every 32 numbers those in even places are added to one sum and those in odd places to
    another, in their order; their sum is added to what is there. A product of bfloat16 is exact.
    Numbers below the normal ones are zero.
    """
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    _add_up(np.ascontiguousarray(left), np.ascontiguousarray(right.T), total)
    return total


@njit(nogil=True)
def _add_up(left, right, total):
    for m in range(total.shape[0]):
        for n in range(total.shape[1]):
            for first in range(0, left.shape[1], _STEP):
                even, odd = np.float32(0), np.float32(0)
                for k in range(first, min(first + _STEP, left.shape[1]), 2):
                    even = _flushed(even + _flushed(left[m, k]) * _flushed(right[n, k]))
                    if k + 1 < left.shape[1]:
                        odd = _flushed(odd + _flushed(left[m, k + 1]) * _flushed(right[n, k + 1]))
                total[m, n] = _flushed(total[m, n] + _flushed(even + odd))


@njit(nogil=True)
def _flushed(number):
    return np.float32(0) * number if abs(number) < _LEAST else number


def bfloat16_of(numbers: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, as torch finds them, as float32."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16).float().numpy()


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("linear", "combine") for kind in BITS]
    + [("combine", kind) for kind in SUMMED],
)
@pytest.mark.parametrize(("num_tokens", "height", "width"), SIZES)
@needs_amx
def test_tiles_add_up_as_plain_loops(
    kind: str, name: str, num_tokens: int, height: int, width: int
) -> None:
    """Also numbers whose sums are below the normal ones."""
    if kind in SUMMED:
        width = -(-width // 256) * 256
    weights, wide = random_matrix(1, kind, height, width)
    for scale in (1.0, 1e-20):
        x = random_floats(2, num_tokens, width if name == "linear" else height)
        x = (x * scale * np.where(np.arange(x.shape[1]) % 3, scale, 1)).astype(np.float32)
        wide = bfloat16_of(wide)
        expected = tile_products(bfloat16_of(x), wide.T if name == "linear" else wide)
        for num_threads in (1, 3):
            found, multiply = (
                np.full_like(expected, np.nan),
                linear if name == "linear" else combine,
            )
            multiply(Products(AMX, num_threads), x, weights, found)
            assert found.tobytes() == expected.tobytes()


@pytest.mark.skipif(not has_feature("amx-int8"), reason="a CPU with AMX")
def test_without_memory_for_tiles_vectors_make_the_same_numbers() -> None:
    rows = random_rows(1, "q8", 48, 1 << 18).rows
    x = random_floats(2, 33, 1 << 18)
    expected, found = gemv(rows, x), np.zeros((33, 48), np.float32)
    scratch = activation_space(1, *x.shape)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), limits[1]))
    try:
        dense_part(rows, x, scratch, 0, found, 0, len(rows))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert found.tobytes() == expected.tobytes()
