"""Mixtures of experts with a GPU service: hot neurons on it, cold ones on CPU services."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.actors.cuda_in_process import CudaInProcess
from tests.actors.numpy_device import NumpyDevice
from tests.actors.test_cuda_emulated import emulated_devices
from tests.conftest import TinyCheckpoint
from tests.reference import reference_logits
from tests.tiny_models import MIXTURES
from tests.unit.test_reference import relative_difference

Tiny = Callable[..., TinyCheckpoint]
Hot = Callable[[int, int], list[np.ndarray]]

SUPPORTED = [name for name in MIXTURES if name != "turbosparse-mixtral"]
PROMPT_AND_STEPS = [34, 4, 2, 1, 1]


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


@pytest.fixture(params=["plain", "emulated"])
def make_device(request: pytest.FixtureRequest) -> Callable[[], NumpyDevice]:
    """Makes devices with NumPy's kernels, and with CUDA's."""
    return NumpyDevice if request.param == "plain" else emulated_devices()


@pytest.mark.sweep(keep=6)
@pytest.mark.parametrize("variant", SUPPORTED)
def test_logits_equal_the_reference(
    tiny: Tiny, variant: str, make_device: Callable[[], NumpyDevice]
) -> None:
    """In float64, in prompts and steps of several tokens, wherever the neurons are."""
    checkpoint = tiny(variant)
    ids = checkpoint.ids[:60]
    expected = reference_logits(checkpoint.path, ids)
    for hot, sizes in ((two_thirds, PROMPT_AND_STEPS), (every_one, [1, 7, 2, 40])):
        with CudaInProcess(checkpoint.path, hot=hot, device=make_device()) as system:
            for mode in ("exact", "dense"):
                found = system.logits(mode, ids, sizes)
                assert relative_difference(found, expected) < 1e-4
