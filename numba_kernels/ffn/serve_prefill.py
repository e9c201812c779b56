"""The loop of a CPU service's thread for prompts over neurons in memory, layer after layer.

Python has no part in it: a layer of a small model takes less time than that would.
"""

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ffn.prompt_ffn import prompt_gates, prompt_sums
from hotcold.numba_kernels.loops.doorbell import now_ns
from hotcold.numba_kernels.loops.mailbox import (
    COUNT_FFN,
    FFN,
    LAYER,
    NO_PROMPTS,
    NUM_COMPUTED,
    NUM_TOKENS,
    NUM_UNWANTED,
    NUM_UP,
    OPERATION,
    WEIGHS_BLOCKS,
    decode_thresholds,
    finish_request,
    is_for_others,
    next_share,
)


@njit(nogil=True, cache=True, inline="always")
def prompt_ffn_request(
    thread, num_threads, service, buffers, source, predictors, fired_counts, scratch, function
):  # fmt: skip
    """This thread's share of a prompt's FFN request in the mailbox; checks nothing.

    fired_counts (N,) int64: of all neurons that fire, by COUNT_FFN requests
    """
    request, cells, reply = buffers.requests[service], buffers.cells, buffers.replies[service]
    layer, last, first = request[LAYER], request[NUM_TOKENS], request[NUM_UNWANTED]
    starts, skips = source.starts[layer], decode_thresholds(request).gate >= 0
    begin, end = starts[0], starts[starts.shape[0] - 1]
    counts = fired_counts[begin : end if request[OPERATION] == COUNT_FFN else begin]
    weights = buffers.block_weights[first : last if request[WEIGHS_BLOCKS] else first]
    x, out = buffers.ffn_input[first:last], buffers.partials[service, first:last]
    prompt_gates(
        thread, num_threads, cells, service, x, source, layer, starts[: starts.shape[0] - 1],
        weights, skips or counts.shape[0] > 0, predictors, scratch, function,
    )  # fmt: skip
    prompt_sums(
        thread, num_threads, cells, service, x, source, layer, weights, skips, counts, scratch,
        function, out, buffers.more_partials[service, :, first:],
    )  # fmt: skip
    if thread == 0:
        reply[NUM_COMPUTED] = reply[NUM_UP] = end - begin


@njit(nogil=True, cache=True)
def serve_prompt_ffn(
    thread, num_threads, service, seen, weights, most_tokens, buffers, source, predictors,
    fired_counts, scratch, function,
):  # fmt: skip
    """Serve FFNs of more than `most_tokens` tokens, and counts, after `seen`.

    Returns the next other request's number. `weights` and 0 as for `serve_ffn`, whose loop goes on
    then.
    """
    while True:
        number, team = next_share(buffers.cells, service, thread, num_threads, seen)
        started = now_ns()
        if number == 0:
            return number
        request = buffers.requests[service]
        if is_for_others(request, weights):
            return number
        # A count is taken here whatever its tokens, but not by who only looks at the mailbox.
        num_tokens = NO_PROMPTS if request[OPERATION] == COUNT_FFN else request[NUM_TOKENS]
        if request[OPERATION] not in (FFN, COUNT_FFN) or num_tokens <= most_tokens:
            return number
        prompt_ffn_request(
            thread, team, service, buffers, source, predictors, fired_counts, scratch, function
        )
        finish_request(
            buffers.cells, buffers.requests, buffers.replies, buffers.cells[:0], service, number,
            team, started,
        )  # fmt: skip
        seen = number
