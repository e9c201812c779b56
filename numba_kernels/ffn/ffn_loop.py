"""The loop of a CPU service's thread: its share of every FFN request, without Python."""

from typing import NamedTuple

import numpy as np
from numba import types

from hotcold.numba_kernels.compiler import by_types, njit
from hotcold.numba_kernels.decode.candidates import FIRST, LAST, list_spans, shift_of
from hotcold.numba_kernels.ffn.expert_predictors import counting_neurons
from hotcold.numba_kernels.ffn.layer_ffn import layer_ffn, note_reads
from hotcold.numba_kernels.loops.doorbell import now_ns
from hotcold.numba_kernels.loops.mailbox import (
    ALL_FIRED,
    ALL_GATES,
    END_LAYER,
    FAILED,
    FFN,
    GIVER,
    LAST_FIRED,
    LAST_GATES,
    LAYER,
    LAYERS,
    NUM_COMPUTED,
    NUM_LISTED,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PING,
    STATUS,
    TARGET,
    WATCHED,
    WEIGHTS,
    await_input,
    decode_thresholds,
    finish_request,
    give_output,
    is_for_others,
    next_share,
    read_selection,
)


class NeuronBuckets(NamedTuple):
    """The bucket in which each neuron is counted.

    starts (L, B + 1), of `FfnArrays`; bucket (N,) uint16: of each of its rows; sizes (L, buckets)
    uint32
    """

    starts: np.ndarray
    bucket: np.ndarray
    sizes: np.ndarray


@by_types
def _chosen(  # type: ignore[no-untyped-def]
    thread, num_threads, cells, service, layer, selection, starts, x, predictors, scratch
):  # fmt: skip
    """The neurons that a request computes; for compiled code."""
    if isinstance(predictors, types.NoneType):
        return _as_selected
    return counting_neurons.py_func


def _as_selected(  # type: ignore[no-untyped-def]
    thread, num_threads, cells, service, layer, selection, starts, x, predictors, scratch
):  # fmt: skip
    return selection


@njit(nogil=True, cache=True)
def ffn_request(
    thread, num_threads, service, layer, buffers, source, scratch, predictors, predictor_scratch,
    buckets, function,
):  # fmt: skip
    """This thread's share of a layer's FFN, by the request in the mailbox; checks nothing.

    `source` as in `layer_ffn`; where its reads fail, the reply says so. `predictors` of experts and
    their scratch, or None twice. The reply's numbers of neurons are of
    the request's layers so far.
    """
    request, reply = buffers.requests[service], buffers.replies[service]
    num_tokens = request[NUM_TOKENS]
    x = buffers.ffn_input[:num_tokens]
    selection = _chosen(
        thread, num_threads, buffers.cells, service, layer,
        read_selection(buffers, service, buckets.starts[layer, -1] > buckets.starts[layer, 0]),
        buckets.starts, x, predictors, predictor_scratch,
    )  # fmt: skip
    is_done = layer_ffn(
        thread, num_threads, buffers.cells, service, layer, selection, decode_thresholds(request),
        x, source, scratch, function, buffers.partials[service, :num_tokens],
        buffers.more_partials[service],
    )  # fmt: skip
    if thread != 0:
        return
    note_reads(source, reply)
    if not is_done:
        reply[STATUS] = FAILED
        return
    if layer == request[LAYER]:
        reply[NUM_COMPUTED] = reply[NUM_UP] = reply[NUM_LISTED] = 0
    reply[NUM_LISTED] += selection.ids.shape[0]
    reply[NUM_COMPUTED] += scratch.counts.sum()
    reply[NUM_UP] += scratch.up_counts.sum()
    if request[WATCHED] and request[WEIGHTS] == TARGET:
        _count_neurons(service, layer, selection, buckets, num_tokens, buffers, scratch)


@njit(nogil=True, cache=True)
def _count_neurons(service, layer, selection, buckets, num_tokens, buffers, scratch):
    """Count in the arena the layer's neurons that this request has computed; by one thread."""
    starts, ids = buckets.starts[layer], selection.ids
    counts, bucket_of = buffers.neuron_counts[service, layer], buckets.bucket[starts[0] :]
    is_all = not selection.is_listed and selection.block_weights.shape[0] == 0
    for bucket in range(counts.shape[0]):
        counts[bucket, LAST_GATES] = buckets.sizes[layer, bucket] if is_all else np.uint32(0)
        counts[bucket, LAST_FIRED] = np.uint32(0)
    if not is_all:
        for span in list_spans(selection, starts, num_tokens, scratch.spans[0]):
            for candidate in range(span[FIRST], span[LAST]):
                n = ids[candidate] if selection.is_listed else candidate + shift_of(span)
                counts[bucket_of[n], LAST_GATES] += np.uint32(1)
    for thread in range(scratch.counts.shape[0]):
        first = scratch.firsts[thread]
        for n in scratch.fired_ids[first : first + scratch.counts[thread]]:
            counts[bucket_of[n], LAST_FIRED] += np.uint32(1)
    for bucket in range(counts.shape[0]):
        counts[bucket, ALL_FIRED] += counts[bucket, LAST_FIRED]
        counts[bucket, ALL_GATES] += counts[bucket, LAST_GATES]
    buffers.counted_steps[service, layer] += np.uint32(1)


@njit(nogil=True, cache=True)
def serve_ffn(
    thread, num_threads, service, seen, weights, buffers, source, scratch, predictors,
    predictor_scratch, buckets, function,
):  # fmt: skip
    """Serve requests after `seen` until one is left to Python; returns its number.

    A request is a layer's FFN, or one layer after the other that a GPU shares (`mailbox`). Left to
    Python are STOP, an FFN of more tokens than `scratch` holds, and requests for other `weights`
    (`is_for_others`). All threads that share it return; the caller lets one of them reply. 0: the
    service has ended (`next_share`).
    """
    while True:
        number, team = next_share(buffers.cells, service, thread, num_threads, seen)
        started = now_ns()
        if number == 0:
            return number
        if is_for_others(buffers.requests[service], weights):
            return number
        request = buffers.requests[service]
        first, end, is_shared = request[LAYER], request[LAYER] + 1, request[OPERATION] == LAYERS
        if request[OPERATION] == PING:
            end = first
        elif is_shared:
            end = request[END_LAYER]
        elif request[OPERATION] != FFN or request[NUM_TOKENS] > scratch.sums.shape[1]:
            return number
        for layer in range(first, end):
            if is_shared and not await_input(
                buffers.cells, service, request[GIVER], number, layer, thread
            ):
                break
            ffn_request(
                thread, team, service, layer, buffers, source, scratch, predictors,
                predictor_scratch, buckets, function,
            )  # fmt: skip
            if is_shared:
                give_output(buffers.cells, service, number, layer, team)
        finish_request(
            buffers.cells, buffers.requests, buffers.replies, buffers.cells[:0], service, number,
            team, started,
        )  # fmt: skip
        seen = np.int32(number)
