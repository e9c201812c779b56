"""Loads the attention service on a GPU: allocates memory, tries it out, then reads weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hotcold.actors.attention.arrays import attention_arrays
from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.host_part import HostPart
from hotcold.actors.attention.cuda.model import CudaModel
from hotcold.actors.attention.cuda.next_step import NextStep
from hotcold.actors.attention.cuda.predictors import GpuPredictors
from hotcold.actors.attention.cuda.service import CudaAttentionService
from hotcold.actors.protocol.messages import CacheSpec, ServiceSpec
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import AttentionWeights
from hotcold.model.weights.check import weight_shapes
from hotcold.model.weights.embedding import HeadWeights, load_embedding
from hotcold.model.weights.latent import no_latent
from hotcold.model.weights.memory import aligned_empty
from hotcold.model.weights.recurrent import no_recurrent
from hotcold.numba_kernels.block_rows import matrices_of
from hotcold.numba_kernels.layer_record import LayerVectors
from hotcold.numba_kernels.loops.attention_loop import AttentionArrays
from hotcold.numba_kernels.router_arrays import RouterArrays, no_routers, stacked_routers


class CudaLoading:
    """Allocates all of the service's device memory, except for graphs; `fill` reads the weights."""

    def __init__(self, device: Device, config: ModelConfig, spec: ServiceSpec) -> None:
        """`spec` is of a service with a GPU. Errors: DeviceMemoryError, CheckpointError."""
        if spec.gpu_layout is None or spec.cache is None:
            raise ValueError(f"the spec of the {spec.name} service has no GPU")
        self.spec, self._config, self._device = spec, config, device
        self._cache: CacheSpec = spec.cache
        self._model = CudaModel(device, config, spec)
        self._predictors: GpuPredictors | None = None
        if spec.system.gpu_predicts:
            self._predictors = GpuPredictors(device, config, spec, KERNEL_TOKENS)
        has_core = len(os.sched_getaffinity(0)) > spec.system.num_threads
        self._service = CudaAttentionService(
            spec.name, spec.index, device, self._model, spec.gpu_layout, self._predictors, has_core
        )
        self._service.try_out()

    def fill(self, on_bytes: Callable[[int], None]) -> CudaAttentionService:
        """Read the weights; the service is then complete. Errors: CheckpointError."""
        arrays = None if self._is_whole else self._host_arrays()
        routers: list[RouterArrays] = []

        def keep(layer: int, weights: AttentionWeights) -> None:
            if arrays is None:
                return
            for target, stack in zip(arrays.vectors, weights.vectors, strict=True):
                target[layer] = stack[0]
            routers.append(weights.routers)
            if layer < self.spec.system.num_host_layers:
                arrays.qkv.matrix(layer)[...] = weights.qkv.matrix(0)
                arrays.out.matrix(layer)[:] = weights.out.matrix(0)

        head = self._model.fill(on_bytes, keep)
        if self._predictors is not None:
            self._predictors.fill()
        if arrays is None and all(map(self._model.is_whole, range(self._config.num_layers))):
            embedding = load_embedding(Checkpoint(self.spec.path), self._config)
            width = self._config.hidden_size
            self._service.next_step = NextStep(self._device, embedding, width)
        if arrays is not None:
            if head is not None:
                arrays = arrays._replace(**vars(head))
            arrays = arrays._replace(routers=stacked_routers(routers))
            spec = self.spec
            inner = AttentionService(spec.name, spec.index, spec.num_threads, arrays)
            self._service.host = HostPart(inner)
        return self._service

    def is_of(self, spec: ServiceSpec) -> bool:
        """Whether this is a service of `spec`."""
        mine, other = self.spec.neuron_ids or [], spec.neuron_ids or []
        return (
            _allocated(self.spec) == _allocated(spec)
            and len(mine) == len(other)
            and all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))
        )

    @property
    def _is_whole(self) -> bool:
        system = self.spec.system
        return system.num_host_layers == 0 and not system.head_on_host

    def _host_arrays(self) -> AttentionArrays:
        """Empty arrays for the part that the GPU does not hold, with the vectors of all layers."""
        spec, config, layers = self.spec, self._config, self.spec.system.num_host_layers
        none = [np.empty(0, np.int32)] * config.num_layers
        checkpoint, dtype = Checkpoint(spec.path), spec.system.weight_dtype
        attention, head, _ = weight_shapes(checkpoint, config, none, dtype)
        here = AttentionWeights(
            vectors=LayerVectors(*map(np.empty_like, attention.vectors)),
            qkv=matrices_of(_empty_stack(attention.qkv.matrix(0), layers)),
            out=matrices_of(_empty_stack(attention.out.matrix(0), layers)),
            routers=no_routers(layers),
            latent=no_latent(),
            recurrent=no_recurrent(),
        )
        return attention_arrays(config, self._cache, here, _no_head(head))


def _allocated(spec: ServiceSpec) -> tuple[Any, ...]:
    """What the device's arrays depend on, beside the neurons.

    That is nothing of CPU services' threads, which a process that is pinned counts by its own
    cores, nor of predictors, which are dropped where memory is short.
    """
    system, layout = spec.system, spec.gpu_layout
    parts = system.gpu_memory_bytes, system.num_host_layers, system.head_on_host
    return layout and replace(layout, num_outputs=1, predictor_words=0), spec.cache, *parts


def _empty_stack(layer: np.ndarray, num_layers: int) -> np.ndarray:
    """An uninitialized stack of layers like `layer`."""
    return aligned_empty((num_layers, *layer.shape), layer.dtype)


def _no_head(like: HeadWeights) -> HeadWeights:
    """A head without rows, in the same formats."""
    return HeadWeights(
        final_norm_weight=np.empty(0, np.float32),
        final_norm_bias=np.empty(0, np.float32),
        project_out=np.empty((0, 0), np.float32),
        head=np.empty((0, like.head.shape[1]), like.head.dtype),
    )
