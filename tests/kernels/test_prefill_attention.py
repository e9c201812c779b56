"""Attention of prompts against float64; a token's bits depend on what it sees alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from hotcold.numba_kernels.ir.exp_ir import LOG2_E, exp2, tanh_of_exponent
from hotcold.numba_kernels.ir.vec import F32, Arguments, Vec, codegen_of
from tests.kernels import reference
from tests.kernels.prefill_texts import DTYPES, NAN, Text, a_text, attend, numbers_in

pytestmark = pytest.mark.sweep

INFINITY = NAN | {np.float32: np.inf, np.uint16: 0x7C00}
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def check(text: Text, first: int = 0, **changes: Any) -> None:
    found = attend(text, first, **changes)
    keys, values = numbers_in(text.keys), numbers_in(text.values)
    expected = reference.prompt_attention(text.queries[first:], keys, values, **changes)
    np.testing.assert_allclose(found, expected, atol=3e-6)


@EACH_DTYPE
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 129, 200, 1000])
def test_lengths(dtype: type, length: int) -> None:
    text = a_text(dtype, length, (4, 2), 32)
    for first in {0, length // 3, max(0, length - 70), length - 1}:
        check(text, first)


@EACH_DTYPE
@pytest.mark.parametrize(
    "heads",
    [(1, 1), (2, 1), (9, 3), (4, 1), (5, 1), (12, 2), (7, 1), (8, 1), (9, 1), (24, 2), (71, 1)],
    ids=str,
)
def test_groups_of_heads(dtype: type, heads: tuple[int, int]) -> None:
    check(a_text(dtype, 200, heads, 40), 70)


@EACH_DTYPE
@pytest.mark.parametrize("head_dim", [1, 3, 8, 12, 20, 32, 64, 80, 96, 100, 112, 128, 256])
def test_head_dims(dtype: type, head_dim: int) -> None:
    check(a_text(dtype, 150, (6, 3), head_dim), 20)


@EACH_DTYPE
@pytest.mark.parametrize("window", [1, 2, 7, 16, 63, 64, 65, 100, 128, 150, 4096])
@pytest.mark.parametrize("softcap", [0.0, 2.5, 50.0])
def test_windows_and_softcaps(dtype: type, window: int, softcap: float) -> None:
    text = a_text(dtype, 330, (4, 2), 20)
    for first in (0, 130, 329):
        check(text, first, window=window, softcap=softcap, scale=0.4)


@EACH_DTYPE
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("window", [0, 40, 64, 300])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_do_not_depend_on_the_chunk(
    dtype: type, heads: tuple[int, int], window: int, softcap: float, num_threads: int
) -> None:
    """Nor on places in a block, threads, pages, other queries, or what later positions hold.

    The chunk alone has NaN in the cache behind its own last position.
    """
    text = a_text(dtype, 700, heads, 36)
    changes: dict[str, Any] = {"window": window, "softcap": softcap}
    whole = attend(text, **changes)
    for size in (1, 33, 64, 200, 512):
        for first in range(0, 700, size) if size > 1 else (0, 1, 63, 64, 130, 699):
            last = min(first + size, 700)
            found = attend(text, first, last, num_threads=num_threads, **changes)
            np.testing.assert_array_equal(found, whole[first:last], err_msg=f"{first}..{last}")


@EACH_DTYPE
def test_later_tokens_change_no_bit(dtype: type) -> None:
    """Whatever their queries, keys and values are, in the same chunk and block."""
    text = a_text(dtype, 100, (4, 2), 20)
    expected = attend(text)
    for cut in (1, 7, 16, 63, 64, 99):
        others = Text(*(array.copy() for array in text))
        others.queries[cut:] = np.nan
        others.keys[:, cut:] = NAN[dtype]
        others.values[:, cut:] = INFINITY[dtype]
        np.testing.assert_array_equal(attend(others)[:cut], expected[:cut])


def test_earlier_tokens_beyond_a_window_change_no_bit() -> None:
    text = a_text(np.float32, 200, (4, 2), 20)
    expected = attend(text, window=50)
    for cut in (1, 60, 64, 100):
        text.queries[:cut], text.keys[:, :cut], text.values[:, :cut] = np.nan, np.nan, np.inf
        from_there = slice(cut + 49, None)
        np.testing.assert_array_equal(attend(text, window=50)[from_there], expected[from_there])


@EACH_DTYPE
@pytest.mark.parametrize("heads", [(4, 2), (9, 1)], ids=str)
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
def test_sinks(dtype: type, heads: tuple[int, int], window: int, softcap: float) -> None:
    """Below, among and far above the scores of a head's keys."""
    text, sinks = a_text(dtype, 200, heads, 20), np.linspace(-60, 9, heads[0], dtype=np.float32)
    sinks[-2:] = 2, 300
    changes: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    check(text, 70, **changes)
    whole = attend(text, **changes)
    assert not whole[:, -1].any()
    for first, last in ((0, 1), (33, 90), (199, 200)):
        np.testing.assert_array_equal(attend(text, first, last, **changes), whole[first:last])


def test_nan_reaches_every_token_that_sees_it() -> None:
    for array in ("keys", "values"):
        text = a_text(np.float32, 150, (2, 1), 20)
        getattr(text, array)[0, 70] = np.nan
        found = attend(text)
        assert np.isfinite(found[:70]).all()
        assert np.isnan(found[70:]).all()


def test_large_scores_do_not_overflow() -> None:
    text = a_text(np.float32, 150, (2, 1), 20)
    text.queries[:] *= 100
    text.keys[:] *= 100
    found = attend(text)
    expected = reference.prompt_attention(*text)
    np.testing.assert_allclose(found, expected, atol=1e-2)
    text.queries[:] = 1
    text.keys[:] = -1e30
    assert np.isfinite(attend(text)).all()


def test_zeros_are_positive() -> None:
    """As sums of products with shares of 0 are."""
    text = a_text(np.float32, 70, (1, 1), 8)
    text.values[:] = -1e-45
    found = attend(text)
    assert not np.signbit(found[found == 0]).any()


def of_vectors(function: Callable[[Vec], Vec]) -> Callable[[np.ndarray, np.ndarray], None]:
    """out = function of x, both (N, 16) float32, in vector code."""

    @intrinsic
    def of_vector(typingctx: Any, x: Any, out: Any) -> Any:
        def emit(given: Arguments) -> None:
            given.array(1).at().store(function(given.array(0).at().load(F32, 16)))

        return types.void(x, out), codegen_of(emit)

    @njit
    def of_rows(x, out):
        for row in range(len(x)):
            of_vector(x[row], out[row])

    return of_rows


LIMITS = [-np.inf, -1e30, -150, -126.5, -126, 127, 128, np.inf, np.nan, 0, -0.0, 1, -1]


def values_of(function: Callable[[Vec], Vec]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of LIMITS, then ordinary arguments and their values."""
    even = np.linspace(-126, 127, 200_000)
    small = np.geomspace(1e-30, 1, 1000)
    x = np.concatenate([LIMITS, even, small, -small]).astype(np.float32)
    x = x[: x.size // 16 * 16].reshape(-1, 16)
    out = np.empty_like(x)
    of_vectors(function)(x, out)
    at_limits, found = np.split(out.ravel(), [len(LIMITS)])
    return at_limits, x.ravel()[len(LIMITS) :].astype(np.float64), found


def test_powers_of_two() -> None:
    at_limits, x, found = values_of(exp2)
    expected = np.exp2(x)
    assert (np.abs(found - expected) <= 2.0**-23 * expected).all()
    top = 2.0**127
    np.testing.assert_array_equal(
        at_limits, [0, 0, 0, 0, 2.0**-126, top, top, top, np.nan, 1, 1, 2, 0.5]
    )


def test_tanh() -> None:
    at_limits, z, found = values_of(tanh_of_exponent)
    expected = np.tanh(z / (2 * LOG2_E))
    assert (np.abs(found - expected) <= 2.0**-21 * np.abs(expected)).all()
    third = np.float32(1 / 3)
    np.testing.assert_array_equal(
        at_limits, [-1, -1, -1, -1, -1, 1, 1, 1, np.nan, 0, 0, third, -third]
    )
