"""The loop of a CPU service's thread over offloaded neurons."""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.serve.doorbell import now_ns
from hotcold.numba_kernels.serve.mailbox import (
    BYTES_READ,
    FAILED,
    FFN,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PARTS_LOOKED_UP,
    PARTS_MISSED,
    PING,
    READ_WAIT_NS,
    STATUS,
    WATCHED,
    finish_request,
    next_request,
    read_selection,
    read_thresholds,
)
from hotcold.numba_kernels.serve.serve_ffn import count_neurons
from hotcold.numba_kernels.storage.neuron_slots import NUM_LOOKUPS, NUM_MISSES
from hotcold.numba_kernels.storage.offloaded_ffn import offloaded_layer_ffn


@njit(nogil=True, cache=True)
def _offloaded_request(thread, num_threads, service, buffers, shard, scratch, buckets, function):
    """`numba_kernels.serve.serve_ffn.ffn_request`; the reply also counts reads so far."""
    request, reply = buffers.requests[service], buffers.replies[service]
    layer, num_tokens, num_ids = request[LAYER], request[NUM_TOKENS], request[NUM_IDS]
    chosen = read_selection(buffers, service)
    done = offloaded_layer_ffn(
        thread, num_threads, buffers.cells, service, layer, chosen.is_listed, chosen.ids,
        chosen.token_masks, read_thresholds(request), buffers.ffn_input[:num_tokens], shard,
        scratch, function, buffers.partials[service, :num_tokens],
    )  # fmt: skip
    if thread != 0:
        return
    reply[BYTES_READ] = shard.queue.counts[:, 0].sum()
    reply[READ_WAIT_NS] = shard.waited_ns.max()
    gates, up_downs = shard.gates.state, shard.up_downs.state
    reply[PARTS_LOOKED_UP] = gates[NUM_LOOKUPS] + up_downs[NUM_LOOKUPS]
    reply[PARTS_MISSED] = gates[NUM_MISSES] + up_downs[NUM_MISSES]
    if not done:
        reply[STATUS] = FAILED
        return
    reply[NUM_COMPUTED] = scratch.counts.sum()
    reply[NUM_UP] = scratch.up_counts.sum()
    if request[WATCHED]:
        offsets = shard.arrays.offsets
        first, last = offsets[layer], offsets[layer + 1]
        count_neurons(service, layer, num_ids, chosen.ids, buckets, first, last, buffers, scratch)


@njit(nogil=True, cache=True)
def serve_offloaded_ffn(
    thread, num_threads, service, seen, buffers, shard, scratch, buckets, function
):
    """`numba_kernels.serve.serve_ffn.serve_ffn` over offloaded neurons."""
    while True:
        number = next_request(buffers.cells, service, seen)
        started = now_ns()
        operation = buffers.requests[service, OPERATION]
        if operation == FFN and buffers.requests[service, NUM_TOKENS] <= scratch.sums.shape[1]:
            _offloaded_request(
                thread, num_threads, service, buffers, shard, scratch, buckets, function
            )
        elif operation != PING:
            return number
        finish_request(
            buffers.cells, buffers.replies, buffers.cells[:0], service, number, num_threads, started
        )
        seen = np.int32(number)
