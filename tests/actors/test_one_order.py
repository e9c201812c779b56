"""A token's bits depend neither on how many CPU services there are, nor on their threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.numba_kernels.decode.activations import Thresholds
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint
from tests.quantized_models import make_model

Tiny = Callable[..., TinyCheckpoint]
SHAPES = [(1, 2), (1, 3), (2, 1), (2, 3), (3, 2), (4, 1)]  # services, threads of each
SOME = Thresholds(np.float32(0.02), np.float32(0.001))


def all_logits(system: InProcessSystem) -> Iterator[np.ndarray]:
    """Of two modes and of thresholds, token by token and several at once."""
    ids = np.random.default_rng(5).integers(3, 60, 17)
    some = [SOME] * system.config.num_layers
    for sizes in ([1], [7, 3], [17]):
        yield system.logits("dense", ids, sizes)
        yield system.logits("exact", ids, sizes)
        yield system.logits("threshold", ids, sizes, thresholds=some)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-relu", ""), ("q-llama", "q8"), ("q-llama", "q4"), ("opt-postnorm", ""),
     ("qwen3-moe", "")],
)  # fmt: skip
def test_logits_are_the_same_whoever_computes_them(
    tiny: Tiny, tmp_path: Path, name: str, dtype: str
) -> None:
    path = make_model(name, tmp_path / "model") if dtype else tiny(name).path
    expected: list[np.ndarray] = []
    for shape in [(1, 1), *SHAPES]:
        with InProcessSystem(path, *shape, weight_dtype=dtype, has_down_norms=True) as system:
            found = list(all_logits(system))
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    for at_once in (expected[3:6], expected[6:]):
        for one, other in zip(expected[:3], at_once, strict=True):
            np.testing.assert_array_equal(one, other)


def test_biases_are_added_by_a_service_without_neurons(tiny: Tiny) -> None:
    """With twice as many services as lanes the first one, which has the biases, has no lanes."""
    path, ids = tiny("opt-postnorm").path, np.arange(3, 9)
    found = []
    for services in (1, 16):
        with InProcessSystem(path, services, 1) as system:
            assert services == 1 or not any(part.size for part in system.layer_shards()[0])
            found.append(system.logits("exact", ids, [1, 5]))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_the_service_whose_numbers_are_bad_is_named(tiny: Tiny, bad: int) -> None:
    """Also after sums of services were added to each other: three share eight lanes unevenly."""
    with InProcessSystem(tiny("llama-relu").path, 3, 1) as system:
        system.services[bad].arrays.down[:] = np.nan  # type: ignore[attr-defined]
        with pytest.raises(NotFiniteError, match="in layer 0") as caught:
            system.logits("dense", np.arange(3, 5), [2])
        assert caught.value.service == bad


def test_a_prompt_is_the_same_with_any_number_of_threads(tiny: Tiny) -> None:
    ids, found = np.random.default_rng(6).integers(3, 60, 40), []
    for num_threads in (1, 2, 3):
        with InProcessSystem(tiny("llama-relu").path, 1, num_threads) as system:
            found.append(system.logits("exact", ids, [40]))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
