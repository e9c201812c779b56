"""Attention and head of many tokens of one sequence (prefill).

The same computation as `numba_kernels.serve.serve_attention`, as matmuls over all tokens. Calls
only record the work; all threads run it at the end of `Matmul.at_once`.
"""

import numpy as np

from hotcold.actors.cpu.matmul import Matmul
from hotcold.model.config.layer_order import layer_input, mixed_and_ffn_input
from hotcold.numba_kernels.decode.attention import softcap_kernel
from hotcold.numba_kernels.decode.norm import norm_rows_kernel
from hotcold.numba_kernels.decode.router import route_tokens
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.prefill.attention import (
    prompt_attention_kernel,
    prompt_scratch_shapes,
)
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import (
    FIRST_LOGIT,
    FULL,
    LAYER,
    NUM_TOKENS,
    NUM_UNWANTED,
    WINDOWED,
    SharedBuffers,
)
from hotcold.numba_kernels.serve.serve_attention import (
    AttentionArrays,
    norm_whole,
    rotate_and_store,
)

_NO_BIAS = np.empty(0, np.float32)


class _Rows:
    """Operations on rows of tokens, recorded in `matmul`: each thread has its own tokens."""

    def __init__(self, matmul: Matmul, arrays: AttentionArrays) -> None:
        self._matmul, self._arrays = matmul, arrays

    def norm(
        self, layer: int, rows: np.ndarray, weight: np.ndarray, bias: np.ndarray
    ) -> np.ndarray:
        """The rows, normed as the layer does; `rows` itself without weights."""
        if not weight.size:
            return rows
        numbers = self._arrays.numbers[layer]
        kind, epsilon = numbers.norm_kind, numbers.norm_eps
        out = self._matmul.scratch(rows.shape)

        def norm(first: int, last: int) -> None:
            norm_rows_kernel(kind, rows, weight, bias, epsilon, out, first, last)

        self._matmul.then_rows(len(rows), norm)
        return out

    def add(self, layer: int, residual: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """residual + rows, scaled where the layer does so."""
        out, scale = self._matmul.scratch(rows.shape), self._arrays.numbers[layer].residual_scale

        def add(first: int, last: int) -> None:
            np.multiply(rows[first:last], scale, out=out[first:last])
            out[first:last] += residual[first:last]

        self._matmul.then_rows(len(rows), add)
        return out

    def ffn_norm(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """The rows, normed for the layer's FFN or the next layer."""
        vectors = self._arrays.vectors
        weight, bias = vectors.ffn_norm_weight[layer], vectors.ffn_norm_bias[layer]
        return self.norm(layer, rows, weight, bias)

    def layer_input(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """The input of layer `layer`, or of the head after the last one."""
        before = self._arrays.numbers[max(layer - 1, 0)]
        return layer_input(before, layer, hidden, self.ffn_norm)


def _attend(
    matmul: Matmul,
    buffers: SharedBuffers,
    layer: int,
    qkv: np.ndarray,
    arrays: AttentionArrays,
    num_unwanted: int,
) -> np.ndarray:
    """Write keys and values to the cache, attend over all of it: (T, H * head_dim) once run.

    Of the T tokens behind those whose output is unwanted. Overwrites qkv, which is of all tokens.
    """
    num_threads, numbers = matmul.num_threads, arrays.numbers[layer]
    head_dim, first = int(numbers.head_dim), int(buffers.positions[0]) + num_unwanted
    queries = qkv[num_unwanted:]
    cache, sinks = _cache_of(buffers, layer, arrays), arrays.vectors.sinks[layer]
    out = matmul.scratch((len(queries), int(numbers.num_heads) * head_dim))
    shapes = prompt_scratch_shapes(head_dim)
    scratch = [matmul.scratch((num_threads, *shape)) for shape in shapes]
    counters = np.zeros(INTS_A_CELL, np.int32)

    def norm(thread: int) -> None:
        norm_whole(thread, num_threads, layer, arrays, qkv)

    def store(thread: int) -> None:
        rotate_and_store(thread, num_threads, layer, buffers, arrays, qkv)

    def attend(thread: int) -> None:
        own = [array[thread] for array in scratch]
        prompt_attention_kernel(numbers, sinks, queries, first, *cache, *own, counters, out)

    if arrays.vectors.q_norm_weight.shape[1] > head_dim:
        matmul.then(norm)
    matmul.then(store)
    if len(queries):
        matmul.then(attend)
    return out


def _cache_of(
    buffers: SharedBuffers, layer: int, arrays: AttentionArrays
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A layer's keys and values, and the pages of the sequence whose tokens are in `buffers`."""
    tables = buffers.page_tables[WINDOWED if arrays.numbers[layer].window else FULL]
    return arrays.keys[layer], arrays.values[layer], tables[buffers.slots[0]]


def compile_prompt_attention(buffers: SharedBuffers, arrays: AttentionArrays) -> None:
    """Compile the kernels of a layer, by a prompt of no tokens, so that none waits for it."""
    numbers, sinks, cache = (
        arrays.numbers[0],
        arrays.vectors.sinks[0],
        _cache_of(buffers, 0, arrays),
    )
    scratch = [np.empty(shape, np.float32) for shape in prompt_scratch_shapes(numbers.head_dim)]
    nothing, counters = np.empty((0, 0), np.float32), np.zeros(INTS_A_CELL, np.int32)
    rotate_and_store(0, 1, 0, buffers, arrays, nothing)
    prompt_attention_kernel(numbers, sinks, nothing, 0, *cache, *scratch, counters, nothing)
    if arrays.routers.rows.size:
        routed = int(np.flatnonzero(np.diff(arrays.routers.starts))[0])
        rows = [nothing, nothing, nothing, buffers.block_weights[:0]]
        route_tokens(arrays.numbers[routed], arrays.routers, routed, *rows)


def prompt_attention(
    matmul: Matmul,
    service: int,
    buffers: SharedBuffers,
    arrays: AttentionArrays,
) -> None:
    """Answer an ATTENTION request whose tokens are consecutive positions of one sequence.

    Errors:  ValueError for tokens of several sequences
    """
    layer = int(buffers.requests[service, LAYER])
    num_tokens = int(buffers.requests[service, NUM_TOKENS])
    num_unwanted = int(buffers.requests[service, NUM_UNWANTED])
    if np.ptp(buffers.slots[:num_tokens]) or (np.diff(buffers.positions[:num_tokens]) != 1).any():
        raise ValueError("prefill takes consecutive positions of one sequence")

    rows = _Rows(matmul, arrays)
    vectors = arrays.vectors
    matmul.begin_layer()

    def norm(x: np.ndarray) -> np.ndarray:
        return rows.norm(layer, x, vectors.norm_weight[layer], vectors.norm_bias[layer])

    def heads_of(x: np.ndarray) -> np.ndarray:
        num_rows = sum(map(len, arrays.qkv.parts(layer)))
        qkv = matmul.scratch((num_tokens, num_rows))
        matmul.layer_linear(x, arrays.qkv, layer, vectors.qkv_bias[layer], qkv)
        return _attend(matmul, buffers, layer, qkv, arrays, num_unwanted)

    def add_attention(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        out = matmul.scratch((len(heads), len(arrays.out[layer])))
        matmul.linear(heads, arrays.out[layer], vectors.out_bias[layer], out)
        out = rows.norm(layer, out, vectors.attention_norm_weight[layer], _NO_BIAS)
        return rows.add(layer, residual, out)

    numbers = arrays.numbers[layer]
    with matmul.at_once():
        layer_input = rows.layer_input(layer, buffers.hidden[:num_tokens])
        normed = norm(layer_input) if numbers.norms_input else layer_input
        heads = heads_of(normed)
        if not len(heads):
            return
        layer_input, normed = layer_input[num_unwanted:], normed[num_unwanted:]
        mixed, ffn_input = mixed_and_ffn_input(
            numbers,
            layer_input,
            norm=lambda x: normed if x is layer_input else norm(x),
            ffn_norm=lambda x: rows.ffn_norm(layer, x),
            add_attention=add_attention,
        )

        def answer(first: int, last: int) -> None:
            buffers.mixed[num_unwanted:][first:last] = mixed[first:last]
            buffers.ffn_input[num_unwanted:][first:last] = ffn_input[first:last]

        matmul.then_rows(num_tokens - num_unwanted, answer)
        if numbers.num_experts:
            weights = buffers.block_weights[num_unwanted:num_tokens]
            _route(matmul, layer, arrays, layer_input, ffn_input, weights)


def _route(
    matmul: Matmul,
    layer: int,
    arrays: AttentionArrays,
    layer_input: np.ndarray,
    ffn_input: np.ndarray,
    weights: np.ndarray,
) -> None:
    """Write the weights of blocks (T, B) of a layer with experts."""
    numbers = arrays.numbers[layer]
    x = layer_input if numbers.routes_layer_input else ffn_input
    logits = matmul.scratch((len(x), int(numbers.num_experts)))

    def route(first: int, last: int) -> None:
        own = slice(first, last)
        route_tokens(
            numbers,
            arrays.routers,
            layer,
            x[own],
            ffn_input[own],
            logits[own],
            weights[own],
        )

    matmul.then_rows(len(x), route)


def prompt_head(
    matmul: Matmul,
    service: int,
    buffers: SharedBuffers,
    arrays: AttentionArrays,
) -> None:
    """Answer a HEAD request for many tokens."""
    begin = int(buffers.requests[service, FIRST_LOGIT])
    end = int(buffers.requests[service, NUM_TOKENS])
    num_layers = len(arrays.numbers)
    logits, cap = buffers.logits[: end - begin], arrays.logit_softcap
    rows = _Rows(matmul, arrays)
    matmul.begin_layer()
    with matmul.at_once():
        x = rows.layer_input(num_layers, buffers.hidden[begin:end])
        x = rows.norm(num_layers - 1, x, arrays.final_norm_weight, arrays.final_norm_bias)
        if arrays.project_out.shape[0]:
            x = matmul.linear(x, arrays.project_out, _NO_BIAS)
        matmul.linear(x, arrays.head, _NO_BIAS, logits)

        def softcap(thread: int) -> None:
            first, last = split_range(logits.shape[1], thread, matmul.num_threads, 16)
            for row in logits:
                softcap_kernel(row[first:last], cap)

        if cap > 0:
            matmul.then(softcap)
