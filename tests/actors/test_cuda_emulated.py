"""The GPU service over the CUDA kernels themselves, emulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.cuda_kernels.kernels import CudaKernels
from hotcold.cuda_kernels.launch import Argument
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.in_process import InProcessSystem
from tests.actors.numpy_device import NumpyDevice
from tests.conftest import TinyCheckpoint
from tests.kernels.backends import emulated_library
from tests.kernels.emulation.launcher import EmulatedLauncher
from tests.quantized_models import make_model
from tests.unit.test_reference import relative_difference

Tiny = Callable[..., TinyCheckpoint]
VARIANTS = [
    *("llama-gqa", "opt-postnorm", "falcon-grouped", "gemma2", "olmo2", "smollm3"),
]


class LaterLauncher:
    """Puts launches of another launcher on a device's stream."""

    def __init__(self, device: NumpyDevice, library: Path) -> None:
        self._device = device
        self._inner = EmulatedLauncher(library)
        self._asked: list[np.ndarray] = []

    def empty_bytes(self, count: int) -> np.ndarray:
        """Room that a GPU has of its own."""
        return self._inner.empty_bytes(count)

    def pointer(self, array: np.ndarray) -> np.uint64:
        """The address; the next launch may use the array."""
        self._asked.append(array)
        return np.uint64(array.ctypes.data)

    def launch(
        self, entry: Any, grid: Any, num_threads: int, arguments: Sequence[Argument]
    ) -> None:
        """Later, in order."""
        asked, self._asked = self._asked, []

        def run() -> None:
            for array in asked:
                self._inner.pointer(array)
            self._inner.launch(entry, grid, num_threads, arguments)

        self._device.run(run)


def emulated_devices() -> Callable[[], NumpyDevice]:
    """Makes devices whose kernels are CUDA's; skips the test without a compiler."""
    try:
        library = emulated_library()
    except FileNotFoundError as problem:
        pytest.skip(str(problem))

    def kernels(device: NumpyDevice) -> CudaKernels:
        return CudaKernels(LaterLauncher(device, library))

    return lambda: NumpyDevice(make_kernels=kernels)


@pytest.fixture(scope="module")
def device() -> Callable[[], NumpyDevice]:
    """`emulated_devices`."""
    return emulated_devices()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(
    tiny: Tiny, variant: str, device: Callable[[], NumpyDevice]
) -> None:
    checkpoint = tiny(variant)
    with CudaInProcess(checkpoint.path, hot=a_third, device=device()) as system:
        for sizes in ([1, 1, 2], [34, 4, 2]):  # whole steps: copies would write to one place
            found = system.logits("exact", checkpoint.ids, sizes)
            assert relative_difference(found, checkpoint.logits) < 1e-4


@pytest.mark.parametrize(
    ("name", "weight_dtype"),
    [("q-llama", "q4"), pytest.param("q-falcon-grouped", "mxfp4", marks=pytest.mark.thorough)],
)
def test_quantized_weights(
    name: str, weight_dtype: str, tmp_path: Path, device: Callable[[], NumpyDevice]
) -> None:
    """As the CPU's service: vectors are quantized alike."""
    path, ids = make_model(name, tmp_path / "model"), np.arange(3, 20)
    found = []
    for kind in (InProcessSystem, partial(CudaInProcess, device=device())):
        with kind(path, weight_dtype=weight_dtype) as system:
            found.append(system.logits("exact", ids, [1, 4]))
    assert relative_difference(found[1], found[0]) < 0.02


def test_a_request_does_not_depend_on_its_company(
    tiny: Tiny, device: Callable[[], NumpyDevice]
) -> None:
    """To the last bit, whatever stands beside it in a step; and hot neurons too."""
    checkpoint = tiny("llama-gqa", "float16")
    one, other = checkpoint.ids[:6].tolist(), checkpoint.ids[20:26].tolist()
    with CudaInProcess(
        checkpoint.path, hot=a_third, device=device(), kv_dtype="float16", num_slots=2
    ) as system:
        engine = system.engine("exact")
        alone = [engine.step([token], [at], [0]).copy() for at, token in enumerate(one)]
        for at in range(6):
            tokens, positions, slots = [other[at], one[at]], [at, at], [1, 0]
            found = engine.step(tokens, positions, slots)
            np.testing.assert_array_equal(found, alone[at])
