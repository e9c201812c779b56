"""Prefill on a GPU, many tokens of one sequence: matmuls, and near attention by a step's kernels.

Quantized weights are dequantized to float16 in blocks; matmuls accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.model import CudaModel
from hotcold.actors.attention.cuda.step import norm_queries_and_keys, whole_length
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.cuda_kernels.kernels import Layer, PagedCache
from hotcold.cuda_kernels.matrix import DeviceMatrix
from hotcold.cuda_kernels.neurons import DeviceNeurons, DeviceRouter
from hotcold.model.config.layer_order import ffn_residual_and_input, layer_input
from hotcold.model.config.model_config import ModelConfig
from hotcold.numba_kernels.checks import DRELU
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import FULL, WINDOWED

BLOCK_BYTES = 64 << 20  # of dequantized weights
_MAX_FLOAT16 = np.float32(65504)
# From this position on, attention is by products: a step's kernel reads keys anew for each token.
FAR = 1024
_PRODUCT_BYTES = 64 << 20  # of queries with keys
_CACHES = {"float32": "f32", "uint16": "f16"}
_OPERANDS = {"f32": np.float32, "f16": np.uint16, "bf16": np.int16}


def far_bytes(system: SystemConfig, config: ModelConfig, positions: int) -> int:
    """Bytes that attention to far positions takes, of sequences of so many."""
    if positions <= FAR:
        return 0
    item_bytes = 4 if system.kv_dtype == "float32" else 2
    return 3 * _PRODUCT_BYTES + 2 * positions * config.num_kv_heads * config.head_dim * item_bytes


class Group(NamedTuple):
    """Neurons first to last - 1, and the tokens begin to end - 1 that they meet."""

    first: int
    last: int
    begin: int
    end: int


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

        Each token's blocks are added in ascending order; what no token chose is not read.
        """
        part = self._model.ffn[layer]
        assert part is not None
        out[...] = 0
        if counts is not None:
            counts[...] = 0
        for groups, tokens, factors in _chosen_together(weights, self._model.starts[layer]):
            order, ends = _turns(tokens)
            own, turns = self._uploaded(tokens), self._uploaded(order)
            own_x, own_factors = x[own], self._uploaded(factors[:, None])
            found = self._device.empty(own_x.shape, np.float32)
            self.hot(
                part, own_x, found, add=False, counts=counts, weights=own_factors, groups=groups
            )
            for begin, end in pairwise([0, *ends]):
                rows = turns[begin:end]
                out[own[rows]] += found[rows]

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
        groups: Sequence[Group] = (),
    ) -> None:
        """out = the neurons' output for x (T, d), or out += with `add`.

        weights (T, 1), if given: factors of the activations. counts (N,) int64, if given: tokens
        for which neuron n's activation is not 0. groups, if given: which neurons meet which tokens.
        """
        groups = groups or [Group(0, part.num_neurons, 0, x.shape[0])]
        gates = self.linear(x, part.gate, part.gate_bias, groups)
        factors = None if part.up is None else self.linear(x, part.up, part.up_bias, groups)
        if counts is not None:
            self._count(gates.copy(), factors, weights, groups, counts)
        self._device.activate(self._model.activation, gates, factors)
        if weights is not None:
            gates *= weights
        self._combine(gates, part.down, out, add, groups)

    def _count(
        self, gates: Any, factors: Any, weights: Any, groups: Sequence[Group], counts: Any
    ) -> None:
        """How many tokens make each neuron fire; `gates` are overwritten."""
        drelu_factors = factors if self._model.activation.code == DRELU else None
        self._device.activate(self._model.activation, gates, drelu_factors)
        if weights is not None:
            gates *= weights
        for first, last, begin, end in groups:
            counts[first:last] = (gates[begin:end] != 0).sum(axis=0)

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

    def linear(self, x: Any, weights: DeviceMatrix, bias: Any, groups: Sequence[Group] = ()) -> Any:
        """x @ weights.T + bias: (T, N) float32, with `groups` of each token's neurons alone."""
        groups = groups or [Group(0, weights.num_rows, 0, x.shape[0])]
        width = groups[0].last - groups[0].first
        out = self._device.empty((x.shape[0], width), np.float32)
        operand, scales = self._operand(x, weights.format)
        for first, last, begin, end in groups:
            for rows, at, to in self._blocks(weights, first, last):
                target = out[begin:end, at:to]
                self._device.multiply(operand[begin:end], rows, target, b_has_rows=True, add=False)
        if scales is not None:
            out *= scales
        if bias.shape[0]:
            for first, last, begin, end in groups:
                out[begin:end] += bias[first:last]
        return out

    def _combine(
        self, h: Any, rows: DeviceMatrix, out: Any, add: bool, groups: Sequence[Group]
    ) -> None:
        """out (T, d) = h (T, N) @ rows, or out += with `add`; h of each token's neurons alone."""
        operand, scales = self._operand(h, rows.format)
        if not add:
            out[...] = 0
        elif scales is not None:
            out /= scales
        for first, last, begin, end in groups:
            for block, at, to in self._blocks(rows, first, last):
                part = operand[begin:end, at:to]
                self._device.multiply(part, block, out[begin:end], b_has_rows=False, add=True)
        if scales is not None:
            out *= scales

    def _operand(self, x: Any, weight_format: str) -> tuple[Any, Any]:
        """x (T, k) in the format that matmul takes, and what its sums are to be multiplied with.

        Of float16, which ends at 65504, that is (T, 1): a power of two for a token with numbers
        beyond it, by which they are divided, else 1. Others have None.
        """
        dtype = _OPERANDS.get(weight_format, np.uint16)
        if dtype != np.uint16 or not x.size:
            return self._device.narrow(x, dtype), None
        xp = self._device.xp
        most = xp.abs(x).max(axis=1, keepdims=True)
        is_beyond = (most > _MAX_FLOAT16) & xp.isfinite(most)
        _, exponents = xp.frexp(xp.where(is_beyond, most, np.float32(1)))
        scales = xp.where(is_beyond, xp.ldexp(xp.ones_like(most), exponents - 15), np.float32(1))
        return self._device.narrow(x / scales, dtype), scales

    def _blocks(
        self, weights: DeviceMatrix, first: int, last: int
    ) -> Iterator[tuple[Any, int, int]]:
        """Rows first..last-1 in a format that matmul takes, block by block, and which these are."""
        if weights.format in _OPERANDS:
            yield weights.data[first:last], 0, last - first
            return
        size = max(1, BLOCK_BYTES // (2 * weights.width))
        num_rows = min(size, last - first)
        if self._wide is None or self._wide.size < num_rows * weights.width:
            self._wide = self._device.empty((num_rows * weights.width,), np.uint16)
        for begin in range(first, last, size):
            end = min(begin + size, last)
            wide = self._wide[: (end - begin) * weights.width].reshape(end - begin, weights.width)
            self._device.kernels.widen(weights, begin, end, wide)
            yield wide, begin - first, end - first

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
        if last_position >= FAR:
            self._attend_far(layer, qkv, cache, last_position, heads)
            return heads
        for few, own in parts:
            kernels.decode_attention(layer, qkv[few], own, most, self._scratch, heads[few])
        return heads

    def _attend_far(
        self, layer: Layer, qkv: Any, cache: PagedCache, last_position: int, heads: Any
    ) -> None:
        """heads (T, H * dim): by products with all the keys that tokens see, and with values."""
        numbers, num_tokens = layer.numbers, qkv.shape[0]
        kv_heads, dim = numbers.num_kv_heads, numbers.head_dim
        group, weight_format = numbers.num_heads // kv_heads, _CACHES[cache.keys.dtype.name]
        seen = last_position + 1 - num_tokens + 1 - numbers.window if numbers.window else 0
        first_page = max(0, seen) // PAGE_POSITIONS
        first, end = first_page * PAGE_POSITIONS, last_position + 1
        own_pages = cache.page_tables[cache.slots[:1]][0]
        pages = own_pages[first_page : -(-end // PAGE_POSITIONS)]

        def rows_of(stored: Any) -> Any:
            found = stored.transpose(1, 0, 2, 3).take(pages, axis=1)
            return found.reshape(kv_heads, -1, dim)[:, : end - first]

        keys, values = rows_of(cache.keys), rows_of(cache.values)
        at_once = max(1, _PRODUCT_BYTES // (4 * numbers.num_heads * (end - first)))
        for begin in range(0, num_tokens, at_once):
            few = slice(begin, begin + at_once)
            queries = qkv[few].reshape(-1, kv_heads * (group + 2), dim)[:, : kv_heads * group]
            count = queries.shape[0]
            queries = queries.reshape(count, kv_heads, group, dim).transpose(1, 0, 2, 3)
            operand, scales = self._operand(queries.reshape(-1, dim), weight_format)
            of_each = kv_heads, count * group, -1
            products = self._device.empty((*of_each[:2], end - first), np.float32)
            operand = operand.reshape(of_each)
            self._device.multiply(operand, keys, products, b_has_rows=True, add=False)
            if scales is not None:
                products *= scales.reshape(of_each)
            weights = self._device.empty(products.shape, cache.keys.dtype)
            positions = cache.positions[few]
            self._device.kernels.weigh_positions(layer, products, positions, first, weights)
            found = self._device.empty((*of_each[:2], dim), np.float32)
            self._device.multiply(weights, values, found, b_has_rows=False, add=False)
            found = found.reshape(kv_heads, count, group, dim).transpose(1, 0, 2, 3)
            heads[few] = found.reshape(count, -1)

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


def _chosen_together(
    weights: np.ndarray, starts: np.ndarray
) -> Iterator[tuple[list[Group], np.ndarray, np.ndarray]]:
    """Blocks that tokens chose by weights (T, B), in ascending order, several at once.

    Those are of as many neurons each, and have at most T tokens in all. With them come the tokens,
    one block's after the other's, and what they weigh.
    """
    groups, tokens, end = list[Group](), list[np.ndarray](), 0

    def found() -> tuple[list[Group], np.ndarray, np.ndarray]:
        sizes = [group.end - group.begin for group in groups]
        own, blocks = np.concatenate(tokens), np.repeat(numbers, sizes)
        return groups, own, weights[own, blocks]

    numbers = list[int]()
    for block, column in enumerate(weights.T):
        own, (first, last) = np.flatnonzero(column), starts[block : block + 2].tolist()
        if not own.size or first == last:
            continue
        is_like = groups and last - first == groups[0].last - groups[0].first
        if groups and not (is_like and end + own.size <= weights.shape[0]):
            yield found()
            groups, tokens, numbers, end = [], [], [], 0
        groups.append(Group(first, last, end, end + own.size))
        tokens.append(own)
        numbers.append(block)
        end += own.size
    if groups:
        yield found()


def _turns(tokens: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Places of all tokens' first occurrences, then of second ones, ...; where each of these ends.

    In either they are ascending.
    """
    by_token = np.argsort(tokens, kind="stable")
    _, firsts, counts = np.unique(tokens[by_token], return_index=True, return_counts=True)
    turns = np.empty(tokens.size, np.int64)
    turns[by_token] = np.arange(tokens.size) - np.repeat(firsts, counts)
    order = np.argsort(turns, kind="stable")
    return order, np.cumsum(np.bincount(turns)).tolist()
