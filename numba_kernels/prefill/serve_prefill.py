"""The loop of an attention service's thread for prompts, layer after layer, and for many logits.

The order of norms, attention and residual is that of `numba_kernels.loops.attention_loop`, whose
steps these are, each thread for tokens of its own. Python has no part in it: a layer of a small
model takes less time than that would.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.router import product_of_tokens, route_tokens
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import aligned_zeros
from hotcold.numba_kernels.loops.attention_loop import (
    AttentionArrays,
    cap_logits,
    final_norm,
    layer_input,
    layer_norm_before,
    normed_residual,
    second_ffn_input,
    write_ffn_input,
)
from hotcold.numba_kernels.loops.doorbell import now_ns
from hotcold.numba_kernels.loops.latent_attention import (
    LatentSpace,
    absorb_queries,
    first_products,
    latent_space,
    mix_heads,
    mixed_heads,
    norm_inputs,
)
from hotcold.numba_kernels.loops.layer_embeddings import mix_embedding, own_embedding
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    NUM_TOKENS,
    NUM_UNWANTED,
    OPERATION,
    RECURRENT,
    barrier_wait,
    finish_request,
    is_for_others,
    next_share,
)
from hotcold.numba_kernels.loops.recurrent_layer import recurrent_heads
from hotcold.numba_kernels.loops.softmax_attention import (
    gate_heads,
    heads_of,
    keys_and_values,
    norm_whole,
    rotate_and_store,
)
from hotcold.numba_kernels.loops.work_stealing import new_block_counters
from hotcold.numba_kernels.prefill.attention import (
    prompt_attention_kernel,
    prompt_space_items,
)
from hotcold.numba_kernels.prefill.shared_rows import (
    Tokens,
    prepare_for_layer,
    prepare_tokens,
    share_layer,
    share_rows,
    share_unit,
)
from hotcold.numba_kernels.recurrent.pages import recurrent_scratch

_HEADS, _OUT, _PROJECT, _HEAD, _QUERIES, _ABSORB, _MIX, _PART, _QKV = *range(8), 7 + 3
NUM_PROMPT_COUNTERS = _QKV  # and one for each block of qkv
NewTokens = Callable[[tuple[np.dtype, ...], int], Tokens]  # of rows' dtypes and numbers a row


class PromptScratch(NamedTuple):
    """Work space for prompts of up to T tokens.

    residual, normed (T, d), qkv (T, rows), heads (T * heads_size,), router_logits (T, experts),
    projected (T, E), gates, contexts (T, P), parts (T, d) float32, the last three as of
    `AttentionScratch`, of_gates, of_contexts, of_parts: tokens as the matrices of layers' own
    embeddings take them; of_qkv, of_out, of_project, of_head, of_queries: as the other matrices do
    state_gates (T, 2 Hv): of recurrent layers; recurrent: of `recur`, a row a thread
    spaces (threads, `prompt_space_items`): of `prompt_attention_kernel`
    counters of blocks taken (NUM_PROMPT_COUNTERS + blocks of qkv, threads * 16)
    latent: of latent attention, else None
    """

    residual: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    heads: np.ndarray
    router_logits: np.ndarray
    projected: np.ndarray
    gates: np.ndarray
    contexts: np.ndarray
    parts: np.ndarray
    of_gates: Tokens
    of_contexts: Tokens
    of_parts: Tokens
    of_qkv: Tokens
    of_out: Tokens
    of_project: Tokens
    of_head: Tokens
    of_queries: Tokens
    spaces: np.ndarray
    state_gates: np.ndarray
    recurrent: np.ndarray
    counters: np.ndarray
    latent: LatentSpace | None


def new_prompt_scratch(
    num_threads: int,
    num_tokens: int,
    widths: tuple[int, int, int],
    arrays: AttentionArrays,
    new_tokens: NewTokens,
) -> PromptScratch:
    """Work space; what is not used of it takes no memory.

    widths: of hidden states, of rows of qkv, of heads
    """
    num_inputs = int(arrays.qkv.heights.sum(axis=1).max(initial=0))
    has_latent, rank = arrays.latent.keys.nbytes > 0, int(arrays.numbers[0]["query_rank"])
    (width, qkv, heads), numbers = widths, arrays.numbers
    projected = len(arrays.project_out)
    size, own = arrays.per_layer.context_norm.size, arrays.per_layer

    def space(row: int) -> np.ndarray:
        return aligned_zeros((num_tokens, row))

    return PromptScratch(
        residual=space(width),
        normed=space(width),
        qkv=space(qkv),
        heads=space(heads).reshape(-1),
        router_logits=space(int(numbers["num_experts"].max())),
        projected=space(projected),
        gates=space(size),
        contexts=space(size),
        parts=space(width if size else 0),
        of_gates=new_tokens((own.gate.dtype,), width if size else 1),
        of_contexts=new_tokens((own.context.dtype,), width if size else 1),
        of_parts=new_tokens((own.projection.dtype,), size or 1),
        of_qkv=new_tokens(arrays.qkv.dtypes, width),
        of_out=new_tokens(arrays.out.dtypes, heads),
        of_queries=new_tokens(arrays.latent.queries.dtypes, max(1, rank)),
        of_project=new_tokens((arrays.project_out.dtype,), width if projected else 1),
        of_head=new_tokens((arrays.head.dtype,), projected or width),
        spaces=aligned_zeros((num_threads, prompt_space_items(int(numbers["head_dim"].max())))),
        state_gates=space(arrays.recurrent.gates.shape[1]),
        recurrent=recurrent_scratch(num_threads, arrays.recurrent_numbers),
        counters=new_block_counters(NUM_PROMPT_COUNTERS + arrays.qkv.places.shape[1], num_threads),
        latent=latent_space(num_threads, num_tokens, num_inputs, numbers) if has_latent else None,
    )


@njit(nogil=True, cache=True)
def _route(numbers, routers, layer, x, ffn_input, logits, weights):
    """`route_tokens` of a mixture; a model without experts has None."""
    if routers is None:
        return
    if numbers.num_experts > 0:
        own = logits[:, : numbers.num_experts]
        route_tokens(numbers, routers, layer, x, ffn_input, own, weights)


@njit(nogil=True, cache=True)
def _widen_queries(
    latent, thread, num_threads, service, layer, buffers, arrays, scratch, unwanted, qkv
):  # fmt: skip
    """Keys of latent attention, and queries of the tokens from `unwanted` on, to qkv."""
    if latent is None:
        return
    numbers, space, counters = arrays.numbers[layer], scratch.latent, scratch.counters
    norm_inputs(latent, thread, num_threads, layer, arrays, space, qkv)
    barrier_wait(buffers.cells, service, num_threads)
    count = qkv.shape[0] - unwanted
    if count == 0:
        return
    queries = space.queries[unwanted : unwanted + count]
    if numbers.query_rank:
        x = space.low_queries[unwanted : unwanted + count]
        of_queries, no_bias = scratch.of_queries, arrays.final_norm_weight[:0]
        first, last = split_range(count, thread, num_threads, share_unit(of_queries))
        prepare_for_layer(latent.queries, layer, x, first, last, of_queries, thread)
        barrier_wait(buffers.cells, service, num_threads)
        share_layer(
            counters[_QUERIES : _QUERIES + 1], thread, num_threads, latent.queries, layer, no_bias,
            of_queries, x[:0], queries,
        )  # fmt: skip
        barrier_wait(buffers.cells, service, num_threads)
    absorb_queries(
        latent, counters[_ABSORB], thread, layer, numbers, space, queries, qkv[unwanted:]
    )
    barrier_wait(buffers.cells, service, num_threads)


@njit(nogil=True, cache=True)
def _mixed(latent, thread, num_threads, service, layer, buffers, arrays, scratch, heads):
    """The rows that the output projection takes, of heads (T, H * head_dim)."""
    space = scratch.latent
    if latent is not None:
        numbers = arrays.numbers[layer]
        mix_heads(latent, scratch.counters[_MIX], thread, layer, numbers, space, heads)
        barrier_wait(buffers.cells, service, num_threads)
    return mixed_heads(latent, space, heads)


@njit(nogil=True, cache=True)
def _layer_part(
    thread, num_threads, service, layer, begin, end, buffers, arrays, epsilon, scratch
):  # fmt: skip
    """`layer_part` of a prompt's tokens begin..end-1."""
    if arrays is None:
        return
    cells, counters = buffers.cells, scratch.counters[_PART:]
    hidden, embedded = buffers.hidden[begin:end], buffers.embedded[begin:end]
    count, none, none_added = end - begin, hidden[0, :0], hidden[:0]
    gates, contexts = scratch.gates[:count], scratch.contexts[:count]
    first, last = split_range(count, thread, num_threads, share_unit(scratch.of_gates))
    prepare_tokens(arrays.gate[layer], hidden, first, last, scratch.of_gates, thread)
    first, last = split_range(count, thread, num_threads, share_unit(scratch.of_contexts))
    prepare_tokens(arrays.context[layer], embedded, first, last, scratch.of_contexts, thread)
    barrier_wait(cells, service, num_threads)
    share_rows(
        counters[0], thread, num_threads, arrays.gate[layer], none, scratch.of_gates, none_added,
        gates, 0,
    )  # fmt: skip
    share_rows(
        counters[1], thread, num_threads, arrays.context[layer], none, scratch.of_contexts,
        none_added, contexts, 0,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    first, last = split_range(count, thread, num_threads, share_unit(scratch.of_parts))
    for t in range(first, last):
        own = own_embedding(buffers, layer, gates.shape[1], begin + t)
        mix_embedding(gates[t], contexts[t], own, arrays.context_norm, epsilon, contexts[t])
    prepare_tokens(arrays.projection[layer], contexts, first, last, scratch.of_parts, thread)
    barrier_wait(cells, service, num_threads)
    share_rows(
        counters[2], thread, num_threads, arrays.projection[layer], none, scratch.of_parts,
        none_added, scratch.parts[:count], 0,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)


@njit(nogil=True, cache=True)
def _project_gates(numbers, recurrent, normed, gates):
    """The gates of a recurrent layer of tokens (T, d); a model without such layers has None."""
    if recurrent is None or recurrent.gates.shape[1] == 0:
        return
    product_of_tokens(recurrent.gates[numbers.place], normed[:0, 0], normed, gates)


@njit(nogil=True, cache=True)
def _attention_heads(
    thread, num_threads, service, layer, begin, unwanted, buffers, arrays, scratch, qkv, heads
):  # fmt: skip
    """This thread's share of attention, without its gates; none is done where none is wanted.

    Row t of qkv is token begin + t of the prompt's.
    """
    numbers, cells = arrays.numbers[layer], buffers.cells
    _widen_queries(
        arrays.latent, thread, num_threads, service, layer, buffers, arrays, scratch, unwanted, qkv
    )
    if norm_whole(thread, num_threads, layer, arrays, qkv):
        barrier_wait(cells, service, num_threads)
    rotate_and_store(thread, num_threads, layer, buffers, begin, arrays, qkv)
    if unwanted == begin + qkv.shape[0]:
        return
    barrier_wait(cells, service, num_threads)
    tables = buffers.page_tables[numbers.page_group]
    keys, values = keys_and_values(arrays, layer)
    prompt_attention_kernel(
        numbers, arrays.vectors.sinks[layer], qkv[unwanted - begin :],
        np.int64(buffers.positions[unwanted]), keys, values, tables[buffers.slots[0]],
        scratch.spaces[thread], scratch.counters[_HEADS], heads,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def prompt_request(thread, num_threads, service, buffers, arrays, scratch):
    """This thread's share of a prompt's ATTENTION request in the mailbox; no checks."""
    request, cells = buffers.requests[service], buffers.cells
    layer, num_tokens, unwanted = request[LAYER], request[NUM_TOKENS], request[NUM_UNWANTED]
    numbers, learned, counters = arrays.numbers[layer], arrays.vectors, scratch.counters
    if numbers.ends_pair:
        first, last = split_range(num_tokens - unwanted, thread, num_threads, 1)
        first, last = first + unwanted, last + unwanted
        normed = scratch.normed[first:last]
        second_ffn_input(first, 1, last, layer, buffers, arrays)
        residual = buffers.ffn_residual[first:last]
        normed_residual(residual, layer, numbers, arrays.routers, normed)
        ffn_input, weights = buffers.ffn_input[first:last], buffers.block_weights[first:last]
        logits = scratch.router_logits[first:last]
        _route(numbers, arrays.routers, layer, normed, ffn_input, logits, weights)
        return
    begin = 0 if numbers.has_keys else unwanted
    residual, normed = scratch.residual[begin:num_tokens], scratch.normed[begin:num_tokens]
    qkv, heads = (
        scratch.qkv[begin:num_tokens],
        heads_of(numbers, scratch.heads, num_tokens - unwanted),
    )
    if layer > 0:
        _layer_part(
            thread, num_threads, service, layer - 1, begin, num_tokens, buffers, arrays.per_layer,
            arrays.numbers[layer - 1].norm_eps, scratch,
        )  # fmt: skip
    first, last = split_range(num_tokens - begin, thread, num_threads, share_unit(scratch.of_qkv))
    hidden = buffers.hidden[begin + first : begin + last]
    layer_input(hidden, layer, arrays, scratch.parts[first:last], residual[first:last])
    layer_norm_before(residual[first:last], layer, arrays, normed[first:last])
    prepare_for_layer(arrays.qkv, layer, normed, first, last, scratch.of_qkv, thread)
    is_recurrent = numbers.page_group == RECURRENT
    if is_recurrent:
        _project_gates(
            arrays.recurrent_numbers[layer], arrays.recurrent, normed[first:last],
            scratch.state_gates[first:last],
        )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    share_layer(
        counters[_QKV:], thread, num_threads, arrays.qkv, layer, learned.qkv_bias[layer],
        scratch.of_qkv, residual[:0],
        first_products(arrays.latent, scratch.latent, qkv, num_tokens),
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    if is_recurrent:
        recurrent_heads(
            thread, num_threads, service, layer, buffers, arrays, arrays.recurrent, qkv,
            scratch.state_gates[:num_tokens], unwanted, scratch.recurrent[thread], heads,
        )  # fmt: skip
    else:
        _attention_heads(
            thread, num_threads, service, layer, begin, unwanted, buffers, arrays, scratch, qkv,
            heads,
        )  # fmt: skip
    if unwanted == num_tokens:
        return
    barrier_wait(cells, service, num_threads)
    count = num_tokens - unwanted
    mixed = _mixed(
        arrays.latent, thread, num_threads, service, layer, buffers, arrays, scratch, heads
    )
    first, last = split_range(count, thread, num_threads, share_unit(scratch.of_out))
    if numbers.has_gate:
        own = qkv[unwanted - begin + first : unwanted - begin + last]
        gate_heads(0, 1, numbers, own, heads[first:last])
    prepare_for_layer(arrays.out, layer, mixed, first, last, scratch.of_out, thread)
    barrier_wait(cells, service, num_threads)
    wanted = residual[unwanted - begin :]
    share_layer(
        counters[_OUT : _OUT + 1], thread, num_threads, arrays.out, layer, learned.out_bias[layer],
        scratch.of_out, wanted[:0] if numbers.adds_late else wanted,
        buffers.ffn_residual[unwanted:num_tokens],
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    residual, normed = scratch.residual[:num_tokens], scratch.normed[:num_tokens]
    first, last = first + unwanted, last + unwanted
    for t in range(first, last):
        write_ffn_input(t, layer, buffers, arrays, residual, normed)
    x, ffn_input = residual[first:last], buffers.ffn_input[first:last]
    if not numbers.routes_layer_input:
        x = ffn_input
    _route(
        numbers, arrays.routers, layer, x, ffn_input, scratch.router_logits[first:last],
        buffers.block_weights[first:last],
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _project(thread, num_threads, service, buffers, project_out, no_bias, normed, scratch):
    """What the head is multiplied with: `normed` (T, d), or project_out . normed; None: no such."""
    if project_out is None:
        return normed
    count, of_project = normed.shape[0], scratch.of_project
    first, last = split_range(count, thread, num_threads, share_unit(of_project))
    barrier_wait(buffers.cells, service, num_threads)
    prepare_tokens(project_out, normed, first, last, of_project, thread)
    barrier_wait(buffers.cells, service, num_threads)
    projected = scratch.projected[:count]
    share_rows(
        scratch.counters[_PROJECT], thread, num_threads, project_out, no_bias, of_project,
        normed[:0], projected, 0,
    )  # fmt: skip
    barrier_wait(buffers.cells, service, num_threads)
    return projected


@njit(nogil=True, cache=True)
def prompt_head_request(thread, num_threads, service, buffers, arrays, scratch):
    """`head_request` of many tokens; no checks."""
    begin, end = buffers.requests[service, FIRST_LOGIT], buffers.requests[service, NUM_TOKENS]
    count = end - begin
    residual, normed = scratch.residual[:count], scratch.normed[:count]
    final = arrays.numbers.shape[0] - 1
    _layer_part(
        thread, num_threads, service, final, begin, end, buffers, arrays.per_layer,
        arrays.numbers[final].norm_eps, scratch,
    )  # fmt: skip
    first, last = split_range(count, thread, num_threads, share_unit(scratch.of_head))
    hidden, parts = buffers.hidden[begin + first : begin + last], scratch.parts[first:last]
    final_norm(hidden, arrays, parts, residual[first:last], normed[first:last])
    no_bias = arrays.final_norm_weight[:0]
    x = _project(
        thread, num_threads, service, buffers, arrays.project_out, no_bias, normed, scratch
    )
    prepare_tokens(arrays.head, x, first, last, scratch.of_head, thread)
    barrier_wait(buffers.cells, service, num_threads)
    logits = buffers.logits[:count]
    share_rows(
        scratch.counters[_HEAD], thread, num_threads, arrays.head, no_bias, scratch.of_head,
        residual[:0], logits, 0,
    )  # fmt: skip
    cap_logits(thread, num_threads, service, buffers, arrays, logits)


@njit(nogil=True, cache=True)
def _is_one_sequence(buffers, num_tokens):
    """Whether the tokens are consecutive positions of one sequence."""
    for t in range(1, num_tokens):
        if buffers.slots[t] != buffers.slots[0]:
            return False
        if buffers.positions[t] != buffers.positions[0] + t:
            return False
    return True


@njit(nogil=True, cache=True)
def serve_prompts(
    thread, num_threads, service, seen, weights, most_tokens, buffers, arrays, scratch
):  # fmt: skip
    """Serve ATTENTION and HEAD of more than `most_tokens` tokens after `seen`.

    Returns the next other request's number. `weights` and 0 as for `serve_attention`, whose loop
    goes on then. Left to Python, as any other request, are tokens that are no consecutive ones.
    """
    while True:
        number, team = next_share(buffers.cells, service, thread, num_threads, seen)
        started = now_ns()
        if number == 0:
            return number
        request = buffers.requests[service]
        operation, num_tokens = request[OPERATION], request[NUM_TOKENS]
        if is_for_others(request, weights):
            return number
        if operation == ATTENTION:
            if num_tokens <= most_tokens or not _is_one_sequence(buffers, num_tokens):
                return number
            prompt_request(thread, team, service, buffers, arrays, scratch)
        elif operation == HEAD and num_tokens - request[FIRST_LOGIT] > most_tokens:
            prompt_head_request(thread, team, service, buffers, arrays, scratch)
        else:
            return number
        finish_request(
            buffers.cells, buffers.requests, buffers.replies, scratch.counters, service, number,
            team, started,
        )  # fmt: skip
        seen = number
