"""Mixtures of experts with a GPU service: hot neurons on it, cold ones on CPU services."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.numba_kernels.serve.mailbox import BYTES_READ
from tests.actors.cuda_in_process import CudaInProcess, emulated_devices
from tests.actors.in_process import InProcessSystem
from tests.actors.numpy_device import NumpyDevice
from tests.actors.test_stored_experts import StoredExperts, answers, packed, small_bundles
from tests.conftest import TinyCheckpoint
from tests.mxfp4_models import make_mxfp4
from tests.reference import reference_logits
from tests.tiny_models import MIXTURES, VOCAB_SIZE
from tests.unit.test_reference import relative_difference

pytestmark = pytest.mark.usefixtures("one_torch_thread")
Tiny = Callable[..., TinyCheckpoint]
Hot = Callable[[int, int], list[np.ndarray]]

__all__ = ["small_bundles"]  # a fixture
IDS = np.random.default_rng(1).integers(0, VOCAB_SIZE, 42)
SUPPORTED = [name for name in MIXTURES if name != "turbosparse-mixtral"]


def two_thirds(num_layers: int, num_neurons: int) -> list[np.ndarray]:
    """Hot neurons: two of three, some of each block."""
    ids = np.arange(num_neurons, dtype=np.int32)
    return [ids[ids % 3 != layer % 3] for layer in range(num_layers)]


def every_one(num_layers: int, num_neurons: int) -> list[np.ndarray]:
    return [np.arange(num_neurons, dtype=np.int32)] * num_layers


def whole_experts(num_layers: int, num_neurons: int) -> list[np.ndarray]:
    """About half of the neurons, in runs that hold whole blocks; none in layer 1."""
    ids = np.arange(num_neurons, dtype=np.int32)
    return [ids[: num_neurons // 2 * (layer != 1)] for layer in range(num_layers)]


@pytest.fixture(scope="module")
def device() -> Callable[[], NumpyDevice]:
    """Makes devices whose kernels are CUDA's, emulated."""
    return emulated_devices()


@pytest.mark.parametrize("variant", ["qwen2-moe", "gpt-oss", "glm4-moe-groups", "smallthinker"])
def test_logits_equal_the_reference(
    tiny: Tiny, variant: str, device: Callable[[], NumpyDevice]
) -> None:
    """In float64, in prompts and steps of several tokens, wherever the neurons are."""
    checkpoint = tiny(variant)
    expected = reference_logits(checkpoint.path, IDS)
    ways: list[tuple[str, Hot, list[int]]] = [
        ("exact", two_thirds, [34, 4, 2, 1, 1]),
        ("dense", every_one, [1, 8, 33]),
    ]
    for mode, hot, sizes in ways:
        with CudaInProcess(checkpoint.path, hot=hot, device=device()) as system:
            found = system.logits(mode, IDS, sizes)
            assert relative_difference(found, expected) < 1e-4


def test_part_of_the_model_on_the_host(tiny: Tiny) -> None:
    """Whose attention service has its own routers; the GPU then reads weights from the arena."""
    checkpoint = tiny("glm4-moe-groups")
    ids = checkpoint.ids[:45]
    expected = reference_logits(checkpoint.path, ids)
    options: dict[str, Any] = {"hot": two_thirds, "first_layer": 2, "has_head": False}
    with CudaInProcess(checkpoint.path, **options) as system:
        found = system.logits("exact", ids, [34, 3, 1])
        assert relative_difference(found, expected) < 1e-4


def test_a_request_does_not_depend_on_its_company(
    tiny: Tiny, device: Callable[[], NumpyDevice]
) -> None:
    """To the last bit, whatever stands beside it in a step."""
    checkpoint = tiny("gpt-oss", "float16")
    one, other = checkpoint.ids[:5].tolist(), checkpoint.ids[20:25].tolist()
    with CudaInProcess(
        checkpoint.path, hot=two_thirds, device=device(), kv_dtype="float16", num_slots=4
    ) as system:
        engine = system.engine("exact")
        alone = [engine.step([token], [at], [0]).copy() for at, token in enumerate(one)]
        for at in range(5):
            tokens, slots = [other[at], other[-at], other[2], one[at]], [1, 2, 3, 0]
            found = engine.step(tokens, [at] * 4, slots)
            np.testing.assert_array_equal(found, alone[at])


def test_mxfp4_as_on_the_cpu(tmp_path: Path, device: Callable[[], NumpyDevice]) -> None:
    """gpt-oss as published: down rows are a neuron's then, and have a format whose sums are. Rows
    of 256 weights are padded on the device.
    """
    path = make_mxfp4(tmp_path, hidden_size=256)
    found = []
    for kind in (InProcessSystem, partial(CudaInProcess, hot=whole_experts, device=device())):
        with kind(path) as system:
            found.append(system.logits("dense", IDS, [34, 4, 2, 1, 1]))
    assert relative_difference(found[1], found[0]) < 0.02


@dataclass
class StoredBesideGpu(StoredExperts, CudaInProcess):
    """Cold experts in a file."""


@pytest.mark.usefixtures("small_bundles")
@pytest.mark.parametrize(
    ("variant", "hot"), [("qwen3-moe-dense", two_thirds), ("smallthinker", whole_experts)]
)
def test_cold_experts_on_storage(tiny: Tiny, variant: str, hot: Hot) -> None:
    """Which nobody guesses then: the bits of the same experts in memory."""
    path = tiny(variant).path
    packed(path)
    with CudaInProcess(path, 2, 2, hot=hot) as plain:
        wanted = answers(plain, ["dense"])
    with StoredBesideGpu(path, 2, 2, hot=hot, num_guessed=4) as stored:
        for found, expected in zip(answers(stored, ["dense"]), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert stored.counted(BYTES_READ) > 0
