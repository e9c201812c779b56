"""A token's bits depend neither on how many CPU services there are, nor on their threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hotcold.numba_kernels.decode.activations import Thresholds
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint

Tiny = Callable[..., TinyCheckpoint]
SHAPES = [(1, 2), (1, 3), (2, 1), (2, 3), (3, 2), (4, 1)]  # services, threads of each
SOME = Thresholds(np.float32(0.02), np.float32(0.001))


def all_logits(system: InProcessSystem) -> Iterator[np.ndarray]:
    """Of two modes and of thresholds, token by token and several at once."""
    ids = np.random.default_rng(5).integers(3, 60, 17)
    some = [SOME] * system.config.num_layers
    for sizes in ([1], [7, 3]):
        yield system.logits("dense", ids, sizes)
        yield system.logits("exact", ids, sizes)
        yield system.logits("threshold", ids, sizes, thresholds=some)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama-relu", ""), ("opt-postnorm", ""), ("qwen3-moe", "")]
)
def test_logits_are_the_same_whoever_computes_them(tiny: Tiny, name: str, dtype: str) -> None:
    path = tiny(name).path
    expected: list[np.ndarray] = []
    for shape in [(1, 1), *SHAPES]:
        with InProcessSystem(path, *shape, weight_dtype=dtype, has_down_norms=True) as system:
            found = list(all_logits(system))
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    one_by_one, at_once = expected[:3], expected[3:]
    for one, other in zip(one_by_one, at_once, strict=True):
        np.testing.assert_array_equal(one, other)
