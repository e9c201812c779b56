"""The tiles of AMX against the same sums in plain loops, to the bit, and these against float64."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.cpu.kernel_matmul import AmxMatmul
from hotcold.numba_kernels.decode.rows import _gemv, gemv
from hotcold.numba_kernels.decode.vectors import activation_space
from hotcold.numba_kernels.ir.target import has_feature
from tests.kernels import reference
from tests.kernels.amx import EmulatedAmxMatmul, bfloat16_of
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.products import combine, in_turn, linear
from tests.kernels.quantized_rows import KINDS, SUMMED, random_rows

SIZES = [(1, 1, 1), (5, 37, 71), (33, 101, 1027), (70, 97, 544), (40, 600, 96)]
needs_amx = pytest.mark.skipif(not has_feature("amx-bf16"), reason="a CPU with AMX")


def products(
    kind: type, num_threads: int, x: np.ndarray, weights: np.ndarray, name: str, width: int
) -> np.ndarray:
    """x @ weights.T ("linear") or x @ weights ("combine"), so many columns."""
    out = np.full((len(x), width), np.nan, np.float32)
    (linear if name == "linear" else combine)(in_turn(kind, num_threads), x, weights, out)
    return out


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", ["linear", "combine"])
@pytest.mark.parametrize(("num_tokens", "height", "width"), SIZES)
@needs_amx
def test_tiles_add_up_as_emulated(
    kind: str, name: str, num_tokens: int, height: int, width: int
) -> None:
    """Also numbers whose sums are below the normal ones."""
    for scale in (1.0, 1e-20):
        weights = random_bits(1, BITS[kind], height, width)
        x = random_floats(2, num_tokens, width if name == "linear" else height)
        x = (x * scale * np.where(np.arange(x.shape[1]) % 3, scale, 1)).astype(np.float32)
        columns = height if name == "linear" else width
        for num_threads in (1, 3):
            found, expected = (
                products(own, num_threads, x, weights, name, columns)
                for own in (AmxMatmul, EmulatedAmxMatmul)
            )
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", SUMMED)
@pytest.mark.parametrize("width", [512, 1184])
@needs_amx
def test_quantized_rows_add_up_as_emulated(kind: str, width: int) -> None:
    rows = random_rows(1, kind, 75, width).rows
    h = random_floats(2, 40, 75)
    found, expected = (
        products(own, 2, h, rows, "combine", width) for own in (AmxMatmul, EmulatedAmxMatmul)
    )
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_tokens", "height", "width"), [(33, 48, 512), (40, 77, 2304), (130, 200, 1280)]
)
def test_whole_numbers_add_up_as_one_vector_alone(
    kind: str, num_tokens: int, height: int, width: int
) -> None:
    """In tiles, where the CPU has them, as in vectors; also where rows end with part of a chunk."""
    rows = random_rows(1, kind, height, width).rows
    x = random_floats(2, num_tokens, width)
    found = gemv(rows, x)
    alone = [gemv(rows, x[t : t + 1]) for t in range(num_tokens)]
    assert np.isfinite(found).all() and found.tobytes() == np.concatenate(alone).tobytes()


@pytest.mark.skipif(not has_feature("amx-int8"), reason="a CPU with AMX")
def test_without_memory_for_tiles_vectors_make_the_same_numbers() -> None:
    rows = random_rows(1, "q8", 48, 1 << 18).rows
    x = random_floats(2, 33, 1 << 18)
    expected, found = gemv(rows, x), np.zeros((33, 48), np.float32)
    scratch, bias = activation_space(1, *x.shape), np.empty(0, np.float32)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), limits[1]))
    try:
        _gemv(rows, bias, x, scratch, found)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", ["linear", "combine"])
def test_emulated_sums(kind: str, name: str) -> None:
    weights = random_bits(1, BITS[kind], 60, 90)
    x = random_floats(2, 35, 90 if name == "linear" else 60)
    rows = bfloat16_of(reference.widened(weights).astype(np.float32)).astype(np.float64)
    rows = rows.T if name == "linear" else rows
    exact_x = bfloat16_of(x).astype(np.float64)
    found = products(EmulatedAmxMatmul, 2, x, weights, name, rows.shape[1])
    sizes = np.abs(exact_x) @ np.abs(rows)
    assert (np.abs(found - exact_x @ rows) <= 2e-6 * sizes).all()
