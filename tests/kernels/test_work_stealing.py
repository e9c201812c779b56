"""Work stealing: each row is computed once, by whichever thread, to the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import njit

from hotcold.numba_kernels.decode.rows import gemv
from hotcold.numba_kernels.decode.vectors import activation_space, quantize_activations
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.serve.work_stealing import (
    block_rows,
    new_block_counters,
    work_stealing_rows,
)
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.quantized_rows import IN_BLOCKS, KINDS, random_rows

pytestmark = pytest.mark.sweep(kind=["f32", "q4"])

NO_BIAS, NO_ADDEND = np.empty(0, np.float32), np.empty((0, 0), np.float32)


@njit(nogil=True, _nrt=False)
def _run(counters, thread, num_threads, weights, bias, x, scratch, addend, out):
    vectors = quantize_activations(weights, x, scratch, thread)
    work_stealing_rows(
        counters, thread, num_threads, weights, bias, vectors, addend, out, np.int64(0)
    )


class Case:
    """A matrix of several blocks for each of three threads, some tokens, and their products."""

    num_threads = 3

    def __init__(self, kind: str, num_tokens: int) -> None:
        width = 1280 if kind in IN_BLOCKS else 1056
        size = int(block_rows(self.weights_of(kind, 1, width)))
        self.weights = self.weights_of(kind, 7 * size + 13, width)
        assert row_width(self.weights.dtype, self.weights.shape[1]) == width
        self.x = random_floats(1, num_tokens, width)
        self.counters = new_block_counters(2, self.num_threads)
        self.scratch = activation_space(self.num_threads, *self.x.shape)
        self.out = np.full((num_tokens, self.weights.shape[0]), np.nan, np.float32)
        self.products = gemv(self.weights, self.x)

    @staticmethod
    def weights_of(kind: str, num_rows: int, width: int) -> np.ndarray:
        if kind in KINDS:
            few = random_rows(0, kind, min(num_rows, 64), width).rows
            return np.ascontiguousarray(np.resize(few, (num_rows, few.shape[1])))
        return random_bits(0, BITS[kind], num_rows, width)

    def run(
        self, thread: int, bias: np.ndarray = NO_BIAS, addend: np.ndarray = NO_ADDEND, kind: int = 0
    ) -> None:
        _run(
            self.counters[kind], thread, self.num_threads, self.weights, bias, self.x, self.scratch,
            addend, self.out,
        )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("kind", [*BITS, *KINDS])
def test_one_thread_does_it_all_where_no_other_starts(kind: str, num_tokens: int) -> None:
    case = Case(kind, num_tokens)
    case.run(1)
    np.testing.assert_array_equal(case.out, case.products)
    case.out[:] = np.nan  # late threads find nothing left
    case.run(0)
    case.run(2)
    assert np.isnan(case.out).all()
    case.run(0, kind=1)  # another kind of work has its own counters
    np.testing.assert_array_equal(case.out, case.products)


@pytest.mark.parametrize("kind", ["f32", "q4"])
def test_threads_side_by_side(kind: str) -> None:
    case = Case(kind, 3)
    bias, addend = random_floats(2, case.out.shape[1]), random_floats(3, *case.out.shape)
    with ThreadPoolExecutor(case.num_threads) as pool:
        for _ in range(50):
            case.counters[:], case.out[:] = 0, np.nan
            list(pool.map(lambda thread: case.run(thread, bias, addend), range(case.num_threads)))
            np.testing.assert_array_equal(case.out, (case.products + bias) + addend)
