"""Prefill on a GPU, many tokens of one sequence: matmuls, and attention by the step's kernels.

Quantized weights are dequantized to float16 in blocks; matmuls accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.model import CudaModel
from hotcold.actors.attention.cuda.step import norm_queries_and_keys, whole_length
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.cuda_kernels.kernels import Layer, PagedCache
from hotcold.cuda_kernels.matrix import DeviceMatrix
from hotcold.cuda_kernels.neurons import DeviceNeurons, DeviceRouter
from hotcold.model.config.layer_order import ffn_residual_and_input, layer_input
from hotcold.numba_kernels.checks import DRELU
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import FULL, WINDOWED

BLOCK_BYTES = 64 << 20  # of dequantized weights
_MAX_FLOAT16 = np.float32(65504)
_OPERANDS = {"f32": np.float32, "f16": np.uint16, "bf16": np.int16}


class PromptWork:
    """Computes a layer or the head for many tokens, in temporary arrays."""

    def __init__(
        self, device: Device, model: CudaModel, attention_scratch: Any, router_scratch: Any
    ) -> None:
        """Both are of a step; `attention_scratch` is large enough for the longest sequence."""
        self._device, self._model = device, model
        self._scratch, self._router_scratch = attention_scratch, router_scratch
        self._wide: Any = None

    def attention(
        self, layer: int, hidden: Any, positions: Any, slots: Any, tables: Any, last_position: int
    ) -> tuple[Any, Any, Any]:
        """ffn_residual, ffn_input (T, d) of hidden (T, d); with experts what its blocks weigh.

        That is (T, B), else None; tables (groups, slots, pages), the others (T,).
        """
        own, part = self._model.layers[layer], self._model.attention[layer]
        assert part is not None
        vectors, own_tables = own.vectors, tables[WINDOWED if own.numbers.window else FULL]
        cache = PagedCache(part.keys, part.values, positions, slots, own_tables)

        def add_attention(x: Any, residual: Any) -> Any:
            qkv = self.linear(x, part.qkv, vectors.qkv_bias)
            heads = self._attend(own, qkv, cache, last_position)
            out = self.linear(heads, part.out, vectors.out_bias)
            if own.numbers.adds_late:
                weight = vectors.attention_norm_weight
                out = self._norm(own, out, weight, weight[:0])
                out *= own.numbers.residual_scale
            out += residual
            return out

        residual = self._layer_input(layer, hidden)
        ffn_residual, ffn_input = ffn_residual_and_input(
            own.numbers,
            residual,
            norm=lambda x: self._norm(own, x, vectors.norm_weight, vectors.norm_bias),
            ffn_norm=lambda x: self._ffn_norm(layer, x),
            add_attention=add_attention,
        )
        x = residual if own.numbers.routes_layer_input else ffn_input
        weights = None if part.router is None else self._route(own, part.router, x, ffn_input)
        return ffn_residual, ffn_input, weights

    def _route(self, layer: Layer, router: DeviceRouter, x: Any, ffn_input: Any) -> Any:
        """(T, B): to the last bit what steps of fewer tokens choose."""
        num_blocks = self._model.starts.shape[1] - 1
        weights = self._device.empty((x.shape[0], num_blocks), np.float32)
        for few in _few_at_once(x.shape[0]):
            self._device.kernels.route(
                layer, router, x[few], ffn_input[few], self._router_scratch, weights[few]
            )
        return weights

    def hot_blocks(
        self, layer: int, x: Any, weights: np.ndarray, out: Any, *, counts: Any = None
    ) -> None:
        """`hot` of the layer's neurons, where weights (T, B) choose blocks for each token.

        Each block meets the tokens that chose it, in ascending order of blocks; the others are not
        read.
        """
        part, starts = self._model.ffn[layer], self._model.starts[layer]
        assert part is not None
        out[...] = 0
        if counts is not None:
            counts[...] = 0
        places = np.diff(starts) > 0
        tokens = [np.flatnonzero(column) for column in weights.T]
        sizes = np.array([own.size for own in tokens]) * places
        blocks = np.flatnonzero(sizes)
        if not blocks.size:
            return
        chosen = self._uploaded(np.concatenate([tokens[block] for block in blocks]))
        factors = self._uploaded(
            np.concatenate([weights[tokens[block], block] for block in blocks])[:, None]
        )
        ends = np.cumsum(sizes[blocks]).tolist()
        for block, begin, end in zip(blocks.tolist(), [0, *ends], ends, strict=False):
            first, last = int(starts[block]), int(starts[block + 1])
            own_counts = None if counts is None else counts[first:last]
            own, own_x = chosen[begin:end], x[chosen[begin:end]]
            found, own_factors = self._device.empty(own_x.shape, np.float32), factors[begin:end]
            rows = part.rows(first, last)
            self.hot(rows, own_x, found, add=False, counts=own_counts, weights=own_factors)
            out[own] += found

    def _uploaded(self, array: np.ndarray) -> Any:
        target = self._device.empty(array.shape, array.dtype)
        self._device.upload(target, array)
        return target

    def hot(
        self,
        part: DeviceNeurons,
        x: Any,
        out: Any,
        *,
        add: bool,
        counts: Any = None,
        weights: Any = None,
    ) -> None:
        """out = the neurons' output for x (T, d), or out += with `add`.

        weights (T, 1), if given: factors of the activations. counts (N,) int64, if given: tokens
        for which neuron n's activation is not 0.
        """
        gates = self.linear(x, part.gate, part.gate_bias)
        factors = None if part.up is None else self.linear(x, part.up, part.up_bias)
        if counts is not None:
            alone = gates.copy()
            drelu_factors = factors if self._model.activation.code == DRELU else None
            self._device.activate(self._model.activation, alone, drelu_factors)
            if weights is not None:
                alone *= weights
            counts[:] = (alone != 0).sum(axis=0)
        self._device.activate(self._model.activation, gates, factors)
        if weights is not None:
            gates *= weights
        self._combine(gates, part.down, out, add)

    def head(self, hidden: Any) -> Any:
        """Logits (T, V) of hidden (T, d)."""
        part = self._model.head
        assert part is not None
        x = self._layer_input(self._model.config.num_layers, hidden)
        no_bias = part.norm_bias[:0]
        if part.norm_weight.shape[0]:
            x = self._norm(self._model.layers[-1], x, part.norm_weight, part.norm_bias)
        if part.project_out is not None:
            x = self.linear(x, part.project_out, no_bias)
        cap = np.float32(self._model.config.logit_softcap)
        logits = self.linear(x, part.head, no_bias)
        return cap * self._device.xp.tanh(logits / cap) if cap else logits

    def linear(self, x: Any, weights: DeviceMatrix, bias: Any) -> Any:
        """x @ weights.T + bias: (T, N) float32."""
        out = self._device.empty((x.shape[0], weights.num_rows), np.float32)

        def multiply(rows: Any, first: int, last: int) -> None:
            self._device.multiply(operand, rows, out[:, first:last], b_has_rows=True, add=False)

        operand, scales = self._operand(x, weights)
        self._each_block(weights, multiply)
        if scales is not None:
            out *= scales
        if bias.shape[0]:
            out += bias
        return out

    def _combine(self, h: Any, rows: DeviceMatrix, out: Any, add: bool) -> None:
        """out (T, d) = h (T, N) @ rows, or out += with `add`."""
        operand, scales = self._operand(h, rows)
        if not add:
            out[...] = 0
        elif scales is not None:
            out /= scales

        def multiply(block: Any, first: int, last: int) -> None:
            part = operand[:, first:last]
            self._device.multiply(part, block, out, b_has_rows=False, add=True)

        self._each_block(rows, multiply)
        if scales is not None:
            out *= scales

    def _operand(self, x: Any, weights: DeviceMatrix) -> tuple[Any, Any]:
        """x (T, k) in the format that matmul takes, and what its sums are to be multiplied with.

        Of float16, which ends at 65504, that is (T, 1): a power of two for a token with numbers
        beyond it, by which they are divided, else 1. Others have None.
        """
        dtype = _OPERANDS.get(weights.format, np.uint16)
        if dtype != np.uint16 or not x.size:
            return self._device.narrow(x, dtype), None
        xp = self._device.xp
        most = xp.abs(x).max(axis=1, keepdims=True)
        is_beyond = (most > _MAX_FLOAT16) & xp.isfinite(most)
        _, exponents = xp.frexp(xp.where(is_beyond, most, np.float32(1)))
        scales = xp.where(is_beyond, xp.ldexp(xp.ones_like(most), exponents - 15), np.float32(1))
        return self._device.narrow(x / scales, dtype), scales

    def _each_block(self, weights: DeviceMatrix, multiply: Callable[[Any, int, int], None]) -> None:
        """Call multiply(rows, first, last) for blocks of rows in a format that matmul takes."""
        if weights.format in _OPERANDS:
            multiply(weights.data, 0, weights.num_rows)
            return
        size = max(1, BLOCK_BYTES // (2 * weights.width))
        num_rows = min(size, weights.num_rows)
        if self._wide is None or self._wide.size < num_rows * weights.width:
            self._wide = self._device.empty((num_rows * weights.width,), np.uint16)
        for first in range(0, weights.num_rows, size):
            last = min(first + size, weights.num_rows)
            items = (last - first) * weights.width
            wide = self._wide[:items].reshape(last - first, weights.width)
            self._device.kernels.widen(weights, first, last, wide)
            multiply(wide, first, last)

    def _attend(self, layer: Layer, qkv: Any, cache: PagedCache, last_position: int) -> Any:
        """Write keys and values to the cache, then compute causal attention."""
        numbers, kernels = layer.numbers, self._device.kernels
        most = whole_length(last_position + 1, cache.page_tables.shape[1] * PAGE_POSITIONS)
        shape = qkv.shape[0], numbers.num_heads * numbers.head_dim
        heads = self._device.empty(shape, np.float32)
        parts = [
            (few, cache._replace(positions=cache.positions[few], slots=cache.slots[few]))
            for few in _few_at_once(qkv.shape[0])
        ]
        for few, own in parts:
            norm_queries_and_keys(kernels, layer, qkv[few])
            kernels.rope_store(layer, qkv[few], own)
        for few, own in parts:
            kernels.decode_attention(layer, qkv[few], own, most, self._scratch, heads[few])
        return heads

    def _layer_input(self, layer: int, hidden: Any) -> Any:
        before = self._model.layers[max(layer - 1, 0)].numbers
        return layer_input(before, layer, hidden, self._ffn_norm)

    def _ffn_norm(self, layer: int, x: Any) -> Any:
        own = self._model.layers[layer]
        return self._norm(own, x, own.vectors.ffn_norm_weight, own.vectors.ffn_norm_bias)

    def _norm(self, layer: Layer, x: Any, weight: Any, bias: Any) -> Any:
        out = self._device.empty(x.shape, np.float32)
        for few in _few_at_once(x.shape[0]):
            self._device.kernels.norm(layer, x[few], weight, bias, out[few])
        return out


def _few_at_once(num_tokens: int) -> list[slice]:
    """Slices of at most KERNEL_TOKENS tokens."""
    return [slice(first, first + KERNEL_TOKENS) for first in range(0, num_tokens, KERNEL_TOKENS)]
