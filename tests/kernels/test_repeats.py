"""How long the ends of texts have stood in them before."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.numba_kernels.decode.repeats import longest_repeats, repeat_lengths


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


@pytest.mark.parametrize("limit", [0, 2, 500])
@pytest.mark.parametrize("least", [0, 1, 3])
def test_longest_repeats(limit: int, least: int) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        tokens = random.integers(0, 1 + seed % 5, random.integers(0, 60)).astype(np.int32)
        lengths, expected = repeat_lengths(tokens).tolist(), [-1] * 9
        for k in range(1, len(tokens)):
            if min(lengths[k], limit) >= least:
                expected[tokens[-k]] = max(expected[tokens[-k]], min(lengths[k], limit))
        assert longest_repeats(tokens, limit, least, 9).tolist() == expected
