"""How long the ends of texts have stood in them before."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.numba_kernels.decode.repeats import repeat_lengths


@pytest.mark.parametrize("size", [0, 1, 2, 3, 40, 200])
@pytest.mark.parametrize("num_ids", [1, 2, 5])
def test_repeat_lengths(size: int, num_ids: int) -> None:
    for seed in range(10):
        tokens = np.random.default_rng(seed).integers(0, num_ids, size).astype(np.int32)
        listed, expected = tokens.tolist(), [0] * size
        for k in range(1, size):
            while (
                expected[k] + k < size and listed[-1 - expected[k]] == listed[-1 - expected[k] - k]
            ):
                expected[k] += 1
        assert repeat_lengths(tokens).tolist() == expected
