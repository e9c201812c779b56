"""Predictors on the GPU: of its own neurons and of those that CPU services have.

Behind the GPU's they are in the order of the services' neurons, which the driver tells in the arena
and which changes with the number of services. The file is read once: the driver has another copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.cuda_kernels.kernels import INPUT_PLANES
from hotcold.cuda_kernels.neurons import (
    DeviceLowRank,
    DevicePredictor,
    DeviceSigns,
    PredictorScratch,
    SharedMemory,
)
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, sampled_digest
from hotcold.numba_kernels.loops.mailbox import SharedBuffers
from hotcold.predictors.predictor_file import read_predictors
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.stacked import AnyLayer

_NOTHING_TOLD = 0


class GpuPredictors:
    """Those of the layers that `SystemConfig.gpu_predicts` has."""

    def __init__(
        self, device: Device, config: ModelConfig, spec: ServiceSpec, num_tokens: int
    ) -> None:
        """Room for all, in steps of so many tokens; `fill` reads them.

        Errors:  DeviceMemoryError, ArtifactError
        """
        self._device = device
        path, digest = Path(spec.system.predictors_path), spec.system.predictors_digest
        if digest and sampled_digest(path) != digest:
            raise ArtifactError(f"{path}: has changed since the system started; start it again")
        identity = ModelIdentity.of(spec.path)
        found = read_predictors(path, identity, config, spec.keeps_pages)
        self.reads_residual = found.input_name == "residual"
        self._source: Sequence[AnyLayer | None] = found.layers
        self._layers = [None if one is None else self._room_for(one) for one in found.layers]
        every = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
        own = spec.neuron_ids or [np.empty(0, np.int32)] * config.num_layers
        self._num_own = [ids.size for ids in own]
        # Of each layer which neuron each row is of: the GPU's come first, now and later.
        self._ids = [
            np.concatenate([ids, np.setdiff1d(of_layer, ids)])
            for ids, of_layer in zip(own, every, strict=True)
        ]
        self._told = _NOTHING_TOLD
        words = -(-config.hidden_size // 64) * 2
        self._scratch = PredictorScratch(
            planes=device.empty((num_tokens * INPUT_PLANES * words,), np.uint32),
            units=device.empty((num_tokens,), np.float32),
            masks=device.empty((config.largest_ffn,), np.uint32),
            hidden=device.empty((num_tokens * max(map(_hidden_size, self._layers)),), np.float32),
        )

    def fill(self) -> None:
        """Read all, layer by layer. Errors: ArtifactError"""
        for number, (room, ids) in enumerate(zip(self._layers, self._ids, strict=True)):
            if room is None:
                continue
            layer = self._source[number]
            arrays = () if layer is None else _arrays(layer.arranged(ids))
            targets = room[:-1]
            if [one.shape for one in arrays] != [one.shape for one in targets]:
                raise ArtifactError(f"the predictor of layer {number} has changed; start again")
            for target, source in zip(targets, arrays, strict=True):
                self._device.upload(target, source)
        self._source = ()

    def has(self, layer: int) -> bool:
        """Whether a layer has one."""
        return self._layers[layer] is not None

    def predict(self, layer: int, x: Any, num_listed: Any) -> None:
        """Put a layer's predictions for x (T, d) on the stream.

        num_listed (1,) int32: how many of the GPU's neurons any token is expected to make fire
        """
        num_own, scratch = self._num_own[layer], self._scratch
        self._device.kernels.predict(self._of(layer), x, num_own, scratch, num_listed)

    def own_masks(self, layer: int) -> Any:
        """For which tokens each of the GPU's neurons is expected to fire, as predicted last."""
        return self._scratch.masks[: self._num_own[layer]]

    def list_for_services(self, layer: int, shared: SharedMemory) -> None:
        """Put the CPU services' lists of what was predicted last on the stream."""
        self._device.kernels.list_neurons(self._of(layer), self._scratch, shared)

    def arrange(self, buffers: SharedBuffers) -> bool:
        """Take the order that the driver tells, where that is new; whether it was.

        Graphs that were captured before are of no use then.
        """
        told, count = int(buffers.sum_order[-1]), int(buffers.sum_order[0])
        if told == self._told:
            return False
        for number, (room, before) in enumerate(zip(self._layers, self._ids, strict=True)):
            if room is None:
                continue
            num_own = self._num_own[number]
            ends = buffers.cold_bounds[number, :count]
            cold = buffers.cold_ids[number, : before.size - num_own]
            self._ids[number] = now = np.concatenate([before[:num_own], cold])
            by_id = np.argsort(before)
            rows = by_id[np.searchsorted(before, now, sorter=by_id)]
            if isinstance(room, DeviceSigns):
                self._reorder(room.bits, rows)
            else:
                self._reorder(room.up, rows, axis=1)
            self._reorder(room.thresholds, rows)
            bounds = (np.append(0, ends) + num_own).astype(np.int32)
            target = self._device.empty(bounds.shape, np.int32)
            self._device.upload(target, bounds)
            self._layers[number] = room._replace(bounds=target)
        self._told = told
        return True

    def _reorder(self, array: Any, order: np.ndarray, axis: int = 0) -> None:
        """array = array[order], or its columns, by way of the host, for want of room for both."""
        held = self._device.pinned(array.shape, array.dtype)
        self._device.copy_out(held.reshape(-1), array.reshape(-1))
        self._device.wait(self._device.record(spin=False))
        self._device.upload(array, np.take(held, order, axis))

    def _of(self, layer: int) -> DevicePredictor:
        found = self._layers[layer]
        assert found is not None
        return found

    def _room_for(self, layer: AnyLayer) -> DevicePredictor:
        def like(array: np.ndarray) -> Any:
            return self._device.empty(array.shape, array.dtype)

        arrays = *map(like, _arrays(layer)), self._device.empty((1,), np.int32)
        return DeviceSigns(*arrays) if isinstance(layer, SignLayer) else DeviceLowRank(*arrays)


def _arrays(layer: AnyLayer) -> tuple[np.ndarray, ...]:
    """What the device has of a layer's predictor, but for bounds."""
    if isinstance(layer, SignLayer):
        return layer.bits.view(np.uint32), layer.thresholds, layer.center, layer.scale
    return layer.down, layer.scales, layer.up, layer.thresholds


def _hidden_size(predictor: DevicePredictor | None) -> int:
    return predictor.down.shape[0] if isinstance(predictor, DeviceLowRank) else 0
