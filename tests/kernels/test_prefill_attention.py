"""Attention of prompts against float64; a token's bits depend on what it sees alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit, types
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


@pytest.mark.parametrize("seed", range(3))
@EACH_DTYPE
def test_random_texts(dtype: type, seed: int) -> None:
    """Bits depend on no chunk, place in a block, thread or page, nor on what later positions hold.

    A chunk alone has NaN in the cache behind its own last position, and before its window.
    """
    rng = np.random.default_rng(seed)
    for turn in range(30):
        heads = [(1, 1), (9, 3), (4, 1), (5, 1), (12, 2), (7, 1), (24, 2), (71, 1)][rng.integers(8)]
        head_dim = int(rng.choice([1, 3, 8, 12, 20, 32, 64, 80, 100, 128, 256]))
        length = int(rng.choice([1, 15, 16, 17, 63, 64, 65, 129, 200, 330, 700]))
        text = a_text(dtype, length, heads, head_dim)
        changes: dict[str, Any] = {
            "window": int(rng.choice([0, 1, 7, 16, 63, 64, 65, 100, 4096])),
            "softcap": float(rng.choice([0.0, 2.5, 50.0])),
            "scale": head_dim**-0.5 * float(rng.choice([1, 1.8 if head_dim <= 64 else 1])),
        }
        if rng.random() < 0.5:  # below, among and far above the scores of keys
            sinks = np.linspace(-60, 9, heads[0], dtype=np.float32)
            sinks[-1] = 300
            changes["sinks"] = sinks
        check(text, int(rng.integers(length)), **changes)
        whole = attend(text, **changes)
        assert "sinks" not in changes or not whole[:, -1].any()
        for num_threads in (1, 3):
            first = int(rng.integers(length))
            last = min(length, first + int(rng.choice([1, 33, 64, 200, 512])))
            found = attend(text, first, last, num_threads=num_threads, **changes)
            np.testing.assert_array_equal(found, whole[first:last], err_msg=str((turn, changes)))


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
