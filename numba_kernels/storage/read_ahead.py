"""Read-ahead: what the next layer will probably need, read while the disk would be idle.

The next layer's predictor scores this layer's input, since hidden states change little from one
layer to the next. The neurons with the highest scores that are not in memory are read first. Reads
that have not started when the next layer begins are cancelled. The depth follows the hit rate.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.predict import pack_planes_kernel, sign_scores_kernel
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.ir.bit_ir import INPUT_PLANES
from hotcold.numba_kernels.loops.predict_team import SignPredictors, bit_rows
from hotcold.numba_kernels.storage.neuron_file import GATE
from hotcold.numba_kernels.storage.slots import was_used

MIN_AHEAD = 16  # neurons; fewer are not worth the scores
_FIRST_AHEAD = 64
_MAX_TOKENS = 4  # of a step: more tokens use most of a layer's neurons
# words of `ReadAhead.counts`: neurons read ahead, and those of them that were used
NUM_AHEAD, NUM_USEFUL = 0, 1


class ReadAhead(NamedTuple):
    """Predictors of this service's neurons, and work space.

    predictors: without layers where nothing is read ahead
    most (L,) int64: how many of a layer's neurons to read; limit (1,) int64: the maximum of that
    scores (N of a layer,) float32; planes (threads, 3, words) uint64
    rows (limit,) int32, parts (limit,) uint8: submitted last; state (2,) int64: for which layer,
    and how many; counts (2,) int64
    """

    predictors: SignPredictors
    most: np.ndarray
    limit: np.ndarray
    scores: np.ndarray
    planes: np.ndarray
    rows: np.ndarray
    parts: np.ndarray
    state: np.ndarray
    counts: np.ndarray


def new_read_ahead(predictors: SignPredictors | None, num_threads: int, limit: int) -> ReadAhead:
    """Read ahead at most `limit` neurons of a layer; none without predictors."""
    nothing = np.zeros(1, np.int64)
    if predictors is None or limit < MIN_AHEAD:
        floats, zeros = np.zeros(0, np.float32), np.zeros((0, 0), np.float32)
        ints, bits = nothing[:0], np.zeros(0, np.uint64)
        predictors = SignPredictors(nothing, ints, ints, bits, floats, zeros, zeros)
    num_layers, width = predictors.centers.shape
    return ReadAhead(
        predictors=predictors,
        most=np.full(num_layers, min(limit, _FIRST_AHEAD), np.int64),
        limit=np.array([limit]),
        scores=np.zeros(int(np.diff(predictors.offsets).max(initial=0)), np.float32),
        planes=np.zeros((num_threads, INPUT_PLANES, -(-width // 64)), np.uint64),
        rows=np.zeros(max(0, limit), np.int32),
        parts=np.zeros(max(0, limit), np.uint8),
        state=np.array([-1, 0]),
        counts=np.zeros(2, np.int64),
    )


@njit(nogil=True, cache=True)
def next_layer_ahead(ahead, layer, num_tokens):
    """The layer to read ahead while `layer` is computed, or -1."""
    offsets = ahead.predictors.offsets
    num_layers = offsets.shape[0] - 1
    if num_layers == 0 or num_tokens > _MAX_TOKENS:
        return -1
    following = (layer + 1) % num_layers
    if following == 0 or offsets[following + 1] == offsets[following]:
        return -1  # the next token is unknown, or the layer has no predictor
    return following


@njit(nogil=True, cache=True)
def ahead_part(num_neurons, thread, num_threads):
    """First and last (exclusive) neuron that a thread scores."""
    return split_range(num_neurons, thread, num_threads, 4)


@njit(nogil=True, cache=True, _nrt=True)
def score_ahead(ahead, layer, thread, num_threads, x):
    """scores[n] = the largest score of any token of x (T, d), for this thread's neurons."""
    predictors, scores, planes = ahead.predictors, ahead.scores, ahead.planes[thread]
    first, last = predictors.offsets[layer], predictors.offsets[layer + 1]
    rows = bit_rows(predictors, layer)
    begin, end = ahead_part(last - first, thread, num_threads)
    other = np.empty(last - first if x.shape[0] > 1 else 0, np.float32)
    for t in range(x.shape[0]):
        unit = pack_planes_kernel(x[t], predictors.centers[layer], predictors.scales[layer], planes)
        sign_scores_kernel(
            rows, planes, unit, x.shape[1], predictors.thresholds[first:last],
            scores if t == 0 else other, begin, end,
        )  # fmt: skip
        for n in range(begin, end if t else begin):
            scores[n] = max(scores[n], other[n])


@njit(nogil=True, cache=True, _nrt=True)
def likeliest(ahead, layer, first, gates, up_downs):
    """The rows to read ahead: neurons whose loaded gates fire, then those that were predicted.

    Only the highest scores of each where the depth is too small for all.
    """
    scores, most = ahead.scores, ahead.most[layer]
    num_neurons = ahead.predictors.offsets[layer + 1] - ahead.predictors.offsets[layer]
    found = np.empty(num_neurons, np.int64)
    rows, num_rows = ahead.rows, 0
    for has_gate in (True, False):
        count = 0
        for n in range(num_neurons):
            row = first + n
            if scores[n] <= 0 or (gates.requested[row] != 0) != has_gate:
                continue
            if not has_gate or not up_downs.requested[row]:
                found[count] = n
                count += 1
        left = most - num_rows
        if count > left:
            found[:left] = found[:count][np.argsort(-scores[found[:count]])[:left]]
            count = left
        for i in range(count):
            rows[num_rows] = first + found[i]
            num_rows += 1
    return rows[:num_rows]


@njit(nogil=True, cache=True)
def note_started(ahead, gates, up_downs):
    """Keep the submitted rows whose reads were not cancelled."""
    kept = 0
    for i in range(ahead.state[1]):
        row, part = ahead.rows[i], ahead.parts[i]
        if (gates if part & GATE else up_downs).requested[row]:
            ahead.rows[kept], ahead.parts[kept] = row, part
            kept += 1
    ahead.state[1] = kept


@njit(nogil=True, cache=True)
def adapt(ahead, layer, gates, up_downs):
    """Adapt the layer's depth, once it has looked up all that it needs."""
    num_read, num_used = ahead.state[1], 0
    if ahead.state[0] != layer or num_read == 0:
        return
    for i in range(num_read):
        num_used += was_used(gates if ahead.parts[i] & GATE else up_downs, ahead.rows[i])
    ahead.state[0] = -1
    ahead.counts[NUM_AHEAD] += num_read
    ahead.counts[NUM_USEFUL] += num_used
    if 2 * num_used >= num_read:
        # Relative to what was read: cancelled reads say nothing about the predictor.
        more = num_read + num_read // 4 + 1
        ahead.most[layer] = min(ahead.limit[0], max(ahead.most[layer], more))
    else:
        ahead.most[layer] = max(MIN_AHEAD, ahead.most[layer] - ahead.most[layer] // 8)
