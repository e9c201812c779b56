"""The loop of a CPU service's thread: its share of every FFN request, without Python."""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.serve.doorbell import now_ns
from hotcold.numba_kernels.serve.layer_ffn import layer_ffn
from hotcold.numba_kernels.serve.mailbox import (
    ALL_FIRED,
    ALL_GATES,
    FFN,
    LAST_FIRED,
    LAST_GATES,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PING,
    WATCHED,
    finish_request,
    next_request,
    read_selection,
    read_thresholds,
)


class NeuronBuckets(NamedTuple):
    """The bucket in which each neuron is counted.

    bucket (N,) uint8: of each row of `FfnArrays`; sizes (L, buckets) uint32
    """

    bucket: np.ndarray
    sizes: np.ndarray


@njit(nogil=True, cache=True)
def ffn_request(thread, num_threads, service, buffers, arrays, scratch, buckets, function):
    """This thread's share of the FFN request in the mailbox; checks nothing."""
    request = buffers.requests[service]
    layer, num_tokens, num_ids = request[LAYER], request[NUM_TOKENS], request[NUM_IDS]
    chosen = read_selection(buffers, service)
    layer_ffn(
        thread, num_threads, buffers.cells, service, layer, chosen.is_listed, chosen.ids,
        chosen.token_masks, read_thresholds(request), buffers.ffn_input[:num_tokens], arrays,
        scratch, function, buffers.partials[service, :num_tokens],
    )  # fmt: skip
    if thread == 0:
        buffers.replies[service, NUM_COMPUTED] = scratch.counts.sum()
        buffers.replies[service, NUM_UP] = scratch.up_counts.sum()
        if request[WATCHED]:
            first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
            ids = chosen.ids
            count_neurons(service, layer, num_ids, ids, buckets, first, last, buffers, scratch)


@njit(nogil=True, cache=True)
def count_neurons(service, layer, num_ids, ids, buckets, first, last, buffers, scratch):
    """Count in the arena the layer's neurons that this request has computed; by one thread."""
    counts, bucket_of = buffers.neuron_counts[service, layer], buckets.bucket[first:last]
    for bucket in range(counts.shape[0]):
        every = buckets.sizes[layer, bucket]
        counts[bucket, LAST_GATES] = every if num_ids < 0 else np.uint32(0)
        counts[bucket, LAST_FIRED] = np.uint32(0)
    for n in ids:
        counts[bucket_of[n], LAST_GATES] += np.uint32(1)
    for thread in range(scratch.counts.shape[0]):
        for n in scratch.fired_ids[thread, : scratch.counts[thread]]:
            counts[bucket_of[n], LAST_FIRED] += np.uint32(1)
    for bucket in range(counts.shape[0]):
        counts[bucket, ALL_FIRED] += counts[bucket, LAST_FIRED]
        counts[bucket, ALL_GATES] += counts[bucket, LAST_GATES]
    buffers.counted_steps[service, layer] += np.uint32(1)


@njit(nogil=True, cache=True)
def serve_ffn(thread, num_threads, service, seen, buffers, arrays, scratch, buckets, function):
    """Serve requests after `seen` until one is left to Python; returns its number.

    Left to Python are STOP, and an FFN of more tokens than `scratch` holds. All threads return for
    it; the caller lets one of them reply.
    """
    while True:
        number = next_request(buffers.cells, service, seen)
        started = now_ns()
        operation = buffers.requests[service, OPERATION]
        if operation == FFN and buffers.requests[service, NUM_TOKENS] <= scratch.sums.shape[1]:
            ffn_request(thread, num_threads, service, buffers, arrays, scratch, buckets, function)
        elif operation != PING:
            return number
        finish_request(
            buffers.cells, buffers.replies, buffers.cells[:0], service, number, num_threads, started
        )
        seen = number
