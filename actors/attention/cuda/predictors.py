"""Sign predictors on the GPU, of the neurons that CPU services have.

They are in the order of the services' neurons, which the driver tells in the arena and which
changes with the number of services.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.cuda_kernels.kernels import INPUT_PLANES
from hotcold.cuda_kernels.neurons import DevicePredictor, PredictorScratch
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.numba_kernels.loops.mailbox import SharedBuffers
from hotcold.predictors.predictor_file import Predictors, read_predictors
from hotcold.predictors.sign import SignLayer

_NOTHING_TOLD = 0


class GpuPredictors:
    """A predictor for each layer that has one and of which the GPU lacks neurons."""

    def __init__(
        self, device: Device, config: ModelConfig, spec: ServiceSpec, num_tokens: int
    ) -> None:
        """Room for all, in steps of so many tokens. Errors: DeviceMemoryError, ArtifactError."""
        self._device, self._told = device, _NOTHING_TOLD
        self._path, self._spec, self._config = Path(spec.system.predictors_path), spec, config
        predictors = self._read()
        self.reads_residual = predictors.input_name == "residual"
        hot = spec.neuron_ids or [np.empty(0, np.int32)] * config.num_layers
        self._layers: list[DevicePredictor | None] = []
        sizes = [0]
        for layer, ids, size in zip(predictors.layers, hot, config.ffn_sizes, strict=True):
            self._layers.append(None)
            if isinstance(layer, SignLayer) and ids.size < size:
                self._layers[-1] = self._room_for(layer, size - ids.size)
                sizes.append(size - ids.size)
        words = -(-config.hidden_size // 64) * 2
        self.scratch = PredictorScratch(
            planes=device.empty((num_tokens * INPUT_PLANES * words,), np.uint32),
            units=device.empty((num_tokens,), np.float32),
            masks=device.empty((max(sizes),), np.uint32),
        )

    def of(self, layer: int) -> DevicePredictor:
        """The predictor of a layer whose neurons are listed."""
        found = self._layers[layer]
        assert found is not None
        return found

    def has_new_order(self, buffers: SharedBuffers) -> bool:
        """Whether `arrange` is due."""
        return bool(buffers.sum_order[-1] != self._told)

    def arrange(self, buffers: SharedBuffers) -> bool:
        """Read all in the order that the driver told; False where the file is not there any more.

        Graphs that were captured before are of no use.
        """
        count = int(buffers.sum_order[0])
        try:
            layers = self._read().layers
        except ArtifactError:
            return False
        for number, room in enumerate(self._layers):
            if room is None:
                continue
            bounds = np.concatenate([[0], buffers.cold_bounds[number, :count]]).astype(np.int32)
            layer = layers[number]
            assert isinstance(layer, SignLayer)
            own = layer.arranged(buffers.cold_ids[number, : bounds[-1]])
            found = room._replace(bounds=self._device.empty(bounds.shape, np.int32))
            arrays = own.bits.view(np.uint32), own.thresholds, own.center, own.scale, bounds
            for target, source in zip(found, arrays, strict=True):
                self._device.upload(target, source)
            self._layers[number] = found
        self._told = int(buffers.sum_order[-1])
        return True

    def _read(self) -> Predictors:
        identity = ModelIdentity.of(self._spec.path)
        return read_predictors(self._path, identity, self._config, self._spec.keeps_pages)

    def _room_for(self, layer: SignLayer, num_neurons: int) -> DevicePredictor:
        def empty(*shape: int, dtype: Any = np.float32) -> Any:
            return self._device.empty(shape, dtype)

        width = layer.center.size
        return DevicePredictor(
            bits=empty(num_neurons, 2 * layer.bits.shape[1], dtype=np.uint32),
            thresholds=empty(num_neurons),
            center=empty(width),
            scale=empty(width),
            bounds=empty(1, dtype=np.int32),
        )
