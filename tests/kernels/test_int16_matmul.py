"""Products in pairs of int16 against float64 matmul, exact and of the same rounded numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.cpu.kernel_matmul import Int16Matmul
from hotcold.numba_kernels.ir.target import has_feature
from tests.kernels import reference
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.products import in_turn, linear

pytestmark = [
    pytest.mark.skipif(not has_feature("avx512vnni"), reason="a CPU with AVX512-VNNI"),
    pytest.mark.sweep,
]
KINDS = ["f16", "bf16"]
COLUMN_GROUP = 64
ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(1, 1, 1), (5, 37, 71), (16, 6, 2), (33, 101, 1027), (70, 97, 1184), (130, 600, 64)]


def rounded(array: np.ndarray, most: int) -> np.ndarray:
    """Each group of 64 columns to whole multiples of its largest magnitude / most.

    Quotients are float32, because it matters where they are midway between two numbers.
    """
    found = np.zeros(array.shape)
    for first in range(0, array.shape[1], COLUMN_GROUP):
        part = array[:, first : first + COLUMN_GROUP].astype(np.float32)
        top = np.abs(part).max(axis=1, keepdims=True)
        factor = np.float32(most) / np.where(top == 0, np.float32(1), top)
        scale = top.astype(np.float64) / most
        found[:, first : first + COLUMN_GROUP] = np.rint(part * factor) * scale
    return found


def multiply(x: np.ndarray, weights: np.ndarray, num_threads: int = 1) -> np.ndarray:
    """x @ weights.T."""
    out = np.full((x.shape[0], weights.shape[0]), np.nan, np.float32)
    matmul = in_turn(Int16Matmul, num_threads)
    linear(matmul, x, weights, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "height", "width"), SHAPES)
def test_linear(kind: str, num_tokens: int, height: int, width: int) -> None:
    weights = random_bits(1, BITS[kind], height, width)
    x, wide = random_floats(2, num_tokens, width), reference.widened(weights).astype(np.float64)
    near_x, near = rounded(x, 8191), rounded(wide, 4095)
    sums = 2e-6 * np.abs(near_x) @ np.abs(near).T + 1e-30  # what float32 sums may lose
    exact = x.astype(np.float64) @ wide.T
    bound = np.abs(near_x - x) @ np.abs(wide).T + np.abs(near_x) @ np.abs(near - wide).T
    for num_threads in (1, 3):
        found = multiply(x, weights, num_threads)
        assert (np.abs(found - near_x @ near.T) <= sums).all()
        assert (np.abs(found - exact) <= bound + sums).all()


def test_the_largest_numbers_do_not_overflow() -> None:
    """All of a group at the top, of one sign: the largest sums there can be."""
    x, weights = np.full((20, 192), -3e4, np.float32), np.full((13, 192), 0x7BFF, np.uint16)
    np.testing.assert_allclose(multiply(x, weights), -3e4 * 65504 * 192, rtol=1e-6)
    tiny = np.full((20, 192), 1e-42, np.float32)
    assert np.abs(multiply(tiny, weights)).max() <= 1e-30
    assert not multiply(np.zeros_like(x), weights).any()
    assert not multiply(x, np.zeros_like(weights)).any()


def test_a_token_does_not_depend_on_its_batch_mates() -> None:
    weights, x = random_bits(3, BITS["f16"], 300, 300), random_floats(4, 90, 300)
    together = multiply(x, weights, 2)
    for first, last in ((0, 1), (3, 20), (20, 85), (89, 90)):
        alone = multiply(x[first:last], weights)
        assert alone.tobytes() == together[first:last].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [51, 128])
def test_what_is_not_finite_stays_in_its_place(kind: str, width: int) -> None:
    """A NaN of any bits, or an infinity, reaches what it is multiplied into and nothing else."""
    height, token = 40, 7
    weights, x = random_bits(5, BITS[kind], height, width), random_floats(6, 20, width)
    for bits in (0xFFFFFFFF, 0x7F800000):
        spoiled = x.copy()
        spoiled.view(np.uint32)[token, 3] = bits
        found = multiply(spoiled, weights)
        assert not np.isfinite(found[token]).any()
        assert np.isfinite(np.delete(found, token, axis=0)).all()
    for bits in {"f16": (0x7C01, 0x7C00), "bf16": (0x7F81, 0x7F80)}[kind]:
        weights[9, 11] = bits
        found = multiply(x, weights)
        assert not np.isfinite(found[:, 9]).any()
        assert np.isfinite(np.delete(found, 9, axis=1)).all()


def test_space_that_held_other_numbers_does_not_matter() -> None:
    """One object for matrices of many sizes, as a service has it."""
    matmul = in_turn(Int16Matmul, 2)
    for seed, (num_tokens, height, width) in enumerate([(64, 97, 600), (3, 7, 5), (40, 61, 33)]):
        weights, x = random_bits(seed, BITS["f16"], height, width), random_floats(9, 64, width)
        x = x[:num_tokens]
        if seed == 0:
            weights[0, 0] = 0x7C00
        out = np.empty((num_tokens, height), np.float32)
        linear(matmul, x, weights, out)
        assert out.tobytes() == multiply(x, weights).tobytes()


MULTIPLY = """
import numpy as np
from hotcold.actors.cpu.kernel_matmul import Int16Matmul
from tests.kernels.products import in_turn, linear

weights = np.full((3, 64), 0x3C00, np.uint16)  # 1 in float16
out = np.zeros((2, 3), np.float32)
matmul = Int16Matmul(1, lambda phase: phase(0))
linear(matmul, np.ones((2, 64), np.float32), weights, out)
assert np.allclose(out, 64)
"""


def test_a_process_that_was_killed_while_it_compiled_harms_no_later_one(tmp_path: Path) -> None:
    """What it leaves are functions of a kernel that has to be compiled again with them."""

    def multiply_in_a_process() -> None:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", MULTIPLY], env=environment, cwd=ROOT, check=True)

    multiply_in_a_process()
    kernels = list(tmp_path.rglob("*linear_int16_kernel*"))
    assert kernels
    for file in kernels:
        file.unlink()
    multiply_in_a_process()
