"""Sign predictors on the GPU: of its own neurons and of those that CPU services have.

Behind the GPU's they are in the order of the services' neurons, which the driver tells in the arena
and which changes with the number of services.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.cuda_kernels.kernels import INPUT_PLANES
from hotcold.cuda_kernels.neurons import DevicePredictor, PredictorScratch, SharedMemory
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.numba_kernels.loops.mailbox import SharedBuffers
from hotcold.predictors.predictor_file import Predictors, read_predictors
from hotcold.predictors.sign import SignLayer

_NOTHING_TOLD = 0


class GpuPredictors:
    """Those of the layers that `SystemConfig.gpu_predicts` has."""

    def __init__(
        self, device: Device, config: ModelConfig, spec: ServiceSpec, num_tokens: int
    ) -> None:
        """Room for all, in steps of so many tokens. Errors: DeviceMemoryError, ArtifactError."""
        self._device, self._told = device, _NOTHING_TOLD
        self._path, self._spec, self._config = Path(spec.system.predictors_path), spec, config
        self._own = spec.neuron_ids or [np.empty(0, np.int32)] * config.num_layers
        self._layers = [
            self._room_for(layer) if isinstance(layer, SignLayer) else None
            for layer in self._read().layers
        ]
        words = -(-config.hidden_size // 64) * 2
        self._scratch = PredictorScratch(
            planes=device.empty((num_tokens * INPUT_PLANES * words,), np.uint32),
            units=device.empty((num_tokens,), np.float32),
            masks=device.empty((config.largest_ffn,), np.uint32),
        )

    def predict(self, layer: int, x: Any, num_listed: Any) -> Any:
        """Put the layer's predictions for x (T, d) on the stream: the masks of its own neurons.

        num_listed (1,) int32: of how many any token is expected to make fire
        """
        num_own = self._own[layer].size
        found, scratch = self._of(layer), self._scratch
        self._device.kernels.predict(found, x, num_own, scratch, num_listed)
        return scratch.masks[:num_own]

    def list_for_services(self, layer: int, shared: SharedMemory) -> None:
        """Put the CPU services' lists of what was predicted last on the stream."""
        self._device.kernels.list_neurons(self._of(layer), self._scratch, shared)

    def arrange(self, buffers: SharedBuffers) -> bool:
        """Read all in the order that the driver tells, where that is new; whether it was.

        Graphs that were captured before are of no use then. Errors: ArtifactError
        """
        told, count = int(buffers.sum_order[-1]), int(buffers.sum_order[0])
        if told == self._told:
            return False
        layers = self._read().layers
        for number, (room, own) in enumerate(zip(self._layers, self._own, strict=True)):
            if room is None:
                continue
            bounds = np.append(0, buffers.cold_bounds[number, :count]).astype(np.int32)
            layer, cold = layers[number], buffers.cold_ids[number, : bounds[-1]]
            assert isinstance(layer, SignLayer)
            new = layer.arranged(np.concatenate([own, cold]))
            bounds += own.size
            found = room._replace(bounds=self._device.empty(bounds.shape, np.int32))
            arrays = new.bits.view(np.uint32), new.thresholds, new.center, new.scale, bounds
            for target, source in zip(found, arrays, strict=True):
                self._device.upload(target, source)
            self._layers[number] = found
        self._told = told
        return True

    def _of(self, layer: int) -> DevicePredictor:
        found = self._layers[layer]
        assert found is not None
        return found

    def _read(self) -> Predictors:
        identity = ModelIdentity.of(self._spec.path)
        return read_predictors(self._path, identity, self._config, self._spec.keeps_pages)

    def _room_for(self, layer: SignLayer) -> DevicePredictor:
        def empty(*shape: int, dtype: Any = np.float32) -> Any:
            return self._device.empty(shape, dtype)

        size, words, width = *layer.bits.shape, layer.center.size
        return DevicePredictor(
            bits=empty(size, 2 * words, dtype=np.uint32),
            thresholds=empty(size),
            center=empty(width),
            scale=empty(width),
            bounds=empty(1, dtype=np.int32),
        )
