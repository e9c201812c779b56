"""The part of a model in a GPU's memory: allocated first, filled from the checkpoint later.

So lack of memory shows before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.actors.attention.arrays import layer_numbers, rope_tables
from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.protocol.messages import CacheSpec, ServiceSpec
from hotcold.actors.setup.gpu_share import only_on_cpu
from hotcold.cuda_kernels.kernels import Layer
from hotcold.cuda_kernels.matrix import DeviceMatrix, padded_items
from hotcold.cuda_kernels.neurons import DeviceNeurons, DeviceRouter
from hotcold.model.config.layer_spec import RouterSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.errors import UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import AttentionWeights, attention_layers
from hotcold.model.weights.check import weight_shapes
from hotcold.model.weights.embedding import HeadWeights, read_head, read_output_norms
from hotcold.model.weights.ffn import FfnWeights, ffn_layers
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.decode.activations import activation
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.formats import FORMATS, is_quantized, row_width
from hotcold.numba_kernels.layer_record import LayerVectors
from hotcold.numba_kernels.load.convert import row_lengths
from hotcold.numba_kernels.router_arrays import RouterArrays


@dataclass(frozen=True)
class AttentionPart:
    """One layer's projections, KV cache and router; keys, values (pages, KV, 64, head_dim)."""

    qkv: DeviceMatrix
    out: DeviceMatrix
    keys: Any
    values: Any
    router: DeviceRouter | None  # of a layer with experts


@dataclass(frozen=True)
class HeadPart:
    """Final norm, projection and head: from the last hidden state to logits."""

    norm_weight: Any
    norm_bias: Any
    project_out: DeviceMatrix | None
    head: DeviceMatrix


class CudaModel:
    """A service's part of a model on a device: attention from layer `num_host_layers` on, the head
    or not, and its neurons. The constructor allocates arrays, `fill` reads them.

    layers[l] has what kernels know of a layer beside its matrices, of every layer of the model.
    attention[l], ffn[l] and head are None where the device does not have them. starts[l] (B + 1,)
    int32, on the host: the first of layer l's hot neurons in each block, and the end. down_bias[l]
    (B, d) or (B, 0): added where the device computes a whole layer, its neurons uploaded or all its
    own. output_norms (L, d), or (L, 0): of the FFN's output.
    `ffn_like` has the shapes and dtypes of the model's neurons.
    """

    def __init__(self, device: Device, config: ModelConfig, spec: ServiceSpec) -> None:
        """`spec` is of a service with a KV cache.

        Errors:  DeviceMemoryError, CheckpointError, UsageError
        """
        if reason := only_on_cpu(config):
            raise UsageError(f"{reason}; give --device cpu")
        if spec.cache is None:
            raise ValueError(f"the {spec.name} service has no KV cache")
        self.config, self._spec = config, spec
        no_neurons = [np.empty(0, np.int32)] * config.num_layers
        self._neuron_ids = spec.neuron_ids or no_neurons
        self.activation = activation(config.activation_fn, config.activation_threshold)
        system, cache = spec.system, spec.cache
        self._device, self._dtype = device, system.weight_dtype
        self._kv_dtype = cache.dtype
        shapes = weight_shapes(Checkpoint(spec.path), config, self._neuron_ids, self._dtype)
        attention, head, ffn = shapes
        self.layers = self._layers(attention, cache)
        self.down_bias = [self._like(ffn.down_bias[0]) for _ in range(config.num_layers)]
        norms = config.num_layers, config.hidden_size * config.has_output_norms
        self.output_norms = device.empty(norms, np.float32)
        self.head = self._head(head) if not system.head_on_host else None
        self.attention = [
            self._attention(attention, cache.pages_of(layer.page_group), layer.ffn.router)
            if number >= system.num_host_layers
            else None
            for number, layer in enumerate(config.layers)
        ]
        self.ffn_like = ffn
        self.starts = (ffn.starts - ffn.starts[:, :1]).astype(np.int32)
        self.ffn = [self._ffn(ffn, starts) if starts[-1] else None for starts in self.starts]

    def is_whole(self, layer: int) -> bool:
        """Whether the device has all of a layer's neurons."""
        part = self.ffn[layer]
        return part is not None and part.num_neurons == self.config.ffn_sizes[layer]

    def fill(
        self,
        on_bytes: Callable[[int], None],
        on_layer: Callable[[int, AttentionWeights], None],
    ) -> HeadWeights | None:
        """Read the weights, layer by layer; returns the head if the device does not have it.

        `on_layer` gets each layer's attention, in arrays that the next layer overwrites.
        Errors:  CheckpointError
        """
        checkpoint = Checkpoint(self._spec.path, self._spec.keeps_pages)
        with TensorReader(checkpoint, on_bytes, requested_dtype(self._dtype)) as reader:
            self._read_attention(reader, on_layer)
            self._read_neurons(reader)
            self._device.upload(self.output_norms, read_output_norms(reader, self.config))
            head = read_head(reader, self.config)
        if self.head is None:
            return head
        part, upload = self.head, self._device.upload
        upload(part.norm_weight, head.final_norm_weight)
        upload(part.norm_bias, head.final_norm_bias)
        if part.project_out is not None:
            upload(part.project_out.content, head.project_out)
        upload(part.head.content, _bits(head.head))
        return None

    def _read_attention(
        self, reader: TensorReader, on_layer: Callable[[int, AttentionWeights], None]
    ) -> None:
        for layer, weights in enumerate(attention_layers(reader, self.config)):
            self._fill_attention(layer, weights)
            on_layer(layer, weights)

    def _read_neurons(self, reader: TensorReader) -> None:
        """Layer by layer; a layer is freed before the next one is read."""
        layers = ffn_layers(reader, self.config, self._neuron_ids)
        for layer in range(self.config.num_layers):
            self._fill_ffn(layer, next(layers))

    def _fill_attention(self, layer: int, weights: AttentionWeights) -> None:
        part, upload = self.attention[layer], self._device.upload
        for target, stack in zip(self.layers[layer].vectors, weights.vectors, strict=True):
            upload(target, stack[0])
        if part is not None:
            upload(part.qkv.content, _bits(weights.qkv.matrix(0)))
            upload(part.out.content, _bits(weights.out.matrix(0)))
            if part.router is not None:
                self._fill_router(part.router, weights.routers)

    def _fill_router(self, router: DeviceRouter, weights: RouterArrays) -> None:
        """`weights` are of one layer."""
        upload = self._device.upload
        upload(router.rows.data, weights.rows)
        upload(router.bias, weights.bias)
        upload(router.selection_bias, weights.selection_bias)
        if router.shared is not None:
            upload(router.shared.data, weights.shared)

    def _fill_ffn(self, layer: int, weights: FfnWeights) -> None:
        part, upload = self.ffn[layer], self._device.upload
        upload(self.down_bias[layer], weights.down_bias[layer])
        if part is None:
            return
        upload(part.gate.content, _bits(weights.gate))
        upload(part.gate_bias, weights.gate_bias)
        if part.up is not None:
            upload(part.up.content, _bits(weights.up))
            upload(part.up_bias, weights.up_bias)
        upload(part.down.content, _bits(weights.down))
        if part.starts.shape[0]:
            upload(part.starts, self.starts[layer])
        if self._spec.system.has_down_norms:
            upload(part.down_norms, row_lengths(weights.down))

    def _like(self, array: np.ndarray) -> Any:
        return self._device.empty(array.shape, array.dtype)

    def _matrix(self, rows: np.ndarray, num_rows: int | None = None) -> DeviceMatrix:
        """A matrix like `rows` (N, items), or of `num_rows` of them."""
        items = rows.shape[1]
        shape = rows.shape[0] if num_rows is None else num_rows, padded_items(rows.dtype, items)
        kind = np.dtype(np.uint8) if is_quantized(rows.dtype) else rows.dtype
        data = self._device.empty(shape, kind)
        return DeviceMatrix(data, format_of(rows.dtype), row_width(rows.dtype, items))

    def _layers(self, weights: AttentionWeights, cache: CacheSpec) -> list[Layer]:
        tables = [self._uploaded(table) for table in rope_tables(self.config, cache)]
        tables.append(self._device.empty((0, 2, 0), np.float32))  # of a layer without rope, at -1
        return [
            Layer.of(
                numbers,
                LayerVectors(*map(self._like, like)),
                tables[numbers.rope],
                tables[numbers.query_rope],
            )
            for numbers, *like in zip(layer_numbers(self.config), *weights.vectors, strict=True)
        ]

    def _uploaded(self, array: np.ndarray) -> Any:
        target = self._like(array)
        self._device.upload(target, array)
        return target

    def _attention(
        self, weights: AttentionWeights, num_pages: int, router: RouterSpec | None
    ) -> AttentionPart:
        config = self.config
        pages = num_pages, config.num_kv_heads, PAGE_POSITIONS, config.head_dim
        kind = np.float32 if self._kv_dtype == "float32" else np.uint16
        return AttentionPart(
            qkv=self._matrix(weights.qkv.matrix(0)),
            out=self._matrix(weights.out.matrix(0)),
            keys=self._device.empty(pages, kind),
            values=self._device.empty(pages, kind),
            router=None if router is None else self._router(router),
        )

    def _router(self, spec: RouterSpec) -> DeviceRouter:
        count, width = spec.num_experts, self.config.hidden_size

        def floats(*shape: int) -> Any:
            return self._device.empty(shape, np.float32)

        def rows(num_rows: int) -> DeviceMatrix:
            return DeviceMatrix(floats(num_rows, width), "f32", width)

        return DeviceRouter(
            rows=rows(count),
            bias=floats(count * spec.has_bias),
            selection_bias=floats(count * spec.has_selection_bias),
            shared=rows(1) if spec.gates_shared else None,
        )

    def _ffn(self, weights: FfnWeights, starts: np.ndarray) -> DeviceNeurons:
        has_up, size = weights.up.shape[0] > 0, int(starts[-1])
        no_floats = self._device.empty((0,), np.float32)

        def biases(like: np.ndarray) -> Any:
            return self._device.empty((size,), np.float32) if like.size else no_floats

        return DeviceNeurons(
            gate=self._matrix(weights.gate, size),
            gate_bias=biases(weights.gate_bias),
            up=self._matrix(weights.up, size) if has_up else None,
            up_bias=biases(weights.up_bias),
            down=self._matrix(weights.down, size),
            down_norms=self._device.empty((size * self._spec.system.has_down_norms,), np.float32),
            starts=self._device.empty((starts.size if starts.size > 2 else 0,), np.int32),
        )

    def _head(self, weights: HeadWeights) -> HeadPart:
        projects = weights.project_out.size > 0
        return HeadPart(
            norm_weight=self._like(weights.final_norm_weight),
            norm_bias=self._like(weights.final_norm_bias),
            project_out=self._matrix(weights.project_out) if projects else None,
            head=self._matrix(weights.head),
        )


def format_of(dtype: np.dtype) -> str:
    """The kernels' name of a format of `numba_kernels.formats`."""
    return FORMATS[dtype].short


def _bits(rows: np.ndarray) -> np.ndarray:
    """Quantized rows as their bytes, others as they are."""
    return rows.view(np.uint8) if is_quantized(rows.dtype) else rows
