"""A system in one process whose GPU service is on a device made of NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.load import CudaLoading
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from tests.actors.in_process import InProcessSystem
from tests.actors.numpy_device import NumpyDevice


@dataclass
class CudaInProcess(InProcessSystem):
    """As `InProcessSystem`; attention before `first_layer`, and the head, may stay on the host."""

    device: Any = field(default_factory=NumpyDevice)
    first_layer: int = 0
    has_head: bool = True

    def gpu_spec(self) -> ServiceSpec:
        """What the GPU service is to load."""
        return replace(super().gpu_spec(), gpu_layout=self._layout(), lanes=None)

    def system(self) -> SystemConfig:
        """As `InProcessSystem`, with what stays on the host."""
        return replace(
            super().system(),
            num_host_layers=self.first_layer,
            head_on_host=not self.has_head,
        )

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


def model_path(system: CudaInProcess) -> Path:
    """The checkpoint's folder."""
    return system.path
