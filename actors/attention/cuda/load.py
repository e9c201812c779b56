"""Loads the attention service on a GPU: allocates memory, tries it out, then reads weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.attention.arrays import cache_array, position_arrays
from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.host_part import HostPart
from hotcold.actors.attention.cuda.model import CudaModel, Share
from hotcold.actors.attention.cuda.service import CudaAttentionService
from hotcold.actors.protocol.messages import CacheSpec, GpuShare, ServiceSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import AttentionWeights
from hotcold.model.weights.check import weight_shapes
from hotcold.model.weights.embedding import HeadWeights
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.layer_rows import LayerRows, one_format
from hotcold.numba_kernels.serve.serve_attention import AttentionArrays

Stack = np.ndarray | LayerRows  # of all layers


class CudaLoading:
    """Allocates all of the service's device memory, except for graphs; `fill` reads the weights."""

    def __init__(self, device: Device, config: ModelConfig, spec: ServiceSpec) -> None:
        """`spec` is of a service with a GPU. Errors: DeviceMemoryError, CheckpointError."""
        if spec.gpu is None or spec.cache is None:
            raise ValueError(f"the spec of the {spec.name} service has no GPU")
        self.spec, self._config = spec, config
        self._gpu: GpuShare = spec.gpu
        self._cache: CacheSpec = spec.cache
        no_neurons = [np.empty(0, np.int32)] * config.num_layers
        share = Share(
            self._gpu.first_layer,
            self._gpu.has_head,
            spec.neuron_ids or no_neurons,
            spec.has_down_norms,
        )
        path = Path(spec.model_path)
        keeps_pages = spec.storage is None
        self._model = CudaModel(
            device, path, config, share, self._cache, spec.weight_dtype, keeps_pages
        )
        self._service = CudaAttentionService(
            spec.name, spec.index, device, self._model, self._gpu.layout
        )
        self._service.try_out()

    def fill(self, on_bytes: Callable[[int], None]) -> CudaAttentionService:
        """Read the weights; the service is then complete. Errors: CheckpointError."""
        arrays = None if self._is_whole else self._host_arrays()

        def keep(layer: int, weights: AttentionWeights) -> None:
            if arrays is None:
                return
            for name, stack in vars(weights).items():
                target = getattr(arrays, name)
                if layer < _num_layers(target):
                    _of_layer(target, layer)[...] = _of_layer(stack, 0)

        head = self._model.fill(on_bytes, keep)
        if arrays is not None:
            if head is not None:
                arrays = arrays._replace(**vars(head))
            spec, shape = self.spec, self._model.shape
            inner = AttentionService(spec.name, spec.index, spec.num_threads, shape, arrays)
            self._service.host = HostPart(inner)
        return self._service

    def is_of(self, spec: ServiceSpec) -> bool:
        """Whether this is a service of `spec`."""
        mine, other = self.spec.neuron_ids or [], spec.neuron_ids or []
        return (
            (self.spec.gpu, self.spec.cache) == (spec.gpu, spec.cache)
            and len(mine) == len(other)
            and all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))
        )

    @property
    def _is_whole(self) -> bool:
        return self._gpu.first_layer == 0 and self._gpu.has_head

    def _host_arrays(self) -> AttentionArrays:
        """Empty arrays for the part that the GPU does not hold, with the norms of all layers."""
        spec, config, layers = self.spec, self._config, self._gpu.first_layer
        none = [np.empty(0, np.int32)] * config.num_layers
        checkpoint = Checkpoint(Path(spec.model_path))
        attention, head, _ = weight_shapes(checkpoint, config, none, spec.weight_dtype)
        found: dict[str, Any] = {
            name: _empty_stack(stack, config.num_layers if "norm" in name else layers)
            for name, stack in vars(attention).items()
        }
        return AttentionArrays(
            **found,
            **vars(_no_head(head)),
            keys=cache_array(config, self._cache, layers),
            values=cache_array(config, self._cache, layers),
            **position_arrays(config, self._cache),
        )


def _num_layers(stack: Stack) -> int:
    return len(stack.first_rows if isinstance(stack, LayerRows) else stack)


def _of_layer(stack: Stack, layer: int) -> np.ndarray:
    found: np.ndarray = stack.matrix(layer) if isinstance(stack, LayerRows) else stack[layer]
    return found


def _empty_stack(like: Stack, num_layers: int) -> Stack:
    """An uninitialized stack of layers in the format of the first one."""
    layer = _of_layer(like, 0)
    stack = aligned_empty((num_layers, *layer.shape), layer.dtype)
    return one_format(stack) if isinstance(like, LayerRows) else stack


def _no_head(like: HeadWeights) -> HeadWeights:
    """A head without rows, in the same formats."""
    return HeadWeights(
        final_norm_weight=np.empty(0, np.float32),
        final_norm_bias=np.empty(0, np.float32),
        project_out=np.empty((0, 0), np.float32),
        head=np.empty((0, like.head.shape[1]), like.head.dtype),
    )
