"""A token's bits depend neither on how many CPU services there are, nor on their threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hotcold.actors.protocol.lanes import num_lanes
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint

Tiny = Callable[..., TinyCheckpoint]
SHAPES = [(1, 2), (1, 3), (2, 1), (2, 3), (3, 2), (4, 1)]  # services, threads of each


@pytest.mark.parametrize("dtype", ["", "q8"])
@pytest.mark.parametrize("name", ["llama-relu", "opt", "qwen3-moe", "gpt-oss"])
def test_logits_are_the_same_whoever_computes_them(tiny: Tiny, name: str, dtype: str) -> None:
    path = tiny(name).path
    ids = np.random.default_rng(5).integers(3, 60, 17)

    def logits(num_services: int, num_threads: int) -> list[np.ndarray]:
        with InProcessSystem(path, num_services, num_threads, weight_dtype=dtype) as system:
            assert num_lanes(system.config) > 1
            return [
                system.logits(mode, ids, sizes)
                for mode in ("dense", "exact")
                for sizes in ([1], [7, 3])
            ]

    expected = logits(1, 1)
    np.testing.assert_array_equal(expected[0], expected[1])
    for shape in SHAPES:
        for found, wanted in zip(logits(*shape), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
