"""Whether rows are finite, by their bits: NumPy says the same."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.numba_kernels.decode.finite import finite_pair, finite_rows

pytestmark = pytest.mark.sweep

LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan, LARGEST, -LARGEST, 0.0, 1e-45])
@pytest.mark.parametrize("place", [(0, 0), (1, 6), (2, 3), (3, 0)])
def test_finite_numbers_end_where_float32_ends(value: float, place: tuple[int, int]) -> None:
    rows = np.random.default_rng(1).standard_normal((4, 7)).astype(np.float32)
    good = rows.copy()
    rows[place] = value
    for num_rows in (1, 3, 4):
        expected = bool(np.isfinite(rows[:num_rows]).all())
        assert finite_rows(rows, num_rows) == expected
        assert finite_pair(good, rows, num_rows) == finite_pair(rows, good, num_rows) == expected
