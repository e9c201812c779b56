"""The loop of an attention service's thread on the CPU: its share of attention and head.

The order of norms, attention and residual is a `LayerOrder` (`model/config/layer_order.py`).
"""

from typing import Any, NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.attention import (
    attend_kernel,
    rope_kernel,
    softcap_kernel,
    store_kernel,
)
from hotcold.numba_kernels.decode.norm import norm_kernel, rms_norm_kernel
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, quantize_activations
from hotcold.numba_kernels.layer_rows import LayerRows
from hotcold.numba_kernels.serve.doorbell import now_ns
from hotcold.numba_kernels.serve.mailbox import (
    ATTENTION,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    NUM_TOKENS,
    OPERATION,
    PING,
    barrier_wait,
    finish_request,
    next_request,
)
from hotcold.numba_kernels.serve.work_stealing import (
    next_block,
    work_stealing_layer,
    work_stealing_rows,
)

_QKV, _QKV_SECOND, _HEADS, _OUT, _PROJECT, _HEAD = range(6)
NUM_COUNTERS = 6


class AttentionArrays(NamedTuple):
    """Attention of all layers stacked, and the head; shapes as in model.weights.

    keys, values (L, pages, kv_heads, PAGE_POSITIONS, head_dim); rope_tables (R, P, 2, half) for
    positions 0..P-1, R may be 0; layer_ropes (L,) int32: each layer's rope table, or -1; windows
    (L,) int32: how many positions a token attends to, its own included, or 0 for all
    """

    norm_weight: np.ndarray
    norm_bias: np.ndarray
    attention_norm_weight: np.ndarray
    q_norm_weight: np.ndarray
    k_norm_weight: np.ndarray
    qkv: LayerRows
    qkv_bias: np.ndarray
    out: np.ndarray
    out_bias: np.ndarray
    ffn_norm_weight: np.ndarray
    ffn_norm_bias: np.ndarray
    final_norm_weight: np.ndarray
    final_norm_bias: np.ndarray
    project_out: np.ndarray
    head: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    rope_tables: np.ndarray
    layer_ropes: np.ndarray
    windows: np.ndarray


class AttentionShape(NamedTuple):
    """The model's dimensions and scalars; `order` is a `LayerOrder` of the model package.

    scale: of attention scores; residual_scale: of attention's output; softcap, logit_softcap: 0 for
    none
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_kind: int
    norm_epsilon: np.float32
    order: Any
    scale: np.float32
    softcap: np.float32
    residual_scale: np.float32
    logit_softcap: np.float32


class AttentionScratch(NamedTuple):
    """Work space: residual, normed (threads, T, d), qkv (T, rows), heads (T, H * head_dim),
    scores (threads, P), projected (T, E) float32; inputs: quantized activations; counters of blocks
    taken (NUM_COUNTERS, threads * 16)."""

    residual: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    heads: np.ndarray
    scores: np.ndarray
    projected: np.ndarray
    inputs: QuantizedVectors
    counters: np.ndarray


@njit(nogil=True, cache=True)
def _layer_input(hidden, layer, shape, arrays, residual):
    """The layer's input: `hidden`, normed where the previous layer's output norm is still due."""
    for t in range(hidden.shape[0]):
        if shape.order.norms_output and layer > 0:
            norm_kernel(
                shape.norm_kind, hidden[t], arrays.ffn_norm_weight[layer - 1],
                arrays.ffn_norm_bias[layer - 1], shape.norm_epsilon, residual[t],
            )  # fmt: skip
        else:
            residual[t] = hidden[t]


@njit(nogil=True, cache=True)
def _layer_norm_before(residual, layer, shape, arrays, normed):
    for t in range(residual.shape[0]):
        if shape.order.norms_input:
            norm_kernel(
                shape.norm_kind, residual[t], arrays.norm_weight[layer], arrays.norm_bias[layer],
                shape.norm_epsilon, normed[t],
            )  # fmt: skip
        else:
            normed[t] = residual[t]


@njit(nogil=True, cache=True)
def norm_whole(part, num_parts, layer, shape, arrays, qkv):
    """Norm a token's query heads as one vector, and its key heads, where norms are that wide.

    Of every num_parts-th token. Returns whether there are such norms; checks nothing.
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms_queries = arrays.q_norm_weight.shape[1] > shape.head_dim
    norms_keys = arrays.k_norm_weight.shape[1] > shape.head_dim
    for t in range(part, qkv.shape[0], num_parts):
        if norms_queries:
            vector = qkv[t, :queries]
            rms_norm_kernel(vector, arrays.q_norm_weight[layer], shape.norm_epsilon, vector)
        if norms_keys:
            vector = qkv[t, queries : queries + keys]
            rms_norm_kernel(vector, arrays.k_norm_weight[layer], shape.norm_epsilon, vector)
    return norms_queries or norms_keys


@njit(nogil=True, cache=True)
def rotate_and_store(part, num_parts, layer, buffers, shape, arrays, qkv):
    """Norm and rotate query and key heads, write keys and values to the cache.

    Of every num_parts-th head; norms wider than a head are left to `norm_whole`.
    """
    dim, rope = shape.head_dim, arrays.layer_ropes[layer]
    norms_queries = arrays.q_norm_weight.shape[1] == dim
    norms_keys = arrays.k_norm_weight.shape[1] == dim
    first_value = shape.num_heads + shape.num_kv_heads
    for t in range(qkv.shape[0]):
        position = buffers.positions[t]
        size = arrays.keys.shape[3]
        page, row = buffers.page_tables[buffers.slots[t], position // size], position % size
        for head in range(part, first_value + shape.num_kv_heads, num_parts):
            vector = qkv[t, head * dim : (head + 1) * dim]
            if norms_queries and head < shape.num_heads:
                rms_norm_kernel(vector, arrays.q_norm_weight[layer], shape.norm_epsilon, vector)
            elif norms_keys and shape.num_heads <= head < first_value:
                rms_norm_kernel(vector, arrays.k_norm_weight[layer], shape.norm_epsilon, vector)
            if rope >= 0 and head < first_value:
                rope_kernel(vector, arrays.rope_tables[rope, position])
            if head >= first_value:
                store_kernel(arrays.values[layer, page, head - first_value], row, vector)
            elif head >= shape.num_heads:
                store_kernel(arrays.keys[layer, page, head - shape.num_heads], row, vector)


@njit(nogil=True, cache=True)
def _attend(thread, layer, buffers, shape, arrays, scratch, num_tokens):
    """Attention of the (token, head) pairs that this thread takes."""
    dim = shape.head_dim
    heads_a_group = shape.num_heads // shape.num_kv_heads
    window, counters = arrays.windows[layer], scratch.counters[_HEADS]
    taken = next_block(counters, 0)
    while taken < num_tokens * shape.num_heads:
        t, head = taken // shape.num_heads, taken % shape.num_heads
        length, pages = buffers.positions[t] + 1, buffers.page_tables[buffers.slots[t]]
        attend_kernel(
            scratch.qkv[t, head * dim : (head + 1) * dim], arrays.keys[layer],
            arrays.values[layer], head // heads_a_group, pages,
            max(0, length - window) if window else 0, length, shape.scale, shape.softcap,
            scratch.scores[thread], scratch.heads[t, head * dim : (head + 1) * dim],
        )  # fmt: skip
        taken = next_block(counters, 0)


@njit(nogil=True, cache=True)
def adds_late(shape):
    """Whether attention's output is normed or scaled before it is added to the residual."""
    return shape.order.norms_added or shape.residual_scale != 1


@njit(nogil=True, cache=True)
def _ffn_input(t, layer, buffers, shape, arrays, residual, normed):
    kind, epsilon, order = shape.norm_kind, shape.norm_epsilon, shape.order
    weight, bias = arrays.ffn_norm_weight[layer], arrays.ffn_norm_bias[layer]
    x = buffers.ffn_input[t]
    if adds_late(shape):
        weights = arrays.attention_norm_weight[layer]
        norm_kernel(kind, buffers.mixed[t], weights, weights[:0], epsilon, x)
        for i in range(x.shape[0]):
            buffers.mixed[t, i] = residual[t, i] + shape.residual_scale * x[i]
    if order.norms_sum:
        norm_kernel(
            kind, buffers.mixed[t], arrays.norm_weight[layer], arrays.norm_bias[layer], epsilon, x
        )
        buffers.mixed[t] = x
    if order.norms_ffn_input and order.is_parallel:
        norm_kernel(kind, residual[t], weight, bias, epsilon, x)
    elif order.norms_ffn_input:
        norm_kernel(kind, buffers.mixed[t], weight, bias, epsilon, x)
    elif order.is_parallel:
        x[:] = normed[t]
    else:
        x[:] = buffers.mixed[t]


@njit(nogil=True, cache=True)
def attention_request(thread, num_threads, service, buffers, shape, arrays, scratch):
    """This thread's share of the ATTENTION request in the mailbox; no checks."""
    layer = buffers.requests[service, LAYER]
    num_tokens = buffers.requests[service, NUM_TOKENS]
    residual, normed = scratch.residual[thread, :num_tokens], scratch.normed[thread, :num_tokens]
    qkv, mixed = scratch.qkv[:num_tokens], buffers.mixed[:num_tokens]
    _layer_input(buffers.hidden[:num_tokens], layer, shape, arrays, residual)
    _layer_norm_before(residual, layer, shape, arrays, normed)
    work_stealing_layer(
        scratch.counters[_QKV : _QKV_SECOND + 1], thread, num_threads, arrays.qkv, layer,
        arrays.qkv_bias[layer], normed, scratch.inputs, residual[:0], qkv,
    )  # fmt: skip
    barrier_wait(buffers.cells, service, num_threads)
    if norm_whole(thread, num_threads, layer, shape, arrays, qkv):
        barrier_wait(buffers.cells, service, num_threads)
    rotate_and_store(thread, num_threads, layer, buffers, shape, arrays, qkv)
    barrier_wait(buffers.cells, service, num_threads)
    _attend(thread, layer, buffers, shape, arrays, scratch, num_tokens)
    barrier_wait(buffers.cells, service, num_threads)
    weights = arrays.out[layer]
    heads = quantize_activations(weights, scratch.heads[:num_tokens], scratch.inputs, thread)
    added = residual[:0] if adds_late(shape) else residual
    work_stealing_rows(
        scratch.counters[_OUT], thread, num_threads, weights, arrays.out_bias[layer], heads,
        added, mixed, 0,
    )  # fmt: skip
    barrier_wait(buffers.cells, service, num_threads)
    for t in range(thread, num_tokens, num_threads):
        _ffn_input(t, layer, buffers, shape, arrays, residual, normed)


@njit(nogil=True, cache=True)
def head_request(thread, num_threads, service, buffers, shape, arrays, scratch):
    """logits[t - FIRST_LOGIT] = head . norm(hidden[t]), tokens from FIRST_LOGIT on; no checks."""
    begin, end = buffers.requests[service, FIRST_LOGIT], buffers.requests[service, NUM_TOKENS]
    count = end - begin
    residual, normed = scratch.residual[thread, :count], scratch.normed[thread, :count]
    num_layers = arrays.norm_weight.shape[0]
    _layer_input(buffers.hidden[begin:end], num_layers, shape, arrays, residual)
    for t in range(count):
        norm_kernel(
            shape.norm_kind, residual[t], arrays.final_norm_weight, arrays.final_norm_bias,
            shape.norm_epsilon, normed[t],
        )  # fmt: skip
    no_bias = arrays.final_norm_weight[:0]
    vectors = normed
    if arrays.project_out.shape[0]:
        vectors = scratch.projected[:count]
        work_stealing_rows(
            scratch.counters[_PROJECT], thread, num_threads, arrays.project_out, no_bias, normed,
            normed[:0], vectors, 0,
        )  # fmt: skip
        barrier_wait(buffers.cells, service, num_threads)
    x = quantize_activations(arrays.head, vectors, scratch.inputs, thread)
    work_stealing_rows(
        scratch.counters[_HEAD], thread, num_threads, arrays.head, no_bias, x, normed[:0],
        buffers.logits[:count], 0,
    )  # fmt: skip
    if shape.logit_softcap > 0:
        barrier_wait(buffers.cells, service, num_threads)
        first, last = split_range(arrays.head.shape[0], thread, num_threads, 16)
        for t in range(count):
            softcap_kernel(buffers.logits[t, first:last], shape.logit_softcap)


@njit(nogil=True, cache=True)
def serve_attention(thread, num_threads, service, seen, buffers, shape, arrays, scratch):
    """Serve requests after `seen` until one is left to Python; returns its number.

    Left to Python are STOP, and more tokens than `scratch` holds. All threads return for it; the
    caller lets one of them reply.
    """
    max_tokens = scratch.normed.shape[1]
    while True:
        number = next_request(buffers.cells, service, seen)
        started = now_ns()
        request = buffers.requests[service]
        operation, num_tokens = request[OPERATION], request[NUM_TOKENS]
        if operation == ATTENTION and num_tokens <= max_tokens:
            attention_request(thread, num_threads, service, buffers, shape, arrays, scratch)
        elif operation == HEAD and num_tokens - request[FIRST_LOGIT] <= max_tokens:
            head_request(thread, num_threads, service, buffers, shape, arrays, scratch)
        elif operation != PING:
            return number
        finish_request(
            buffers.cells, buffers.replies, scratch.counters, service, number, num_threads, started
        )
        seen = number
