"""Where vectors lie that rows are multiplied with, and what is in them."""

import numpy as np
import pytest

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.vectors import (
    activation_space,
    aligned_zeros,
    copy_numbers,
    quantize_activations,
)
from hotcold.numba_kernels.ffn.in_memory import new_scratch
from hotcold.numba_kernels.ir.target import LINE_BYTES, has_feature
from tests.kernels.arrays import BITS, random_bits, random_floats


@njit(nogil=True, _nrt=False)
def _placed(weights, x, scratch, thread, out):
    vectors = quantize_activations(weights, x, scratch, thread)
    for t in range(x.shape[0]):
        copy_numbers(vectors[t], out[t])


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("kind", BITS)
def test_floats_are_what_they_were(kind: str, num_tokens: int) -> None:
    width = 80
    weights, scratch = random_bits(0, BITS[kind], 1, width), activation_space(2, 3, width)
    x = random_floats(1, num_tokens, width)
    out = np.zeros_like(x)
    _placed(weights, x, scratch, 1, out)
    np.testing.assert_array_equal(out, x)
    assert scratch.floats[1].any() == (num_tokens > 1)  # one stays where it is
    assert not scratch.floats[0].any()  # another thread's


@pytest.mark.parametrize("width", [1, 64, 576, 992, 4096, 8192])
def test_vectors_begin_in_many_sets_of_a_cache(width: int) -> None:
    floats = activation_space(2, 32, width).floats
    assert floats.shape[:2] == (2, 32) and floats.shape[2] >= width
    lines, rest = divmod(floats.strides[1], LINE_BYTES)
    assert rest == 0
    assert floats.ctypes.data % LINE_BYTES == (16 if has_feature("avx512f") else 0)
    begins = {lines * t % 64 for t in range(32)}  # of the sets of a cache of 32 KiB
    assert len(begins) == 16


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 32, 4096)])
def test_zeros_begin_with_a_line(shape: tuple[int, ...]) -> None:
    array = aligned_zeros(shape)
    assert array.shape == shape and array.dtype == np.float32 and not array.any()
    assert array.ctypes.data % LINE_BYTES == 0
    assert new_scratch(2, 4, 64, 1000).sums.ctypes.data % LINE_BYTES == 0
