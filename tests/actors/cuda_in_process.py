"""A system in one process whose GPU service is on a device made of NumPy.

Its kernels are plain ones, or CUDA's, emulated on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.attention.cuda.load import CudaLoading
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.cuda_kernels.kernels import CudaKernels
from hotcold.cuda_kernels.launch import Argument
from hotcold.model.files.artifact import ModelIdentity
from hotcold.predictors.predictor_file import read_predictors
from tests.actors.in_process import InProcessSystem
from tests.actors.numpy_device import NumpyDevice
from tests.kernels.backends import emulated_library
from tests.kernels.emulation.launcher import EmulatedLauncher


@dataclass
class CudaInProcess(InProcessSystem):
    """As `InProcessSystem`; attention before `first_layer`, and the head, may stay on the host."""

    device: Any = field(default_factory=NumpyDevice)
    first_layer: int = 0
    has_head: bool = True
    predictors_path: str = ""  # of sign predictors that the GPU has too

    def gpu_spec(self) -> ServiceSpec:
        """What the GPU service is to load."""
        return replace(super().gpu_spec(), gpu_layout=self._layout(), stripes=None)

    def system(self) -> SystemConfig:
        """As `InProcessSystem`, with what stays on the host."""
        return replace(
            super().system(),
            num_host_layers=self.first_layer,
            head_on_host=not self.has_head,
            predictors_path=self.predictors_path,
            gpu_predicts=self._predicts(),
        )

    def _predicts(self) -> tuple[bool, ...]:
        """Which layers have a predictor."""
        if not self.predictors_path:
            return ()
        identity = ModelIdentity.of(self.path)
        found = read_predictors(Path(self.predictors_path), identity, self.config)
        return tuple(layer is not None for layer in found.layers)

    def _layout(self, **others: Any) -> ArenaLayout:
        return replace(super()._layout(**others), gpu_predicts=bool(self.predictors_path))

    def hot_ids(self) -> list[np.ndarray] | None:
        """In the order of `hot`, which of a mixture gets the neurons of each layer."""
        if self.hot is None or self.specs:
            return super().hot_ids()
        sizes = self.config.ffn_sizes
        return [self.hot(len(sizes), size)[layer] for layer, size in enumerate(sizes)]

    def _gpu(self) -> Service:
        loading = CudaLoading(self.device, self.config, self.gpu_spec())
        return loading.fill(lambda num_bytes: None)


def a_third(num_layers: int, ffn_size: int) -> list[np.ndarray]:
    """Hot neurons: every third one, none in layer 1."""
    ids = np.arange(0, ffn_size, 3, dtype=np.int32)
    return [ids[:0] if layer == 1 else ids for layer in range(num_layers)]


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
