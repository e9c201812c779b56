"""Matmul in pairs of bfloat16 against float64 of the same rounded numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hotcold.actors.cpu.kernel_matmul import Bfloat16Matmul
from hotcold.numba_kernels.ir.target import has_feature
from tests.kernels import reference
from tests.kernels.arrays import BITS, random_bits, random_floats

pytestmark = [
    pytest.mark.skipif(not has_feature("avx512bf16"), reason="a CPU with AVX512-BF16"),
    pytest.mark.sweep,
]
KINDS = ["f16", "bf16"]


def narrowed(array: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, as torch finds them."""
    return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16).double().numpy()


def in_turn(num_threads: int) -> Bfloat16Matmul:
    """With threads that are played one after the other."""

    def each_thread(phase: Callable[[int], None]) -> None:
        for thread in range(num_threads):
            phase(thread)

    return Bfloat16Matmul(num_threads, each_thread)


def run(
    matmul: Bfloat16Matmul, name: str, x: np.ndarray, weights: np.ndarray, out: np.ndarray
) -> None:
    """out = x @ weights.T ("linear") or x @ weights ("combine")."""
    if name == "linear":
        matmul.linear(matmul.operand(x, weights), weights, out)
    else:
        matmul.combine(x, weights, out)


def multiply(name: str, x: np.ndarray, weights: np.ndarray, num_threads: int = 1) -> np.ndarray:
    """x @ weights.T ("linear") or x @ weights ("combine")."""
    width = weights.shape[0] if name == "linear" else weights.shape[1]
    out = np.full((x.shape[0], width), np.nan, np.float32)
    run(in_turn(num_threads), name, x, weights, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "combine"])
@pytest.mark.parametrize(
    ("num_tokens", "height", "width"),
    [(1, 1, 1), (5, 37, 71), (16, 6, 2), (33, 101, 1027), (70, 97, 1184), (130, 600, 96)],
)
def test_linear_and_combine(kind: str, name: str, num_tokens: int, height: int, width: int) -> None:
    weights = random_bits(1, BITS[kind], height, width)
    x = random_floats(2, num_tokens, width if name == "linear" else height)
    rows = narrowed(reference.widened(weights))
    rows = rows.T if name == "linear" else rows
    exact, sizes = narrowed(x) @ rows, np.abs(narrowed(x)) @ np.abs(rows)
    for num_threads in (1, 3):
        found = multiply(name, x, weights, num_threads)
        assert (np.abs(found - exact) <= 2e-6 * sizes + 1e-30).all()


@pytest.mark.parametrize("name", ["linear", "combine"])
def test_a_token_does_not_depend_on_its_batch_mates(name: str) -> None:
    weights, x = random_bits(3, BITS["f16"], 300, 300), random_floats(4, 90, 300)
    together = multiply(name, x, weights, 2)
    for first, last in ((0, 1), (3, 20), (20, 85), (89, 90)):
        alone = multiply(name, x[first:last], weights)
        assert alone.tobytes() == together[first:last].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "combine"])
def test_what_is_not_finite_stays_in_its_place(kind: str, name: str) -> None:
    """A NaN of any bits, or an infinity, reaches what it is multiplied into and nothing else."""
    height, width, token = 40, 51, 7
    weights = random_bits(5, BITS[kind], height, width)
    x = random_floats(6, 20, width if name == "linear" else height)
    x.view(np.uint32)[token, 3] = 0xFFFFFFFF  # rounding these bits as a number would make it 0
    found = multiply(name, x, weights)
    assert np.isnan(found[token]).all() and np.isfinite(np.delete(found, token, axis=0)).all()
    x[token, 3] = 1
    weights[9, 11] = {"f16": 0x7C01, "bf16": 0x7F81}[kind]
    found = multiply(name, x, weights)
    column = 9 if name == "linear" else 11
    assert np.isnan(found[:, column]).all() and np.isfinite(np.delete(found, column, axis=1)).all()
    weights[9, 11] = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    found = multiply(name, np.abs(x), weights)
    assert np.isposinf(found[:, column]).all()


def test_space_that_held_other_numbers_does_not_matter() -> None:
    """One object for matrices of many sizes, as a service has it."""
    matmul = in_turn(2)
    for seed, (num_tokens, height, width) in enumerate([(64, 97, 600), (3, 7, 5), (40, 61, 33)]):
        weights = random_bits(seed, BITS["f16"], height, width)
        weights[0, 0] = 0x7C00 if seed == 0 else weights[0, 0]
        for name, inner in (("linear", width), ("combine", height)):
            x = random_floats(9 + seed, num_tokens, inner)
            out = np.empty((num_tokens, height if name == "linear" else width), np.float32)
            run(matmul, name, x, weights, out)
            assert out.tobytes() == multiply(name, x, weights).tobytes()
