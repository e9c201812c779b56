"""Softmax attention over the pages of the KV cache, for each thread of an attention service.

A sequence's positions are divided into segments, which threads take by KV head, and merge.
"""

import math

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
    store_kernel,
)
from hotcold.numba_kernels.decode.norm import rms_norm_kernel
from hotcold.numba_kernels.layer_pages import layer_pages
from hotcold.numba_kernels.loops.mailbox import barrier_wait
from hotcold.numba_kernels.loops.work_stealing import next_block


@njit(nogil=True, cache=True)
def norm_whole(part, num_parts, layer, arrays, qkv):
    """Norm a token's query heads as one vector, and its key heads, where norms are that wide.

    Of every num_parts-th token. Returns whether there are such norms; checks nothing.
    """
    numbers, q_norm, k_norm = (
        arrays.numbers[layer], arrays.vectors.q_norm_weight, arrays.vectors.k_norm_weight,
    )  # fmt: skip
    queries, keys = numbers.num_heads * numbers.head_dim, numbers.num_kv_heads * numbers.head_dim
    first_key = queries * (2 if numbers.has_gate else 1)
    norms_queries = numbers.q_norm_size > numbers.head_dim
    norms_keys = numbers.k_norm_size > numbers.head_dim
    for t in range(part, qkv.shape[0], num_parts):
        if norms_queries:
            vector = qkv[t, :queries]
            rms_norm_kernel(vector, q_norm[layer], numbers.norm_eps, vector)
        if norms_keys:
            vector = qkv[t, first_key : first_key + keys]
            rms_norm_kernel(vector, k_norm[layer], numbers.norm_eps, vector)
    return norms_queries or norms_keys


@njit(nogil=True, cache=True)
def rotate_and_store(part, num_parts, layer, buffers, first_token, arrays, qkv):
    """Norm and rotate query and key heads, write keys and values to the cache.

    Of every num_parts-th head; norms wider than a head are left to `norm_whole`. Latent attention's
    keys are its values. Gates of query heads, which stand behind these, stay. Row t of qkv is the
    step's token first_token + t.
    """
    numbers, q_norm, k_norm, v_norm = (
        arrays.numbers[layer], arrays.vectors.q_norm_weight, arrays.vectors.k_norm_weight,
        arrays.vectors.v_norm_weight,
    )  # fmt: skip
    dim, num_heads = numbers.head_dim, numbers.num_heads
    norms_queries, norms_keys = numbers.q_norm_size == dim, numbers.k_norm_size == dim
    first_value = num_heads + numbers.num_kv_heads
    end = first_value + (0 if numbers.latent_size else numbers.num_kv_heads)
    if not numbers.has_keys:
        end = num_heads
    num_gates = num_heads if numbers.has_gate else 0
    tables = buffers.page_tables[numbers.page_group]
    keys, values = layer_pages(arrays.keys, layer), layer_pages(arrays.values, layer)
    size = keys.shape[2]
    for t in range(qkv.shape[0]):
        position, slot = buffers.positions[first_token + t], buffers.slots[first_token + t]
        page, row = tables[slot, position // size], position % size
        for head in range(part, end, num_parts):
            column = head * dim if head < num_heads else (head + num_gates) * dim
            vector = qkv[t, column : column + dim]
            is_normed = head < first_value and (norms_queries if head < num_heads else norms_keys)
            weight = q_norm[layer] if head < num_heads else k_norm[layer]
            if is_normed and not numbers.norms_rotated:
                rms_norm_kernel(vector, weight, numbers.norm_eps, vector)
            rope = numbers.query_rope if head < num_heads else numbers.rope
            if rope >= 0 and head < first_value:
                table = arrays.rope_tables[rope, position]
                rope_kernel(vector, table, numbers.rotated_pairs)
                if table[-1] != 1:
                    for i in range(2 * numbers.rotated_pairs, dim):
                        vector[i] *= table[-1]
            if is_normed and numbers.norms_rotated:
                rms_norm_kernel(vector, weight, numbers.norm_eps, vector)
            if head >= first_value:
                if numbers.v_norm_size:
                    rms_norm_kernel(vector, v_norm[layer], numbers.norm_eps, vector)
                group = head - first_value
                store_kernel(values, page, group, row, qkv, t, column, dim)
            elif head >= num_heads:
                group = head - num_heads
                store_kernel(keys, page, group, row, qkv, t, column, dim)


@njit(nogil=True, cache=True)
def keys_and_values(arrays, layer):
    """A layer's pages of keys and of values, which latent attention has in one."""
    keys = layer_pages(arrays.keys, layer)
    if arrays.numbers[layer].latent_size:
        return keys, keys
    return keys, layer_pages(arrays.values, layer)


@njit(nogil=True, cache=True)
def heads_of(numbers, heads, num_tokens):
    """The layer's heads of so many tokens (T, heads_size), in `heads` of the widest layer."""
    width = numbers.heads_size
    return heads[: num_tokens * width].reshape(num_tokens, width)


@njit(nogil=True, cache=True)
def _run_length(slots, first, num_tokens, most):
    """Tokens of one sequence from `first` on, at most `most`."""
    count = 1
    while count < most and first + count < num_tokens and slots[first + count] == slots[first]:
        count += 1
    return count


@njit(nogil=True, cache=True)
def _put_away(
    numbers, sinks, group, segment, positions, first, num_tokens, found, all_heads, parts
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
                    all_heads[t, head * dim + i] = sums[row, i] * share
            else:
                part = segment - start // SEGMENT_POSITIONS
                for i in range(dim):
                    part_sums[t, part, head * dim + i] = sums[row, i]
                part_totals[t, part, head, 0] = totals[row, 0]
                part_totals[t, part, head, 1] = totals[row, 1]


@njit(nogil=True, cache=True)
def _attend(counters, thread, layer, buffers, arrays, scratch, num_tokens):
    """The parts of attention that this thread takes: of a sequence, a KV head and a segment each.

    Returns whether a token has several segments, to be merged.
    """
    numbers, positions = arrays.numbers[layer], buffers.positions
    num_groups, scores = numbers.num_kv_heads, scratch.scores[thread]
    sinks = arrays.vectors.sinks[layer]
    keys, values = keys_and_values(arrays, layer)
    all_heads = heads_of(numbers, scratch.heads, num_tokens)
    found = scratch.sums[thread], scratch.totals[thread]
    parts = scratch.part_sums, scratch.part_totals
    most = max(1, scores.shape[0] // (numbers.num_heads // num_groups))
    tables = buffers.page_tables[numbers.page_group]
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
                numbers, sinks, group, segment, positions, first, count, found, all_heads, parts
            )  # fmt: skip
            taken = next_block(counters, 0)
        base += num_items
        first += count
    return has_parts


@njit(nogil=True, cache=True)
def _merge(thread, num_threads, layer, buffers, arrays, scratch, num_tokens):
    """Merge the segments of every num_threads-th head of the tokens that have several."""
    numbers, sinks = arrays.numbers[layer], arrays.vectors.sinks[layer]
    heads = heads_of(numbers, scratch.heads, num_tokens)
    for t in range(num_tokens):
        count = num_segments(numbers.window, buffers.positions[t])
        for head in range(thread, numbers.num_heads if count > 1 else 0, num_threads):
            merge_segments(
                count, scratch.part_sums[t], scratch.part_totals[t], sinks, head,
                numbers.head_dim, heads[t],
            )  # fmt: skip


@njit(nogil=True, cache=True)
def gate_heads(part, num_parts, numbers, qkv, heads):
    """heads (T, H * head_dim) *= sigmoid of their gates, of every num_parts-th head of tokens."""
    dim, num_heads = numbers.head_dim, numbers.num_heads
    for t in range(heads.shape[0]):
        for head in range(part, num_heads, num_parts):
            for i in range(head * dim, (head + 1) * dim):
                gate = np.float64(qkv[t, num_heads * dim + i])
                heads[t, i] *= np.float32(1.0 / (1.0 + math.exp(-gate)))


@njit(nogil=True, cache=True)
def attention_heads(
    counters, thread, num_threads, service, layer, buffers, arrays, scratch, qkv
):  # fmt: skip
    """This thread's share of attention: of what the output projection reads."""
    numbers, num_tokens = arrays.numbers[layer], qkv.shape[0]
    if norm_whole(thread, num_threads, layer, arrays, qkv):
        barrier_wait(buffers.cells, service, num_threads)
    rotate_and_store(thread, num_threads, layer, buffers, 0, arrays, qkv)
    barrier_wait(buffers.cells, service, num_threads)
    has_parts = _attend(counters, thread, layer, buffers, arrays, scratch, num_tokens)
    if has_parts:
        barrier_wait(buffers.cells, service, num_threads)
        _merge(thread, num_threads, layer, buffers, arrays, scratch, num_tokens)
    if numbers.has_gate:
        barrier_wait(buffers.cells, service, num_threads)
        gate_heads(thread, num_threads, numbers, qkv, heads_of(numbers, scratch.heads, num_tokens))
