"""The kernel launches of a step of few tokens, one graph for each request of the service.

A step is padded to one of a few numbers of tokens with copies of its last one, so that few graphs
serve all steps. A copy has the same position and page: it writes and reads the same values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.model import CudaModel
from hotcold.actors.attention.cuda.predictors import GpuPredictors
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.cuda_kernels.kernels import CudaKernels, Layer, PagedCache
from hotcold.cuda_kernels.matrix import DeviceMatrix
from hotcold.cuda_kernels.neurons import LayerResidual, SharedMemory
from hotcold.model.config.layer_order import ffn_residual_and_input, layer_input
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import FULL, NUM_GROUPS, WINDOWED, SharedBuffers

_TOKENS = (1, 2, 4, 8, 16, KERNEL_TOKENS)


def whole_step(num_tokens: int) -> int:
    """The number of tokens that a step of `num_tokens` is padded to."""
    return _TOKENS[bisect_left(_TOKENS, num_tokens)]


def whole_length(length: int, most: int) -> int:
    """Positions that a graph for sequences of `length` covers: a power of two of pages."""
    return min(PAGE_POSITIONS << max(0, (length - 1) // PAGE_POSITIONS).bit_length(), most)


def norm_queries_and_keys(kernels: CudaKernels, layer: Layer, qkv: Any) -> None:
    """Norm q and k of qkv (T, rows) in place, by head or as a whole, if the layer does so."""
    numbers, vectors = layer.numbers, layer.vectors
    queries = numbers.num_heads * numbers.head_dim
    keys = numbers.num_kv_heads * numbers.head_dim
    if vectors.q_norm_weight.shape[0]:
        kernels.norm_parts(layer, qkv, 0, queries, vectors.q_norm_weight)
    if vectors.k_norm_weight.shape[0]:
        kernels.norm_parts(layer, qkv, queries, queries + keys, vectors.k_norm_weight)


class StepWork:
    """The buffers of a step on the device, and the launches over them.

    For T tokens: hidden (T, d); residual_and_input (2, T * d) with ffn_residual and ffn_input;
    partial (T, d); logits (T, V); num_fired (L, 3) int32: those that fire, whose up rows
    are read, that predictors listed. positions and slots (32,) and page_tables
    (groups, slots, pages) int32 are one array, `place`. all_weights (L, T * B) has what each
    layer's blocks weigh (`block_weights`), which its router writes, or a request brings.
    """

    def __init__(self, device: Device, model: CudaModel, layout: ArenaLayout) -> None:
        """Errors: DeviceMemoryError."""
        self._device, self._model = device, model
        config, tokens, width = model.config, KERNEL_TOKENS, layout.width
        self.most_length = layout.pages_a_slot * PAGE_POSITIONS

        def floats(*sizes: int) -> Any:
            return device.empty(sizes, np.float32)

        self.width = width
        self.hidden = floats(tokens, width)
        self._residual, self._normed = floats(tokens, width), floats(tokens, width)
        self._qkv = floats(tokens, config.most_inputs)
        is_late = any(layer.adds_late for layer in config.layers)
        self._added = floats(tokens, width if is_late else 0)
        self._heads = floats(tokens, config.heads.heads_size)
        self.residual_and_input = floats(2, tokens * width)
        self.input = self.residual_and_input[1]
        self.partial = floats(tokens, width)
        self.num_fired = device.empty((config.num_layers, 3), np.int32)
        self._projected = floats(tokens, config.embed_size)
        self.logits = floats(tokens, config.vocab_size if model.head else 0)
        tables = NUM_GROUPS, layout.num_slots, layout.pages_a_slot
        self.place = device.empty((2 * tokens + math.prod(tables),), np.int32)
        self._positions = self.place[:tokens]
        self._slots = self.place[tokens : 2 * tokens]
        self.tables = self.place[2 * tokens :].reshape(tables)
        kernels = device.kernels
        self.attention_scratch = floats(
            kernels.attention_scratch_items(
                tokens, config.num_heads, config.head_dim, self.most_length
            )
        )
        most = max((part.num_neurons for part in model.ffn if part is not None), default=0)
        self._ffn_scratch = floats(kernels.ffn_scratch_items(tokens, most, width) if most else 0)
        self._num_blocks = layout.num_blocks
        self.all_weights = floats(config.num_layers, tokens * layout.num_blocks)
        most_experts = max(layer.numbers.num_experts for layer in model.layers)
        self.router_scratch = floats(kernels.router_scratch_items(tokens, most_experts))

    def attention(
        self,
        layer: int,
        num_tokens: int,
        max_length: int,
        on_input: Callable[[], None] = lambda: None,
    ) -> None:
        """hidden → residual_and_input, and weights of blocks of a layer with experts.

        on_input: called when ffn_input and these weights are on the stream; of a parallel layer
        that is before attention
        """
        own, normed = self._model.layers[layer], self._normed[:num_tokens]
        part, neurons = self._model.attention[layer], self._model.ffn[layer]
        ffn_residual, ffn_input = self.outputs(num_tokens)
        gates = None if neurons is None else neurons.gate

        def norm(x: Any) -> Any:
            weight, bias = own.vectors.norm_weight, own.vectors.norm_bias
            if x is ffn_residual:
                return self._device.kernels.norm(own, x, weight, bias, ffn_input, reader=gates)
            return self._device.kernels.norm(
                own, x, weight, bias, normed, reader=None if part is None else part.qkv
            )

        def add_attention(x: Any, residual: Any) -> Any:
            self._add_attention(layer, x, residual, max_length, ffn_residual)
            return ffn_residual

        def put(source: Any, target: Any) -> None:
            nothing = self.place[:0]
            if source is not target:  # a norm without weights copies, and can be in a graph
                self._device.kernels.norm(own, source, nothing, nothing, target)

        def is_known(found: Any) -> None:
            put(found, ffn_input)
            self._route(layer, residual, ffn_input)
            on_input()

        residual = self._layer_input(layer, num_tokens)
        found, _ = ffn_residual_and_input(
            own.numbers,
            residual,
            norm=norm,
            ffn_norm=lambda x: self._ffn_norm(layer, x, ffn_input, gates),
            add_attention=add_attention,
            on_input=is_known,
        )
        put(found, ffn_residual)

    def _route(self, layer: int, residual: Any, ffn_input: Any) -> None:
        """What the layer reads, (T, d) each → weights of its blocks, where it has experts."""
        own, part = self._model.layers[layer], self._model.attention[layer]
        if part is None or part.router is None:
            return
        x = residual if own.numbers.routes_layer_input else ffn_input
        weights, scratch = self.block_weights(layer, x.shape[0]), self.router_scratch
        self._device.kernels.route(own, part.router, x, ffn_input, scratch, weights)

    def block_weights(self, layer: int, num_tokens: int) -> Any:
        """What the layer's blocks weigh: (T, B)."""
        shape = num_tokens, self._num_blocks
        return self.all_weights[layer, : num_tokens * self._num_blocks].reshape(shape)

    def _add_attention(
        self, layer: int, x: Any, residual: Any, max_length: int, ffn_residual: Any
    ) -> None:
        """ffn_residual = residual + attention(x): (T, d) each."""
        kernels, num_tokens = self._device.kernels, x.shape[0]
        own, part = self._model.layers[layer], self._model.attention[layer]
        assert part is not None
        qkv, heads = self._qkv[:num_tokens], self._heads[:num_tokens]
        kernels.gemv(part.qkv, own.vectors.qkv_bias, x, qkv)
        tables = self.tables[WINDOWED if own.numbers.window else FULL]
        place = self._positions[:num_tokens], self._slots[:num_tokens], tables
        cache = PagedCache(part.keys, part.values, *place)
        norm_queries_and_keys(kernels, own, qkv)
        kernels.rope_store(own, qkv, cache)
        scratch = self.attention_scratch
        kernels.decode_attention(own, qkv, cache, max_length, scratch, heads, part.out)
        if not own.numbers.adds_late:
            kernels.gemv(part.out, own.vectors.out_bias, heads, ffn_residual, residual)
            return
        added = self._added[:num_tokens]
        kernels.gemv(part.out, own.vectors.out_bias, heads, added)
        weight = own.vectors.attention_norm_weight
        self._device.kernels.norm(own, added, weight, weight[:0], ffn_residual, residual)

    def hot(
        self,
        layer: int,
        num_tokens: int,
        thresholds: Thresholds,
        has_weights: bool = False,
        ends_layer: bool = False,
        masks: Any = None,
    ) -> None:
        """ffn_input → partial, num_fired; by weights of blocks, or of all; by masks, if any.

        `ends_layer`: ffn_residual and ffn_input → hidden, the layer's output, instead of partial.
        """
        neurons, bias = self._model.ffn[layer], self._model.down_bias[layer]
        assert neurons is not None

        def compute(out: Any, residual: LayerResidual | None) -> None:
            self._device.kernels.hot_ffn(
                neurons,
                self.outputs(num_tokens)[1],
                self._model.activation,
                thresholds,
                self._ffn_scratch,
                out,
                self.num_fired[layer],
                self.block_weights(layer, num_tokens) if has_weights else None,
                residual,
                masks,
            )

        if ends_layer:
            self._end_layer(layer, num_tokens, bias, compute)
        else:
            compute(self.partial[:num_tokens], None)

    def _end_layer(
        self, layer: int, num_tokens: int, bias: Any, add_up: Callable[[Any, LayerResidual], None]
    ) -> None:
        """ffn_residual and the FFN's sum, which `add_up` writes to its first argument → hidden."""
        own, hidden = self._model.layers[layer], self.hidden[:num_tokens]
        ffn_residual, _ = self.outputs(num_tokens)
        weight, scale = self._model.output_norms[layer], own.numbers.residual_scale
        if not weight.shape[0]:
            add_up(hidden, LayerResidual(ffn_residual, bias, scale))
            return
        added = self._added[:num_tokens]
        add_up(added, LayerResidual(None, bias, scale))
        self._device.kernels.norm(own, added, weight, weight[:0], hidden, ffn_residual)

    def predict(self, layer: int, num_tokens: int, predictors: GpuPredictors | None) -> Any:
        """What predictors read → the masks of the layer's own neurons; None without predictors."""
        if predictors is None:
            return None
        numbers, (x, ffn_input) = self._model.layers[layer].numbers, self.outputs(num_tokens)
        if numbers.is_parallel:
            x = self.hidden[:num_tokens]
        if not (predictors.reads_residual and (numbers.is_parallel or numbers.norms_ffn_input)):
            x = ffn_input
        predictors.predict(layer, x, self.num_fired[layer, 2:])
        return predictors.own_masks(layer)

    def layers(
        self,
        layers: range,
        has_head: bool,
        num_tokens: int,
        max_length: int,
        thresholds: Thresholds,
        shared: SharedMemory | None = None,
        predictors: GpuPredictors | None = None,
    ) -> None:
        """hidden → hidden, num_fired, layer by layer; logits.

        With `shared` CPU services have neurons of some of the layers, else of none; with
        `predictors` all compute those that these expect to fire.
        """
        for layer in layers:
            weighs = self._model.layers[layer].numbers.num_experts > 0
            is_whole = self._model.is_whole(layer)
            if shared is not None and is_whole:
                self._device.kernels.give_input(layer, shared)
            given = partial(self._give, layer, num_tokens, weighs, shared, predictors)
            self.attention(layer, num_tokens, max_length, given)
            masks = None if predictors is None else predictors.own_masks(layer)
            if is_whole:
                self.hot(layer, num_tokens, thresholds, weighs, ends_layer=True, masks=masks)
                continue
            assert shared is not None
            self._shared_ffn(layer, num_tokens, thresholds, weighs, shared, masks)
        if has_head:
            self.head(num_tokens)

    def _give(
        self,
        layer: int,
        num_tokens: int,
        weighs: bool,
        shared: SharedMemory | None,
        predictors: GpuPredictors | None,
    ) -> None:
        """ffn_input, and weights of blocks → masks of neurons, and what CPU services get."""
        self.predict(layer, num_tokens, predictors)
        if shared is None or self._model.is_whole(layer):
            return
        if predictors is not None:
            predictors.list_for_services(layer, shared)
        weights = self.block_weights(layer, num_tokens) if weighs else None
        ffn_input = self.outputs(num_tokens)[1]
        self._device.kernels.give_input(layer, shared, ffn_input, weights)

    def _shared_ffn(
        self,
        layer: int,
        num_tokens: int,
        thresholds: Thresholds,
        weighs: bool,
        shared: SharedMemory,
        masks: Any,
    ) -> None:
        """ffn_residual and ffn_input → hidden, the layer's output, with what CPU services have."""
        kernels, found = self._device.kernels, None
        if self._model.ffn[layer] is not None:
            self.hot(layer, num_tokens, thresholds, weighs, masks=masks)
            found = self.partial[:num_tokens]
        kernels.await_outputs(layer, shared)
        ffn_input = self.outputs(num_tokens)[1]

        def add_up(out: Any, residual: LayerResidual) -> None:
            kernels.add_outputs(shared, found, residual, ffn_input, out)

        self._end_layer(layer, num_tokens, None, add_up)

    def head(self, num_tokens: int) -> None:
        """hidden → logits."""
        part, kernels = self._model.head, self._device.kernels
        assert part is not None
        x = self._layer_input(self._model.config.num_layers, num_tokens)
        no_bias = part.norm_bias[:0]
        if part.norm_weight.shape[0]:
            normed = self._normed[:num_tokens]
            last, reader = self._model.layers[-1], part.project_out or part.head
            self._device.kernels.norm(
                last, x, part.norm_weight, part.norm_bias, normed, reader=reader
            )
            x = normed
        if part.project_out is not None:
            projected = self._projected[:num_tokens]
            kernels.gemv(part.project_out, no_bias, x, projected)
            x = projected
        logits = self.logits[:num_tokens]
        kernels.gemv(part.head, no_bias, x, logits)
        if self._model.config.logit_softcap:
            kernels.softcap(logits, self._model.config.logit_softcap)

    def outputs(self, num_tokens: int) -> tuple[Any, Any]:
        """ffn_residual and ffn_input: (T, d) each."""
        flat = self.residual_and_input[:, : num_tokens * self.width]
        shape = num_tokens, self.width
        return flat[0].reshape(shape), flat[1].reshape(shape)

    def _layer_input(self, layer: int, num_tokens: int) -> Any:
        def ffn_norm(layer: int, x: Any) -> Any:
            return self._ffn_norm(layer, x, self._residual[:num_tokens])

        before = self._model.layers[max(layer - 1, 0)].numbers
        return layer_input(before, layer, self.hidden[:num_tokens], ffn_norm)

    def _ffn_norm(self, layer: int, x: Any, out: Any, reader: DeviceMatrix | None = None) -> Any:
        own = self._model.layers[layer]
        weight, bias = own.vectors.ffn_norm_weight, own.vectors.ffn_norm_bias
        return self._device.kernels.norm(own, x, weight, bias, out, reader=reader)


class TokenPositions:
    """Copies positions, slots and page tables to the device, once a step for all layers."""

    def __init__(self, device: Device, work: StepWork, max_tokens: int) -> None:
        """`max_tokens` of a prompt."""
        self._device, self._work = device, work
        self._placed = device.pinned(work.place.shape, np.int32)
        self._prompt = device.pinned((2, max_tokens), np.int32)

    def forget(self) -> None:
        """Copy again in any case: there is another arena."""
        self._placed[:] = -1

    def put(self, buffers: SharedBuffers, num_tokens: int) -> None:
        """Put a step's positions on the stream; padding tokens repeat the last one.

        The previous copy must have been waited for.
        """
        tokens = KERNEL_TOKENS
        place = np.empty_like(self._placed)
        for first, values in ((0, buffers.positions), (tokens, buffers.slots)):
            place[first : first + num_tokens] = values[:num_tokens]
            place[first + num_tokens : first + tokens] = values[num_tokens - 1]
        place[2 * tokens :] = buffers.page_tables.reshape(-1)
        if not np.array_equal(place, self._placed):
            self._placed[:] = place
            self._device.copy_in(self._work.place, self._placed)

    def put_prompt(self, buffers: SharedBuffers, num_tokens: int) -> tuple[Any, Any]:
        """Put a prompt's positions and page tables on the stream; returns positions, slots (T,).

        Errors:  ValueError unless tokens are consecutive ones of one sequence
        """
        positions, slots = buffers.positions[:num_tokens], buffers.slots[:num_tokens]
        if np.ptp(slots) or (np.diff(positions) != 1).any():
            raise ValueError("prefill takes consecutive positions of one sequence")
        self.put(buffers, 1)
        self._prompt[0, :num_tokens], self._prompt[1, :num_tokens] = positions, slots
        on_device = self._device.empty(self._prompt.shape, np.int32)
        self._device.copy_in(on_device, self._prompt)
        return on_device[0, :num_tokens], on_device[1, :num_tokens]
