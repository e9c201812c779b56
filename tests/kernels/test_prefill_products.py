"""Products of prefill, in every way that there is, against float64 of the numbers they are made of.

Ways are columns of `matmul_kinds`, whose instructions this CPU must have. The last column's are
those of the CPU that kernels are compiled for: `tests/kernels/test_other_cpus.py` has AVX2's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotcold.actors.cpu.matmul import matmul_kinds
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.numba_kernels.prefill.shared_rows import AMX, BFLOAT16, FLOAT32, INT16
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.products import Products, combine, linear
from tests.kernels.quantized_rows import IN_BLOCKS, KINDS, SUMMED, random_matrix

# Kernels are compiled for each kind. What formats differ in is tested with the rows.
pytestmark = pytest.mark.sweep(kind=["f32", "f16", "bf16", "q8", "q4", "q4_k"])
COLUMN_GROUP = 64  # of int16
ZEN_4 = {"avx512bf16", "avx512vnni"}  # and Zen 5, Cooper Lake
# A CPU's features, the one that must be here, the kinds of 16 bits, and of sums of quantized rows.
WAYS = {
    "amx": ({"amx-bf16", *ZEN_4}, "amx-bf16", (AMX, AMX), AMX),
    "bf16": (ZEN_4, "avx512bf16", (BFLOAT16, BFLOAT16), BFLOAT16),
    "vnni": ({"avx512vnni"}, "avx512vnni", (INT16, FLOAT32), FLOAT32),
    "plain": (set[str](), "", (FLOAT32, FLOAT32), FLOAT32),
}
# Rows of floats, and what is summed of quantized ones; the others' are in the test of places.
FLOATS = [(name, kind) for name in ("linear", "combine") for kind in BITS]
SUMS = [("combine", kind) for kind in SUMMED]
ALL = [*FLOATS, *SUMS, *(("linear", kind) for kind in KINDS)]
SHAPES = [
    (1, 1, 1), (5, 37, 71), (16, 6, 2), (33, 101, 1027), (70, 97, 1184), (130, 600, 96),
    (130, 600, 64),
]  # fmt: skip
each_way = pytest.mark.parametrize("way", WAYS)


def kind_of(way: str, name: str, dtype: np.dtype) -> type:
    features, needed, *_ = WAYS[way]
    if needed and not has_feature(needed):
        pytest.skip(f"this CPU has no {needed}")
    return matmul_kinds(dtype, features)[name == "combine"]


def run(
    products: Products, name: str, x: np.ndarray, weights: np.ndarray, width: int
) -> np.ndarray:
    """x @ weights.T ("linear") or x @ weights ("combine"), so many columns."""
    out = np.full((len(x), width), np.nan, np.float32)
    (linear if name == "linear" else combine)(products, x, weights, out)
    return out


def rounded(kind: type, array: np.ndarray, most: int) -> np.ndarray:
    """What is multiplied: numbers as they are, as the nearest bfloat16, or of int16.

    Of int16 each group of 64 columns is whole multiples of its largest magnitude / most; quotients
    are float32, because it matters where they are midway between two numbers.
    """
    if kind is FLOAT32:
        return array.astype(np.float64)
    if kind is not INT16:
        floats = torch.from_numpy(array.astype(np.float32))
        return floats.to(torch.bfloat16).double().numpy()
    found = np.zeros(array.shape)
    for first in range(0, array.shape[1], COLUMN_GROUP):
        part = array[:, first : first + COLUMN_GROUP].astype(np.float32)
        top = np.abs(part).max(axis=1, keepdims=True)
        factor = np.float32(most) / np.where(top == 0, np.float32(1), top)
        scale = top.astype(np.float64) / most
        found[:, first : first + COLUMN_GROUP] = np.rint(part * factor) * scale
    return found


@each_way
@pytest.mark.parametrize(("name", "kind"), [*FLOATS, *SUMS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums(way: str, name: str, kind: str, shape: tuple[int, int, int]) -> None:
    """Of rounded numbers, to what float32 sums may lose."""
    num_tokens, height, width = shape
    if kind in KINDS:  # whole groups, of the K formats whole blocks
        unit = 256 if kind in IN_BLOCKS else 32
        width = -(-width // unit) * unit
    weights, wide = random_matrix(1, kind, height, width)
    of_kind = kind_of(way, name, weights.dtype)
    x = random_floats(2, num_tokens, width if name == "linear" else height)
    near_x, near = rounded(of_kind, x, 8191), rounded(of_kind, wide, 4095)
    near = near.T if name == "linear" else near
    exact, sizes = near_x @ near, np.abs(near_x) @ np.abs(near)
    for num_threads in (1, 3):
        found = run(Products(of_kind, num_threads), name, x, weights, near.shape[1])
        assert (np.abs(found - exact) <= 2e-6 * sizes + 1e-30).all()


@each_way
@pytest.mark.parametrize(("name", "kind"), ALL)
def test_bits_do_not_depend_on_company_or_place(way: str, name: str, kind: str) -> None:
    height, width = 101, 1280
    weights, _ = random_matrix(1, kind, height, width)
    products = Products(kind_of(way, name, weights.dtype), 2)
    x = random_floats(2, 512, width if name == "linear" else height)
    columns = height if name == "linear" else width
    expected = run(products, name, x, weights, columns)
    assert np.isfinite(expected).all()
    draw = np.random.default_rng(3)
    for count in (1, 33, 64, 65, 200, 512):
        ids = draw.choice(len(x), count, replace=False)
        company = x[ids] * 1
        found = run(products, name, company, weights, columns)
        assert found.tobytes() == expected[ids].tobytes(), count
        company[1:] *= 100  # others with other numbers
        found = run(products, name, company, weights, columns)
        assert found[0].tobytes() == expected[ids[0]].tobytes()


@each_way
@pytest.mark.parametrize(("name", "kind"), FLOATS)
@pytest.mark.parametrize("width", [51, 128])
def test_what_is_not_finite_stays_in_its_place(way: str, name: str, kind: str, width: int) -> None:
    """A NaN of any bits, or an infinity, reaches what it is multiplied into and nothing else."""
    weights, height, token = random_bits(5, BITS[kind], 40, width), 40, 7
    of_kind = kind_of(way, name, weights.dtype)
    x = random_floats(6, 20, width if name == "linear" else height)
    columns, column = (height, 9) if name == "linear" else (width, 11)

    def product(x: np.ndarray) -> np.ndarray:
        return run(Products(of_kind, 1), name, x, weights, columns)

    for bits in (0xFFFFFFFF, 0x7F800000):  # rounding the first as a number would make it 0
        spoiled = x.copy()
        spoiled.view(np.uint32)[token, 3] = bits
        found = product(spoiled)
        assert not np.isfinite(found[token]).any()
        assert np.isfinite(np.delete(found, token, axis=0)).all()
    not_finite: dict[str, tuple[float, float]] = {
        "f32": (np.nan, np.inf),
        "f16": (0x7C01, 0x7C00),
        "bf16": (0x7F81, 0x7F80),
    }
    for is_infinite, number in enumerate(not_finite[kind]):
        weights[9, 11] = number
        found = product(np.abs(x))
        assert not np.isfinite(found[:, column]).any()
        assert np.isfinite(np.delete(found, column, axis=1)).all()
        if of_kind is not INT16:
            assert (np.isposinf if is_infinite else np.isnan)(found[:, column]).all()
