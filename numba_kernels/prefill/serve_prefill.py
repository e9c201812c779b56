"""The loop of an attention service's thread for prompts, layer after layer, and for many logits.

The order of norms, attention and residual is that of `numba_kernels.loops.attention_loop`, whose
steps these are, each thread for tokens of its own. Python has no part in it: a layer of a small
model takes less time than that would.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.router import route_tokens
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import aligned_zeros
from hotcold.numba_kernels.loops.attention_loop import (
    AttentionArrays,
    cap_logits,
    final_norm,
    layer_input,
    layer_norm_before,
    norm_whole,
    rotate_and_store,
    write_ffn_input,
)
from hotcold.numba_kernels.loops.doorbell import now_ns
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    FIRST_LOGIT,
    FULL,
    HEAD,
    LAYER,
    NUM_TOKENS,
    NUM_UNWANTED,
    OPERATION,
    WINDOWED,
    barrier_wait,
    finish_request,
    is_for_others,
    next_share,
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

_QKV, _QKV_SECOND, _HEADS, _OUT, _PROJECT, _HEAD = range(6)
NUM_PROMPT_COUNTERS = 6
NewTokens = Callable[[np.dtype, int], Tokens]  # of rows' dtype and numbers a row


class PromptScratch(NamedTuple):
    """Work space for prompts of up to T tokens.

    residual, normed (T, d), qkv (T, rows), heads (T, H * head_dim), router_logits (T, experts),
    projected (T, E) float32; of_qkv, of_second: tokens as rows of qkv's first and second format
    take them, of_out, of_project, of_head: as the other matrices do
    spaces (threads, `prompt_space_items`): of `prompt_attention_kernel`
    counters of blocks taken (NUM_PROMPT_COUNTERS, threads * 16)
    """

    residual: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    heads: np.ndarray
    router_logits: np.ndarray
    projected: np.ndarray
    of_qkv: Tokens
    of_second: Tokens
    of_out: Tokens
    of_project: Tokens
    of_head: Tokens
    spaces: np.ndarray
    counters: np.ndarray


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
    (width, qkv, heads), numbers = widths, arrays.numbers
    projected = len(arrays.project_out)

    def space(row: int) -> np.ndarray:
        return aligned_zeros((num_tokens, row))

    return PromptScratch(
        residual=space(width),
        normed=space(width),
        qkv=space(qkv),
        heads=space(heads),
        router_logits=space(int(numbers["num_experts"].max())),
        projected=space(projected),
        of_qkv=new_tokens(arrays.qkv.first.dtype, width),
        of_second=new_tokens(arrays.qkv.second.dtype, width),
        of_out=new_tokens(arrays.out.dtype, heads),
        of_project=new_tokens(arrays.project_out.dtype, width if projected else 1),
        of_head=new_tokens(arrays.head.dtype, projected or width),
        spaces=aligned_zeros((num_threads, prompt_space_items(int(numbers["head_dim"].max())))),
        counters=new_block_counters(NUM_PROMPT_COUNTERS, num_threads),
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
def prompt_request(thread, num_threads, service, buffers, arrays, scratch):
    """This thread's share of a prompt's ATTENTION request in the mailbox; no checks."""
    request, cells = buffers.requests[service], buffers.cells
    layer, num_tokens, unwanted = request[LAYER], request[NUM_TOKENS], request[NUM_UNWANTED]
    numbers, learned, counters = arrays.numbers[layer], arrays.vectors, scratch.counters
    residual, normed = scratch.residual[:num_tokens], scratch.normed[:num_tokens]
    qkv, heads = scratch.qkv[:num_tokens], scratch.heads[unwanted:num_tokens]
    first, last = split_range(num_tokens, thread, num_threads, share_unit(scratch.of_qkv))
    layer_input(buffers.hidden[first:last], layer, arrays, residual[first:last])
    layer_norm_before(residual[first:last], layer, arrays, normed[first:last])
    prepare_for_layer(
        arrays.qkv, layer, normed, first, last, scratch.of_qkv, scratch.of_second, thread
    )
    barrier_wait(cells, service, num_threads)
    share_layer(
        counters[_QKV : _QKV_SECOND + 1], thread, num_threads, arrays.qkv, layer,
        learned.qkv_bias[layer], scratch.of_qkv, scratch.of_second, residual[:0], qkv,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    if norm_whole(thread, num_threads, layer, arrays, qkv):
        barrier_wait(cells, service, num_threads)
    rotate_and_store(thread, num_threads, layer, buffers, arrays, qkv)
    if unwanted == num_tokens:
        return
    barrier_wait(cells, service, num_threads)
    tables = buffers.page_tables[WINDOWED if numbers.window else FULL]
    prompt_attention_kernel(
        numbers, learned.sinks[layer], qkv[unwanted:], np.int64(buffers.positions[unwanted]),
        arrays.keys[layer], arrays.values[layer], tables[buffers.slots[0]],
        scratch.spaces[thread], counters[_HEADS], heads,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    weights, count = arrays.out[layer], num_tokens - unwanted
    first, last = split_range(count, thread, num_threads, share_unit(scratch.of_out))
    prepare_tokens(weights, heads, first, last, scratch.of_out, thread)
    barrier_wait(cells, service, num_threads)
    wanted = residual[unwanted:]
    share_rows(
        counters[_OUT], thread, num_threads, weights, learned.out_bias[layer], scratch.of_out,
        wanted[:0] if numbers.adds_late else wanted, buffers.ffn_residual[unwanted:num_tokens], 0,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
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
    first, last = split_range(count, thread, num_threads, share_unit(scratch.of_head))
    hidden = buffers.hidden[begin + first : begin + last]
    final_norm(hidden, arrays, residual[first:last], normed[first:last])
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
