"""The loop of an attention service's thread on the CPU: its share of attention and head.

The order of norms, attention and residual is `model/config/layer_order.py`'s; what differs between
layers and families is read from their records and vectors (`numba_kernels/layer_record.py`).
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import BlockRows
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.norm import norm_kernel
from hotcold.numba_kernels.decode.router import choose_experts, router_rows, weigh_shared
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import (
    ActivationSpace,
    copy_numbers,
    quantize_activations,
)
from hotcold.numba_kernels.ir.activation_ir import softcap_row
from hotcold.numba_kernels.latent_arrays import LatentArrays
from hotcold.numba_kernels.layer_pages import LayerPages
from hotcold.numba_kernels.layer_record import LayerVectors
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, now_ns, ring
from hotcold.numba_kernels.loops.latent_attention import (
    LatentSpace,
    absorb_queries,
    first_products,
    mix_heads,
    mixed_heads,
    norm_inputs,
)
from hotcold.numba_kernels.loops.layer_embeddings import layer_part, scaled_output
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    NUM_TOKENS,
    OPERATION,
    PING,
    RECURRENT,
    REQUEST,
    ROUTED,
    TARGET,
    WEIGHTS,
    barrier_wait,
    cell,
    finish_request,
    is_for_others,
    next_share,
)
from hotcold.numba_kernels.loops.recurrent_layer import recurrent_heads, share_gates
from hotcold.numba_kernels.loops.softmax_attention import attention_heads, heads_of
from hotcold.numba_kernels.loops.work_stealing import (
    work_stealing_layer,
    work_stealing_rows,
)
from hotcold.numba_kernels.per_layer_arrays import PerLayerArrays
from hotcold.numba_kernels.recurrent_arrays import RecurrentVectors
from hotcold.numba_kernels.router_arrays import RouterArrays

_HEADS, _OUT, _PROJECT, _HEAD, _ROUTER, _NEXT_ROUTER, _QUERIES, _ABSORB, _MIX, _GATES = range(10)
_PART, _QKV = 10, 13  # of parts there are three, of the last as many as `qkv` has blocks
NUM_COUNTERS = _QKV


class AttentionArrays(NamedTuple):
    """Attention of all layers, or what they have instead, and the head; shapes: model.weights.

    numbers (L,) of LAYER_NUMBERS; rope_tables (R, P, 2 W + 1) for positions 0..P-1: cosines, sines
    of the W pairs that turn at most, and a factor of what is not rotated, R may be 0;
    logit_softcap: 0 for none; recurrent_numbers (L,) of RECURRENT_NUMBERS; recurrent_pages
    (recurrent layers, pages, numbers) as `numba_kernels.recurrent_arrays` says.
    Compiled code has no routers where there are no experts, no `latent` where attention is not, no
    recurrent where all layers have attention, no per_layer where layers have no embeddings of their
    own, and no project_out where the head reads the hidden states: that is less to compile.
    """

    numbers: np.ndarray
    vectors: LayerVectors
    qkv: BlockRows
    out: BlockRows
    routers: RouterArrays
    latent: LatentArrays
    per_layer: PerLayerArrays
    recurrent: RecurrentVectors
    recurrent_numbers: np.ndarray
    recurrent_pages: np.ndarray
    final_norm_weight: np.ndarray
    final_norm_bias: np.ndarray
    project_out: np.ndarray
    head: np.ndarray
    keys: LayerPages
    values: LayerPages
    rope_tables: np.ndarray
    logit_softcap: np.float32


class AttentionScratch(NamedTuple):
    """Work space: residual, normed (threads, T, d), qkv (T, rows), heads (T * heads_size,),
    projected (T, E), router_logits (T, experts) float32; of layers' own embeddings gates,
    contexts (T, P), mixed (threads, T, P), parts (T, d), or (T, 0) where there are none;
    inputs: for `quantize_activations`; counters of blocks taken (NUM_COUNTERS + blocks of qkv,
    threads * 16). A thread's part of attention: scores (threads, R, SEGMENT_POSITIONS), sums
    (threads, R, head_dim), totals (threads, R, 2). Parts of tokens with S segments, at most:
    part_sums (T, S, H * head_dim), part_totals (T, S, H, 2). latent: of latent attention, else
    None. Of recurrent layers: state_gates (T, 2 Hv); recurrent, of `recur`, a row a thread.
    """

    residual: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    heads: np.ndarray
    scores: np.ndarray
    sums: np.ndarray
    totals: np.ndarray
    part_sums: np.ndarray
    part_totals: np.ndarray
    projected: np.ndarray
    router_logits: np.ndarray
    gates: np.ndarray
    contexts: np.ndarray
    mixed: np.ndarray
    parts: np.ndarray
    inputs: ActivationSpace
    state_gates: np.ndarray
    recurrent: np.ndarray
    counters: np.ndarray
    latent: LatentSpace | None


@njit(nogil=True, cache=True)
def layer_input(hidden, layer, arrays, parts, residual):
    """The layer's input: `hidden`, and what is left of the previous layer: a norm, or a scale.

    parts (T, d): of `layer_part`, which is added before the scale, or (T, 0)
    """
    before, vectors = arrays.numbers[max(layer - 1, 0)], arrays.vectors
    for t in range(hidden.shape[0]):
        if before.norms_output and layer > 0:
            norm_kernel(
                before.norm_kind, hidden[t], vectors.ffn_norm_weight[layer - 1],
                vectors.ffn_norm_bias[layer - 1], before.norm_eps, residual[t],
            )  # fmt: skip
        elif before.scales_output and layer > 0:
            scaled_output(
                hidden[t], parts[t], vectors.per_layer_norm_weight[layer - 1], before.norm_eps,
                vectors.output_scale[layer - 1, 0], residual[t],
            )  # fmt: skip
        else:
            copy_numbers(hidden[t], residual[t])


@njit(nogil=True, cache=True)
def layer_norm_before(residual, layer, arrays, normed):
    """The input of attention, of residual (T, d): normed where the layer does so."""
    numbers, vectors = arrays.numbers[layer], arrays.vectors
    for t in range(residual.shape[0]):
        if numbers.norms_input:
            norm_kernel(
                numbers.norm_kind, residual[t], vectors.norm_weight[layer],
                vectors.norm_bias[layer], numbers.norm_eps, normed[t],
            )  # fmt: skip
        else:
            copy_numbers(residual[t], normed[t])


@njit(nogil=True, cache=True)
def write_ffn_input(t, layer, buffers, arrays, residual, normed):
    """Token t's `ffn_input`; its `ffn_residual`, to which attention's output may still be added."""
    numbers, vectors = arrays.numbers[layer], arrays.vectors
    kind, epsilon = numbers.norm_kind, numbers.norm_eps
    weight, bias = vectors.ffn_norm_weight[layer], vectors.ffn_norm_bias[layer]
    x = buffers.ffn_input[t]
    if numbers.adds_late:
        weights = vectors.attention_norm_weight[layer]
        norm_kernel(kind, buffers.ffn_residual[t], weights, weights[:0], epsilon, x)
        for i in range(x.shape[0]):
            buffers.ffn_residual[t, i] = residual[t, i] + numbers.residual_scale * x[i]
    if numbers.norms_sum:
        norm_kernel(
            kind,
            buffers.ffn_residual[t],
            vectors.norm_weight[layer],
            vectors.norm_bias[layer],
            epsilon,
            x,
        )
        copy_numbers(x, buffers.ffn_residual[t])
    if numbers.norms_ffn_input and numbers.is_parallel:
        norm_kernel(kind, residual[t], weight, bias, epsilon, x)
    elif numbers.norms_ffn_input:
        norm_kernel(kind, buffers.ffn_residual[t], weight, bias, epsilon, x)
    elif numbers.is_parallel:
        copy_numbers(normed[t], x)
    else:
        copy_numbers(buffers.ffn_residual[t], x)


@njit(nogil=True, cache=True)
def _score_experts(counters, thread, num_threads, layer, routers, x, scratch):
    """This thread's share of the router's logits of x (T, d): some of the experts.

    In a model without experts `routers` is None, here and below: nothing is compiled then.
    """
    if routers is None:
        return
    rows, bias = router_rows(routers, layer)
    work_stealing_rows(
        counters, thread, num_threads, rows, bias, x, x[:0],
        scratch.router_logits[: x.shape[0]], 0,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _choose_experts(first, step, layer, numbers, routers, logits, num_tokens, weights):
    """Write the experts' weights (T, B) of every step-th token from `first` on.

    `numbers` of the layer; logits (T, experts)
    """
    if routers is None:
        return
    for t in range(first, num_tokens, step):
        choose_experts(numbers, routers, layer, logits[t, : numbers.num_experts], weights[t])


@njit(nogil=True, cache=True)
def _weigh_shared(numbers, routers, layer, ffn_input, t, weights):
    """`weigh_shared` of a mixture."""
    if routers is None:
        return
    weigh_shared(numbers, routers, layer, ffn_input, t, weights)


@njit(nogil=True, cache=True)
def _guess_next(
    thread, num_threads, service, layer, buffers, all_numbers, routers, scratch, num_tokens
):  # fmt: skip
    """Write `guessed_weights`, if somebody reads them: the next layer's router on this one's state.

    That is a guess, as hidden states change little from one layer to the next; of a layer that ends
    a pair it is what its router says.
    """
    if routers is None:
        return
    if buffers.requests[service, WEIGHTS] != TARGET:  # a draft's experts are in memory
        return
    guessed, following = buffers.guessed_weights, layer + 1
    if num_tokens > guessed.shape[0] or following == all_numbers.shape[0]:
        return
    numbers = all_numbers[following]
    if numbers.num_experts == 0:
        return
    barrier_wait(buffers.cells, service, num_threads)
    x = (buffers.ffn_residual if numbers.routes_layer_input else buffers.ffn_input)[:num_tokens]
    if numbers.ends_pair:
        x = scratch.normed[thread, :num_tokens]
        normed_residual(buffers.ffn_residual, following, numbers, routers, x)
    counters = scratch.counters[_NEXT_ROUTER]
    _score_experts(counters, thread, num_threads, following, routers, x, scratch)
    barrier_wait(buffers.cells, service, num_threads)
    _choose_experts(
        thread, num_threads, following, numbers, routers, scratch.router_logits, num_tokens, guessed
    )


@njit(nogil=True, cache=True)
def _widen_queries(
    latent, thread, num_threads, service, layer, buffers, arrays, scratch, qkv
):  # fmt: skip
    """Queries and key of latent attention to qkv (T, (H + 1) * head_dim), from its inputs."""
    if latent is None:
        return
    numbers, space, counters = arrays.numbers[layer], scratch.latent, scratch.counters
    norm_inputs(latent, thread, num_threads, layer, arrays, space, qkv)
    barrier_wait(buffers.cells, service, num_threads)
    queries = space.queries[: qkv.shape[0]]
    if numbers.query_rank:
        x, no_bias = space.low_queries[: qkv.shape[0]], arrays.final_norm_weight[:0]
        work_stealing_layer(
            counters[_QUERIES : _QUERIES + 1], thread, num_threads, latent.queries, layer, no_bias,
            x, scratch.inputs, x[:0], queries,
        )  # fmt: skip
        barrier_wait(buffers.cells, service, num_threads)
    absorb_queries(latent, counters[_ABSORB], thread, layer, numbers, space, queries, qkv)
    barrier_wait(buffers.cells, service, num_threads)


@njit(nogil=True, cache=True)
def _mix(thread, num_threads, service, layer, buffers, arrays, scratch, qkv):
    """The rows that the output projection takes, of qkv (T, rows): this thread's share of them.

    Tokens are mixed by softmax attention, latent attention around it, or a recurrent layer.
    """
    numbers, num_tokens, counters = arrays.numbers[layer], qkv.shape[0], scratch.counters
    latent, space = arrays.latent, scratch.latent
    heads = heads_of(numbers, scratch.heads, num_tokens)
    if numbers.page_group == RECURRENT:
        recurrent_heads(
            thread, num_threads, service, layer, buffers, arrays, arrays.recurrent, qkv,
            scratch.state_gates[:num_tokens], 0, scratch.recurrent[thread], heads,
        )  # fmt: skip
    else:
        _widen_queries(latent, thread, num_threads, service, layer, buffers, arrays, scratch, qkv)
        attention_heads(
            counters[_HEADS], thread, num_threads, service, layer, buffers, arrays, scratch, qkv
        )
    barrier_wait(buffers.cells, service, num_threads)
    if latent is not None:
        mix_heads(latent, counters[_MIX], thread, layer, numbers, space, heads)
        barrier_wait(buffers.cells, service, num_threads)
    return mixed_heads(latent, space, heads)


@njit(nogil=True, cache=True)
def second_ffn_input(first, step, num_tokens, layer, buffers, arrays):
    """`ffn_input` of a layer that ends a pair, of every step-th token from `first` on."""
    numbers, weight = arrays.numbers[layer], arrays.vectors.ffn_norm_weight[layer]
    for t in range(first, num_tokens, step):
        norm_kernel(
            numbers.norm_kind, buffers.ffn_residual[t], weight, weight[:0], numbers.norm_eps,
            buffers.ffn_input[t],
        )  # fmt: skip


@njit(nogil=True, cache=True)
def normed_residual(ffn_residual, layer, numbers, routers, normed):
    """normed (T, d) = what a router reads that has the residual, of ffn_residual (T, d)."""
    if routers is None:
        return
    weight = routers.input_scale[layer]
    for t in range(normed.shape[0]):
        norm_kernel(
            numbers.norm_kind, ffn_residual[t], weight, weight[:0], numbers.norm_eps, normed[t]
        )


@njit(nogil=True, cache=True)
def _second_ffn_request(thread, num_threads, service, layer, buffers, arrays, scratch, normed):
    """This thread's share of the ATTENTION request of a layer that ends a pair, of normed (T, d).

    There is no attention: ffn_residual is that of the layer before.
    """
    num_tokens, numbers, routers = normed.shape[0], arrays.numbers[layer], arrays.routers
    second_ffn_input(thread, num_threads, num_tokens, layer, buffers, arrays)
    normed_residual(buffers.ffn_residual, layer, numbers, routers, normed)
    counters = scratch.counters[_ROUTER]
    _score_experts(counters, thread, num_threads, layer, routers, normed, scratch)
    barrier_wait(buffers.cells, service, num_threads)
    _choose_experts(
        thread, num_threads, layer, numbers, routers, scratch.router_logits, num_tokens,
        buffers.block_weights,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def attention_request(thread, num_threads, service, buffers, arrays, scratch):
    """This thread's share of the ATTENTION request in the mailbox; no checks."""
    layer = buffers.requests[service, LAYER]
    num_tokens = buffers.requests[service, NUM_TOKENS]
    residual, normed = scratch.residual[thread, :num_tokens], scratch.normed[thread, :num_tokens]
    qkv, ffn_residual = scratch.qkv[:num_tokens], buffers.ffn_residual[:num_tokens]
    if arrays.numbers[layer].ends_pair:
        _second_ffn_request(
            thread, num_threads, service, layer, buffers, arrays, scratch, normed
        )  # fmt: skip
        return
    if layer > 0:
        layer_part(
            thread, num_threads, service, layer - 1, 0, num_tokens, buffers, arrays.per_layer,
            arrays.numbers[layer - 1].norm_eps, scratch, scratch.counters[_PART:],
        )  # fmt: skip
    layer_input(buffers.hidden[:num_tokens], layer, arrays, scratch.parts[:num_tokens], residual)
    layer_norm_before(residual, layer, arrays, normed)
    numbers, routers = arrays.numbers[layer], arrays.routers
    routes_early = numbers.num_experts > 0 and numbers.routes_layer_input
    if routes_early:
        _score_experts(
            scratch.counters[_ROUTER], thread, num_threads, layer, routers, residual, scratch
        )
    work_stealing_layer(
        scratch.counters[_QKV:], thread, num_threads, arrays.qkv, layer,
        arrays.vectors.qkv_bias[layer], normed, scratch.inputs, residual[:0],
        first_products(arrays.latent, scratch.latent, qkv, num_tokens),
    )  # fmt: skip
    if numbers.page_group == RECURRENT:
        share_gates(
            scratch.counters[_GATES], thread, num_threads, layer, arrays, arrays.recurrent, normed,
            scratch,
        )  # fmt: skip
    barrier_wait(buffers.cells, service, num_threads)
    if routes_early and thread == num_threads - 1:
        _choose_experts(
            0, 1, layer, numbers, routers, scratch.router_logits, num_tokens, buffers.block_weights
        )
        if buffers.requests[service, WEIGHTS] == TARGET:
            number = buffers.cells[cell(service, REQUEST) * INTS_A_CELL]
            ring(buffers.cells, cell(service, ROUTED), number)
    heads = _mix(thread, num_threads, service, layer, buffers, arrays, scratch, qkv)
    work_stealing_layer(
        scratch.counters[_OUT : _OUT + 1], thread, num_threads, arrays.out, layer,
        arrays.vectors.out_bias[layer], heads, scratch.inputs,
        residual[:0] if numbers.adds_late else residual, ffn_residual,
    )  # fmt: skip
    barrier_wait(buffers.cells, service, num_threads)
    for t in range(thread, num_tokens, num_threads):
        write_ffn_input(t, layer, buffers, arrays, residual, normed)
        if numbers.num_experts > 0:
            _weigh_shared(numbers, routers, layer, buffers.ffn_input, t, buffers.block_weights[t])
    if numbers.num_experts > 0 and not routes_early:
        barrier_wait(buffers.cells, service, num_threads)
        x = buffers.ffn_input[:num_tokens]
        _score_experts(scratch.counters[_ROUTER], thread, num_threads, layer, routers, x, scratch)
        barrier_wait(buffers.cells, service, num_threads)
        _choose_experts(
            thread, num_threads, layer, numbers, routers, scratch.router_logits, num_tokens,
            buffers.block_weights,
        )  # fmt: skip
    _guess_next(
        thread, num_threads, service, layer, buffers, arrays.numbers, routers, scratch, num_tokens
    )


@njit(nogil=True, cache=True)
def final_norm(hidden, arrays, parts, residual, normed):
    """normed (T, d) = what the head is computed of, of hidden; residual (T, d): work space.

    parts: as of `layer_input`
    """
    num_layers = arrays.numbers.shape[0]
    last = arrays.numbers[num_layers - 1]
    layer_input(hidden, num_layers, arrays, parts, residual)
    for t in range(hidden.shape[0]):
        norm_kernel(
            last.norm_kind, residual[t], arrays.final_norm_weight, arrays.final_norm_bias,
            last.norm_eps, normed[t],
        )  # fmt: skip


@njit(nogil=True, cache=True)
def cap_logits(thread, num_threads, service, buffers, arrays, logits):
    """Soft-cap logits (T, V), once all threads have written theirs, where the model does so."""
    if arrays.logit_softcap > 0:
        barrier_wait(buffers.cells, service, num_threads)
        first, end = split_range(arrays.head.shape[0], thread, num_threads, 16)
        for t in range(logits.shape[0]):
            softcap_row(logits[:, first:end], t, arrays.logit_softcap)


@njit(nogil=True, cache=True)
def _projected(thread, num_threads, service, buffers, project_out, no_bias, normed, scratch):
    """What the head is multiplied with: `normed` (T, d), or project_out . normed; None: no such."""
    if project_out is None:
        return normed
    vectors = scratch.projected[: normed.shape[0]]
    work_stealing_rows(
        scratch.counters[_PROJECT], thread, num_threads, project_out, no_bias, normed, normed[:0],
        vectors, 0,
    )  # fmt: skip
    barrier_wait(buffers.cells, service, num_threads)
    return vectors


@njit(nogil=True, cache=True)
def head_request(thread, num_threads, service, buffers, arrays, scratch):
    """logits[t - FIRST_LOGIT] = head . norm(hidden[t]), tokens from FIRST_LOGIT on; no checks."""
    begin, end = buffers.requests[service, FIRST_LOGIT], buffers.requests[service, NUM_TOKENS]
    count = end - begin
    residual, normed = scratch.residual[thread, :count], scratch.normed[thread, :count]
    last = arrays.numbers.shape[0] - 1
    layer_part(
        thread, num_threads, service, last, begin, end, buffers, arrays.per_layer,
        arrays.numbers[last].norm_eps, scratch, scratch.counters[_PART:],
    )  # fmt: skip
    final_norm(buffers.hidden[begin:end], arrays, scratch.parts[:count], residual, normed)
    no_bias = arrays.final_norm_weight[:0]
    vectors = _projected(
        thread, num_threads, service, buffers, arrays.project_out, no_bias, normed, scratch
    )
    x, logits = quantize_activations(arrays.head, vectors, scratch.inputs, thread), buffers.logits
    work_stealing_rows(
        scratch.counters[_HEAD], thread, num_threads, arrays.head, no_bias, x, normed[:0],
        logits[:count], 0,
    )  # fmt: skip
    cap_logits(thread, num_threads, service, buffers, arrays, logits[:count])


@njit(nogil=True, cache=True)
def serve_attention(thread, num_threads, service, seen, weights, buffers, arrays, scratch):
    """Serve requests after `seen` until one is left to Python; returns its number.

    Left to Python are STOP, more tokens than `scratch` holds, and requests for other `weights`
    (`is_for_others`). All threads that share it return; the caller lets one of them reply. 0: the
    service has ended (`next_share`).
    """
    max_tokens = scratch.normed.shape[1]
    while True:
        number, team = next_share(buffers.cells, service, thread, num_threads, seen)
        started = now_ns()
        if number == 0:
            return number
        request = buffers.requests[service]
        operation, num_tokens = request[OPERATION], request[NUM_TOKENS]
        if is_for_others(request, weights):
            return number
        if operation == ATTENTION and num_tokens <= max_tokens:
            attention_request(thread, team, service, buffers, arrays, scratch)
        elif operation == HEAD and num_tokens - request[FIRST_LOGIT] <= max_tokens:
            head_request(thread, team, service, buffers, arrays, scratch)
        elif operation != PING:
            return number
        finish_request(
            buffers.cells, buffers.requests, buffers.replies, scratch.counters, service, number,
            team, started,
        )  # fmt: skip
        seen = number
