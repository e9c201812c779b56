"""One thread of a CPU service: its share of every FFN request, without Python in between."""

from typing import NamedTuple

import numpy as np
from numba import njit

from numba_kernels.doorbell import barrier, now_ns
from numba_kernels.ffn import NO_IDS, NO_TOKENS, gate_kernel, up_down_kernel
from numba_kernels.mailbox import (
    BARRIER_COUNT,
    BARRIER_GENERATION,
    FFN,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    PING,
    SKIP_SILENT,
    arrive,
    cell,
    next_request,
)
from numba_kernels.rows import share


class FfnArrays(NamedTuple):
    """A shard of cold neurons, all layers stacked: layer l has rows offsets[l]:offsets[l + 1].

    offsets (L + 1,) int64; gate, up, down (N, d) weights, up (0, d) in a two-matrix FFN;
    gate_bias, up_bias (N,) or (0,), down_bias (L, d) or (L, 0) float32
    """

    offsets: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray


class FfnScratch(NamedTuple):
    """Work space: sums (threads, T, d), fired_ids (threads, N), gates (threads, T, N + 4),
    counts (threads,) int64; T is the most tokens of one request, N of one layer."""

    sums: np.ndarray
    fired_ids: np.ndarray
    gates: np.ndarray
    counts: np.ndarray


@njit(nogil=True, cache=True)
def _slice(bias, first, last):
    return bias[first:last] if bias.shape[0] else bias


@njit(nogil=True, cache=True)
def ffn_request(thread, num_threads, service, wires, arrays, scratch, code):
    """Answer the FFN request that stands in the mailbox: this thread's share; checks nothing.

    Each thread takes an equal run of the candidates and sums into rows of its own; after a barrier
    each adds up one range of columns, always in thread order, so that a result never depends on
    which thread was faster.
    """
    request = wires.requests[service]
    layer, num_tokens, num_ids = request[LAYER], request[NUM_TOKENS], request[NUM_IDS]
    first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
    gate, down = arrays.gate[first:last], arrays.down[first:last]
    up = arrays.up[first:last] if arrays.up.shape[0] else arrays.up
    x = wires.ffn_input[:num_tokens]
    ids = wires.active_ids[service, :num_ids] if num_ids > 0 else NO_IDS
    tokens = NO_TOKENS
    if num_ids > 0 and num_tokens > 1:
        tokens = wires.active_tokens[service, :num_ids]
    begin, end = share(num_ids if num_ids >= 0 else last - first, thread, num_threads, 4)
    sums = scratch.sums[thread, :num_tokens]
    sums[:] = 0
    gates = scratch.gates[thread, :num_tokens]
    fired_ids = scratch.fired_ids[thread]
    num_fired = gate_kernel(
        gate, _slice(arrays.gate_bias, first, last), ids, tokens, x, code,
        request[SKIP_SILENT] == 0, begin, end, fired_ids, gates,
    )  # fmt: skip
    up_bias = _slice(arrays.up_bias, first, last)
    up_down_kernel(up, up_bias, down, fired_ids, num_fired, gates, x, sums)
    scratch.counts[thread] = num_fired
    barrier(
        wires.words, cell(service, BARRIER_COUNT), cell(service, BARRIER_GENERATION), num_threads
    )
    _reduce(
        thread,
        num_threads,
        wires.partials[service],
        scratch.sums,
        arrays.down_bias[layer],
        num_tokens,
    )
    if thread == 0:
        wires.replies[service, NUM_COMPUTED] = scratch.counts.sum()


@njit(nogil=True, cache=True)
def _reduce(thread, num_threads, partial, sums, down_bias, num_tokens):
    begin, end = share(partial.shape[1], thread, num_threads, 16)
    for t in range(num_tokens):
        target = partial[t, begin:end]
        target[:] = sums[0, t, begin:end]
        for other in range(1, num_threads):
            part = sums[other, t, begin:end]
            for i in range(target.shape[0]):
                target[i] += part[i]
        if down_bias.shape[0]:
            bias = down_bias[begin:end]
            for i in range(target.shape[0]):
                target[i] += bias[i]


@njit(nogil=True, cache=True)
def serve_ffn(thread, num_threads, service, seen, wires, arrays, scratch, code):
    """Answer requests from `seen` on until one comes that is Python's; returns its number.

    Python's are STOP, and an FFN of more tokens than `scratch` holds. Every thread returns at a
    Python request; the caller lets one of them answer it.
    """
    while True:
        number = next_request(wires.words, service, seen)
        started = now_ns()
        operation = wires.requests[service, OPERATION]
        if operation == FFN and wires.requests[service, NUM_TOKENS] <= scratch.sums.shape[1]:
            ffn_request(thread, num_threads, service, wires, arrays, scratch, code)
        elif operation != PING:
            return number
        arrive(wires.words, wires.replies, service, number, num_threads, started)
        seen = number
