"""The loop of an attention service's thread on the CPU: its share of attention and head.

The order of norms, attention and residual is `model/config/layer_order.py`'s; what differs between
layers and families is read from their records and vectors (`numba_kernels/layer_record.py`).
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.attention import (
    SEGMENT_POSITIONS,
    attend_segment,
    first_seen,
    merge_segments,
    num_segments,
    rope_kernel,
    sink_share,
    softcap_kernel,
    store_kernel,
)
from hotcold.numba_kernels.decode.norm import norm_kernel, rms_norm_kernel
from hotcold.numba_kernels.decode.router import choose_experts, router_rows, weigh_shared
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import (
    ActivationSpace,
    copy_numbers,
    quantize_activations,
)
from hotcold.numba_kernels.layer_record import LayerVectors
from hotcold.numba_kernels.layer_rows import LayerRows
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, now_ns, ring
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    FIRST_LOGIT,
    FULL,
    HEAD,
    LAYER,
    NUM_TOKENS,
    OPERATION,
    PING,
    REQUEST,
    ROUTED,
    TARGET,
    WEIGHTS,
    WINDOWED,
    barrier_wait,
    cell,
    finish_request,
    is_for_others,
    next_share,
)
from hotcold.numba_kernels.loops.work_stealing import (
    next_block,
    work_stealing_layer,
    work_stealing_rows,
)
from hotcold.numba_kernels.router_arrays import RouterArrays

_QKV, _QKV_SECOND, _HEADS, _OUT, _PROJECT, _HEAD, _ROUTER, _NEXT_ROUTER = range(8)
NUM_COUNTERS = 8


class AttentionArrays(NamedTuple):
    """Attention of all layers stacked, and the head; shapes as in model.weights.

    numbers (L,) of LAYER_NUMBERS; keys, values (L, pages, kv_heads, PAGE_POSITIONS, row);
    rope_tables (R, P, 2, half) for positions 0..P-1, R may be 0; logit_softcap: 0 for none.
    Compiled code has no routers where there are no experts, and no project_out where the head reads
    the hidden states: that is less to compile.
    """

    numbers: np.ndarray
    vectors: LayerVectors
    qkv: LayerRows
    out: np.ndarray
    routers: RouterArrays
    final_norm_weight: np.ndarray
    final_norm_bias: np.ndarray
    project_out: np.ndarray
    head: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    rope_tables: np.ndarray
    logit_softcap: np.float32


class AttentionScratch(NamedTuple):
    """Work space: residual, normed (threads, T, d), qkv (T, rows), heads (T, H * head_dim),
    projected (T, E), router_logits (T, experts) float32; inputs: for `quantize_activations`;
    counters of blocks taken (NUM_COUNTERS, threads * 16). A thread's part of attention: scores
    (threads, R, SEGMENT_POSITIONS), sums (threads, R, head_dim), totals (threads, R, 2). Parts of
    tokens with S segments, at most: part_sums (T, S, H * head_dim), part_totals (T, S, H, 2)."""

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
    inputs: ActivationSpace
    counters: np.ndarray


@njit(nogil=True, cache=True)
def layer_input(hidden, layer, arrays, residual):
    """The layer's input: `hidden`, normed where the previous layer's output norm is still due."""
    before, vectors = arrays.numbers[max(layer - 1, 0)], arrays.vectors
    for t in range(hidden.shape[0]):
        if before.norms_output and layer > 0:
            norm_kernel(
                before.norm_kind, hidden[t], vectors.ffn_norm_weight[layer - 1],
                vectors.ffn_norm_bias[layer - 1], before.norm_eps, residual[t],
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
def norm_whole(part, num_parts, layer, arrays, qkv):
    """Norm a token's query heads as one vector, and its key heads, where norms are that wide.

    Of every num_parts-th token. Returns whether there are such norms; checks nothing.
    """
    numbers, q_norm, k_norm = (
        arrays.numbers[layer], arrays.vectors.q_norm_weight, arrays.vectors.k_norm_weight,
    )  # fmt: skip
    queries, keys = numbers.num_heads * numbers.head_dim, numbers.num_kv_heads * numbers.head_dim
    norms_queries = q_norm.shape[1] > numbers.head_dim
    norms_keys = k_norm.shape[1] > numbers.head_dim
    for t in range(part, qkv.shape[0], num_parts):
        if norms_queries:
            vector = qkv[t, :queries]
            rms_norm_kernel(vector, q_norm[layer], numbers.norm_eps, vector)
        if norms_keys:
            vector = qkv[t, queries : queries + keys]
            rms_norm_kernel(vector, k_norm[layer], numbers.norm_eps, vector)
    return norms_queries or norms_keys


@njit(nogil=True, cache=True)
def rotate_and_store(part, num_parts, layer, buffers, arrays, qkv):
    """Norm and rotate query and key heads, write keys and values to the cache.

    Of every num_parts-th head; norms wider than a head are left to `norm_whole`.
    """
    numbers, q_norm, k_norm = (
        arrays.numbers[layer], arrays.vectors.q_norm_weight, arrays.vectors.k_norm_weight,
    )  # fmt: skip
    dim, rope, num_heads = numbers.head_dim, numbers.rope, numbers.num_heads
    norms_queries, norms_keys = q_norm.shape[1] == dim, k_norm.shape[1] == dim
    first_value = num_heads + numbers.num_kv_heads
    tables = buffers.page_tables[WINDOWED if numbers.window else FULL]
    for t in range(qkv.shape[0]):
        position = buffers.positions[t]
        size = arrays.keys.shape[3]
        page, row = tables[buffers.slots[t], position // size], position % size
        for head in range(part, first_value + numbers.num_kv_heads, num_parts):
            vector = qkv[t, head * dim : (head + 1) * dim]
            if norms_queries and head < num_heads:
                rms_norm_kernel(vector, q_norm[layer], numbers.norm_eps, vector)
            elif norms_keys and num_heads <= head < first_value:
                rms_norm_kernel(vector, k_norm[layer], numbers.norm_eps, vector)
            if rope >= 0 and head < first_value:
                rope_kernel(vector, arrays.rope_tables[rope, position])
            if head >= first_value:
                group = head - first_value
                store_kernel(arrays.values[layer], page, group, row, qkv, t, head * dim, dim)
            elif head >= num_heads:
                group = head - num_heads
                store_kernel(arrays.keys[layer], page, group, row, qkv, t, head * dim, dim)


@njit(nogil=True, cache=True)
def _run_length(slots, first, num_tokens, most):
    """Tokens of one sequence from `first` on, at most `most`."""
    count = 1
    while count < most and first + count < num_tokens and slots[first + count] == slots[first]:
        count += 1
    return count


@njit(nogil=True, cache=True)
def _put_away(
    numbers, sinks, group, segment, positions, first, num_tokens, found, scratch_heads, parts
):  # fmt: skip
    """Rows of `attend_segment` to `heads` where a token has one segment, else to its parts."""
    (sums, totals), (part_sums, part_totals) = found, parts
    dim, heads = numbers.head_dim, numbers.num_heads // numbers.num_kv_heads
    begin = segment * SEGMENT_POSITIONS
    for t in range(first, first + num_tokens):
        start = first_seen(numbers.window, positions[t])
        if positions[t] < begin or start >= begin + SEGMENT_POSITIONS:
            continue
        is_whole = num_segments(numbers.window, positions[t]) == 1
        for h in range(heads):
            head, row = group * heads + h, (t - first) * heads + h
            if is_whole:
                sink = sink_share(sinks, head, totals[row, 0])
                share = np.float32(1) / (totals[row, 1] + sink)
                for i in range(dim):
                    scratch_heads[t, head * dim + i] = sums[row, i] * share
            else:
                part = segment - start // SEGMENT_POSITIONS
                for i in range(dim):
                    part_sums[t, part, head * dim + i] = sums[row, i]
                part_totals[t, part, head, 0] = totals[row, 0]
                part_totals[t, part, head, 1] = totals[row, 1]


@njit(nogil=True, cache=True)
def _attend(thread, layer, buffers, arrays, scratch, num_tokens):
    """The parts of attention that this thread takes: of a sequence, a KV head and a segment each.

    Returns whether a token has several segments, to be merged.
    """
    numbers, counters, positions = (
        arrays.numbers[layer],
        scratch.counters[_HEADS],
        buffers.positions,
    )
    num_groups, scores = numbers.num_kv_heads, scratch.scores[thread]
    sinks = arrays.vectors.sinks[layer]
    keys, values = arrays.keys[layer], arrays.values[layer]
    found = scratch.sums[thread], scratch.totals[thread]
    parts = scratch.part_sums, scratch.part_totals
    most = max(1, scores.shape[0] // (numbers.num_heads // num_groups))
    tables = buffers.page_tables[WINDOWED if numbers.window else FULL]
    first, base, has_parts, taken = 0, 0, False, next_block(counters, 0)
    while first < num_tokens:
        count = _run_length(buffers.slots, first, num_tokens, most)
        first_segment = end_segment = positions[first] // SEGMENT_POSITIONS
        for t in range(first, first + count):
            start = first_seen(numbers.window, positions[t]) // SEGMENT_POSITIONS
            first_segment = min(first_segment, start)
            end_segment = max(end_segment, positions[t] // SEGMENT_POSITIONS)
            has_parts = has_parts or positions[t] // SEGMENT_POSITIONS > start
        num_items = (end_segment + 1 - first_segment) * num_groups
        pages = tables[buffers.slots[first]]
        while taken < base + num_items:
            group, segment = (
                (taken - base) % num_groups,
                first_segment + (taken - base) // num_groups,
            )
            attend_segment(
                numbers, keys, values, group, pages, segment, positions, first, count, scratch.qkv,
                scores, found[0], found[1],
            )  # fmt: skip
            _put_away(
                numbers, sinks, group, segment, positions, first, count, found, scratch.heads, parts
            )  # fmt: skip
            taken = next_block(counters, 0)
        base += num_items
        first += count
    return has_parts


@njit(nogil=True, cache=True)
def _merge(thread, num_threads, layer, buffers, arrays, scratch, num_tokens):
    """Merge the segments of every num_threads-th head of the tokens that have several."""
    numbers, sinks = arrays.numbers[layer], arrays.vectors.sinks[layer]
    for t in range(num_tokens):
        count = num_segments(numbers.window, buffers.positions[t])
        for head in range(thread, numbers.num_heads if count > 1 else 0, num_threads):
            merge_segments(
                count, scratch.part_sums[t], scratch.part_totals[t], sinks, head,
                numbers.head_dim, scratch.heads[t],
            )  # fmt: skip


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

    That is a guess, as hidden states change little from one layer to the next.
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
    counters = scratch.counters[_NEXT_ROUTER]
    _score_experts(counters, thread, num_threads, following, routers, x, scratch)
    barrier_wait(buffers.cells, service, num_threads)
    _choose_experts(
        thread, num_threads, following, numbers, routers, scratch.router_logits, num_tokens, guessed
    )


@njit(nogil=True, cache=True)
def attention_request(thread, num_threads, service, buffers, arrays, scratch):
    """This thread's share of the ATTENTION request in the mailbox; no checks."""
    layer = buffers.requests[service, LAYER]
    num_tokens = buffers.requests[service, NUM_TOKENS]
    residual, normed = scratch.residual[thread, :num_tokens], scratch.normed[thread, :num_tokens]
    qkv, ffn_residual = scratch.qkv[:num_tokens], buffers.ffn_residual[:num_tokens]
    layer_input(buffers.hidden[:num_tokens], layer, arrays, residual)
    layer_norm_before(residual, layer, arrays, normed)
    numbers, routers = arrays.numbers[layer], arrays.routers
    routes_early = numbers.num_experts > 0 and numbers.routes_layer_input
    if routes_early:
        _score_experts(
            scratch.counters[_ROUTER], thread, num_threads, layer, routers, residual, scratch
        )
    work_stealing_layer(
        scratch.counters[_QKV : _QKV_SECOND + 1], thread, num_threads, arrays.qkv, layer,
        arrays.vectors.qkv_bias[layer], normed, scratch.inputs, residual[:0], qkv,
    )  # fmt: skip
    barrier_wait(buffers.cells, service, num_threads)
    if routes_early and thread == num_threads - 1:
        _choose_experts(
            0, 1, layer, numbers, routers, scratch.router_logits, num_tokens, buffers.block_weights
        )
        if buffers.requests[service, WEIGHTS] == TARGET:
            number = buffers.cells[cell(service, REQUEST) * INTS_A_CELL]
            ring(buffers.cells, cell(service, ROUTED), number)
    if norm_whole(thread, num_threads, layer, arrays, qkv):
        barrier_wait(buffers.cells, service, num_threads)
    rotate_and_store(thread, num_threads, layer, buffers, arrays, qkv)
    barrier_wait(buffers.cells, service, num_threads)
    has_parts = _attend(thread, layer, buffers, arrays, scratch, num_tokens)
    barrier_wait(buffers.cells, service, num_threads)
    if has_parts:
        _merge(thread, num_threads, layer, buffers, arrays, scratch, num_tokens)
        barrier_wait(buffers.cells, service, num_threads)
    weights = arrays.out[layer]
    heads = quantize_activations(weights, scratch.heads[:num_tokens], scratch.inputs, thread)
    added = residual[:0] if numbers.adds_late else residual
    work_stealing_rows(
        scratch.counters[_OUT], thread, num_threads, weights, arrays.vectors.out_bias[layer], heads,
        added, ffn_residual, 0,
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
def final_norm(hidden, arrays, residual, normed):
    """normed (T, d) = what the head is computed of, of hidden; residual (T, d): work space."""
    num_layers = arrays.numbers.shape[0]
    last = arrays.numbers[num_layers - 1]
    layer_input(hidden, num_layers, arrays, residual)
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
            softcap_kernel(logits[t, first:end], arrays.logit_softcap)


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
    final_norm(buffers.hidden[begin:end], arrays, residual, normed)
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
