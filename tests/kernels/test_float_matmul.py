"""Matmul as floats, in pairs of bfloat16 or in float32, against float64 of the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotcold.actors.cpu.kernel_matmul import (
    AmxMatmul,
    Bfloat16Matmul,
    Float32Matmul,
    FloatMatmul,
)
from hotcold.numba_kernels.ir.target import has_feature
from tests.kernels import reference
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.products import combine, in_turn, linear
from tests.kernels.quantized_rows import SUMMED, random_rows

pytestmark = pytest.mark.sweep
FORMATS = [
    pytest.param(
        AmxMatmul,
        id="amx",
        marks=pytest.mark.skipif(not has_feature("amx-bf16"), reason="a CPU with AMX"),
    ),
    pytest.param(
        Bfloat16Matmul,
        id="bfloat16",
        marks=pytest.mark.skipif(not has_feature("avx512bf16"), reason="a CPU with AVX512-BF16"),
    ),
    pytest.param(Float32Matmul, id="float32"),
]
KINDS = list(BITS)
Format = type[FloatMatmul]


def rounded(kind: Format, array: np.ndarray) -> np.ndarray:
    """What is multiplied: the numbers, or the nearest bfloat16 ones as torch finds them."""
    floats = torch.from_numpy(array.astype(np.float32))
    return (floats if kind is Float32Matmul else floats.to(torch.bfloat16)).double().numpy()


def run(
    matmul: FloatMatmul, name: str, x: np.ndarray, weights: np.ndarray, width: int
) -> np.ndarray:
    """x @ weights.T ("linear") or x @ weights ("combine"), so many columns."""
    out = np.full((x.shape[0], width), np.nan, np.float32)
    if name == "linear":
        linear(matmul, x, weights, out)
    else:
        combine(matmul, x, weights, out)
    return out


def multiply(
    kind: Format, name: str, x: np.ndarray, weights: np.ndarray, num_threads: int = 1
) -> np.ndarray:
    """The product by an object of its own."""
    width = weights.shape[0] if name == "linear" else weights.shape[1]
    return run(in_turn(kind, num_threads), name, x, weights, width)


@pytest.mark.parametrize("items", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "combine"])
@pytest.mark.parametrize(
    ("num_tokens", "height", "width"),
    [(1, 1, 1), (5, 37, 71), (16, 6, 2), (33, 101, 1027), (70, 97, 1184), (130, 600, 96)],
)
def test_linear_and_combine(
    items: Format, kind: str, name: str, num_tokens: int, height: int, width: int
) -> None:
    weights = random_bits(1, BITS[kind], height, width)
    x = random_floats(2, num_tokens, width if name == "linear" else height)
    rows, exact_x = rounded(items, reference.widened(weights)), rounded(items, x)
    rows = rows.T if name == "linear" else rows
    exact, sizes = exact_x @ rows, np.abs(exact_x) @ np.abs(rows)
    for num_threads in (1, 3):
        found = multiply(items, name, x, weights, num_threads)
        assert (np.abs(found - exact) <= 2e-6 * sizes + 1e-30).all()


@pytest.mark.parametrize("items", FORMATS)
@pytest.mark.parametrize("kind", SUMMED)
@pytest.mark.parametrize(("num_tokens", "height"), [(3, 1), (16, 6), (70, 299)])
@pytest.mark.parametrize("width", [32, 512, 1184])
def test_quantized_rows_are_combined(
    items: Format, kind: str, num_tokens: int, height: int, width: int
) -> None:
    rows = random_rows(1, kind, height, width)
    h = random_floats(2, num_tokens, height)
    exact_h, weights = rounded(items, h), rounded(items, rows.weights)
    exact, sizes = exact_h @ weights, np.abs(exact_h) @ np.abs(weights)
    for num_threads in (1, 3):
        found = run(in_turn(items, num_threads), "combine", h, rows.rows, width)
        assert (np.abs(found - exact) <= 2e-6 * sizes + 1e-30).all()


@pytest.mark.parametrize("items", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "combine"])
def test_what_is_not_finite_stays_in_its_place(items: Format, kind: str, name: str) -> None:
    """A NaN of any bits, or an infinity, reaches what it is multiplied into and nothing else."""
    height, width, token = 40, 51, 7
    weights = random_bits(5, BITS[kind], height, width)
    x = random_floats(6, 20, width if name == "linear" else height)
    x.view(np.uint32)[token, 3] = 0xFFFFFFFF  # rounding these bits as a number would make it 0
    found = multiply(items, name, x, weights)
    assert np.isnan(found[token]).all() and np.isfinite(np.delete(found, token, axis=0)).all()
    x[token, 3] = 1
    weights[9, 11] = {"f32": np.nan, "f16": 0x7C01, "bf16": 0x7F81}[kind]
    found = multiply(items, name, x, weights)
    column = 9 if name == "linear" else 11
    assert np.isnan(found[:, column]).all() and np.isfinite(np.delete(found, column, axis=1)).all()
    weights[9, 11] = {"f32": np.inf, "f16": 0x7C00, "bf16": 0x7F80}[kind]
    found = multiply(items, name, np.abs(x), weights)
    assert np.isposinf(found[:, column]).all()


@pytest.mark.parametrize("items", FORMATS)
def test_space_that_held_other_numbers_does_not_matter(items: Format) -> None:
    """One object for matrices of many sizes, as a service has it."""
    matmul = in_turn(items, 2)
    for seed, (num_tokens, height, width) in enumerate([(64, 97, 600), (3, 7, 5), (40, 61, 33)]):
        weights = random_bits(seed, BITS["f16"], height, width)
        weights[0, 0] = 0x7C00 if seed == 0 else weights[0, 0]
        for name, inner in (("linear", width), ("combine", height)):
            x = random_floats(9 + seed, num_tokens, inner)
            out = run(matmul, name, x, weights, height if name == "linear" else width)
            assert out.tobytes() == multiply(items, name, x, weights).tobytes()
