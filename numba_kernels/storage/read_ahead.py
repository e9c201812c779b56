"""Read-ahead: what the next layer will probably need, read while the disk would be idle.

The next layer's predictor or router scores this layer's input, since hidden states change little
from one layer to the next. The units with the highest scores that are not in memory are read. Reads
that have not started when the next layer begins are cancelled. The depth follows the hit rate.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate
from hotcold.numba_kernels.decode.predict import pack_planes_kernel, sign_scores_kernel
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.ir.bit_ir import INPUT_PLANES
from hotcold.numba_kernels.ir.vector_ir import dot_lone_row
from hotcold.numba_kernels.loops.predict_team import SignPredictors, bit_rows
from hotcold.numba_kernels.storage import MAX_GAP
from hotcold.numba_kernels.storage.neuron_file import GATE
from hotcold.numba_kernels.storage.offloaded_units import ReadAhead, give_rows, num_blocks
from hotcold.numba_kernels.storage.read_queue import (
    NOW,
    NUM_BATCHES,
    cancel_reads,
    free_batch,
    num_pending,
    submit_reads,
)
from hotcold.numba_kernels.storage.slots import (
    STAYS,
    bundles_of,
    is_requested,
    keep,
    load_state,
    request,
    was_used,
)

MIN_AHEAD = 16  # neurons; fewer are not worth the scores
_FIRST_AHEAD = 64
_MAX_TOKENS = 4  # of a step: more tokens use most of a layer's neurons
_ALONE = -1  # as max_gap: no two neurons share a read
# words of `ReadAhead.counts`: chosen experts where there was a guess, those of them that were
# guessed; units read ahead, those of them that were used
NUM_CHOSEN, NUM_GUESSED, NUM_AHEAD, NUM_USEFUL = range(4)


def new_read_ahead(
    predictors: SignPredictors | None, num_layers: int, num_units: int, num_threads: int = 0,
    limit: int = 0,
) -> ReadAhead:  # fmt: skip
    """Read ahead at most `limit` neurons of a layer, by predictors; or experts, once guessed."""
    first, least, max_gap = min(limit, _FIRST_AHEAD), MIN_AHEAD, _ALONE
    if predictors is None:
        nothing = np.zeros(1, np.int64)
        floats, zeros = np.zeros(0, np.float32), np.zeros((0, 0), np.float32)
        ints, bits = nothing[:0], np.zeros(0, np.uint64)
        predictors = SignPredictors(nothing, ints, ints, bits, floats, zeros, zeros)
        first, limit, least, max_gap = num_units, num_units, 1, MAX_GAP
    width = predictors.centers.shape[1]
    return ReadAhead(
        predictors=predictors,
        guessed=np.zeros((0, num_units), np.float32),
        scores=np.zeros(num_units, np.float32),
        planes=np.zeros((num_threads, INPUT_PLANES, -(-width // 64)), np.uint64),
        most=np.full(num_layers, first, np.int64),
        least=least,
        limit=limit,
        max_gap=max_gap,
        units=np.zeros(limit, np.int64),
        parts=np.zeros(limit, np.uint8),
        state=np.array([-1, 0]),
        counts=np.zeros(4, np.int64),
    )


@njit(nogil=True, cache=True)
def next_layer_ahead(ahead, layer, num_tokens):
    """The layer whose neurons are read ahead while `layer` is computed, or -1."""
    offsets = ahead.predictors.offsets
    num_layers = offsets.shape[0] - 1
    if num_layers == 0 or num_tokens > _MAX_TOKENS:
        return -1
    following = (layer + 1) % num_layers
    if following == 0 or offsets[following + 1] == offsets[following]:
        return -1  # the next token is unknown, or the layer has no predictor
    return following


@njit(nogil=True, cache=True)
def _own_part(num_neurons, thread, num_threads):
    """First and last (exclusive) neuron that a thread scores."""
    return split_range(num_neurons, thread, num_threads, 4)


@njit(nogil=True, cache=True, _nrt=True)
def score_ahead(ahead, layer, thread, num_threads, x):
    """scores[n] = the largest score of any token of x (T, d), for this thread's neurons."""
    predictors, scores, planes = ahead.predictors, ahead.scores, ahead.planes[thread]
    first, last = predictors.offsets[layer], predictors.offsets[layer + 1]
    rows = bit_rows(predictors, layer)
    begin, end = _own_part(last - first, thread, num_threads)
    other = np.empty(last - first if x.shape[0] > 1 else 0, np.float32)
    for t in range(x.shape[0]):
        unit = pack_planes_kernel(x[t], predictors.centers[layer], predictors.scales[layer], planes)
        sign_scores_kernel(
            rows, planes, unit, x.shape[1], predictors.thresholds[first:last],
            scores if t == 0 else other, begin, end,
        )  # fmt: skip
        for n in range(begin, end if t else begin):
            scores[n] = max(scores[n], other[n])


@njit(nogil=True, cache=True)
def rescore_ahead(shard, layer, thread, num_threads, x, function, num_tokens):
    """Replace predicted scores by computed ones where gates are loaded and up and down rows not.

    A score is the largest activation of any token; this thread's part of `score_ahead`. Another
    thread may evict a slot meanwhile, which only makes that score a worse guess.
    """
    gates, scores, arrays = shard.gates, shard.ahead.scores, shard.arrays
    gate, bias = arrays.gate, arrays.gate_bias
    slot_of, up_downs_requested = gates.slot_of, shard.up_downs.requested
    first, last = arrays.starts[layer, 0], arrays.starts[layer, arrays.starts.shape[1] - 1]
    begin, end = _own_part(last - first, thread, num_threads)
    for n in range(begin, end):
        row = first + n
        if scores[n] <= 0 or up_downs_requested[row] or load_state(gates, row) <= 0:
            continue
        shift = bias[row] if bias.shape[0] else np.float32(0)
        score = np.float32(0)
        slot = max(0, np.int64(slot_of[row]))
        for t in range(num_tokens):
            product = dot_lone_row(gate, slot, x, t)
            score = max(score, activate(function, product + shift))
        scores[n] = score


@njit(nogil=True, cache=True)
def _score_blocks(shard, first, weights, num_tokens, scores):
    """scores[b] = the largest of block b's weights; what is in memory of those chosen stays."""
    for block in range(scores.shape[0]):
        score = np.float32(0)
        for t in range(num_tokens):
            score = max(score, weights[t, block])
        scores[block] = score
        if score > 0:
            keep(shard.gates, first + block)


@njit(nogil=True, cache=True, _nrt=True)
def _likeliest(shard, first, scores, most):
    """Units of a layer from `first` on to read ahead: those whose gates are there, then others.

    Only the highest scores of each where `most` is too few for all.
    """
    gates, up_downs = shard.gates, shard.up_downs
    found, units = np.empty(scores.shape[0], np.int64), np.empty(most, np.int64)
    num_units = 0
    for has_gate in (True, False):
        count = 0
        for n in range(scores.shape[0]):
            unit = first + n
            if scores[n] <= 0 or is_requested(gates, unit) != has_gate:
                continue
            if not has_gate or not is_requested(up_downs, unit):
                found[count] = n
                count += 1
        left = most - num_units
        if count > left:
            found[:left] = found[:count][np.argsort(-scores[found[:count]])[:left]]
            count = left
        for i in range(count):
            units[num_units] = first + found[i]
            num_units += 1
    return units[:num_units]


@njit(nogil=True, cache=True)
def _list_missing(shard, slots, unit, batch, count):
    """Append what has to be read of a unit to a batch of `count` bundles; returns the new count."""
    rows, parts = shard.queue.rows[batch], shard.queue.parts[batch]
    for bundle in bundles_of(slots, unit):
        if request(slots, bundle):
            part = slots.part & shard.file.parts[bundle]
            if count and rows[count - 1] == bundle:  # a neuron's other part
                parts[count - 1] |= part
            else:
                rows[count], parts[count] = bundle, part
                count += 1
    return count


@njit(nogil=True, cache=True)
def submit_ahead(shard, units, parts):
    """Submit reads of units of a layer behind all others, in that order, as far as there are slots.

    Those that are in memory stay there. Returns n: units[:n] are then those of which something is
    read, and parts[:n] what.
    """
    queue, gates, up_downs = shard.queue, shard.gates, shard.up_downs
    batch = free_batch(queue)
    if batch == NUM_BATCHES:
        return 0
    for unit in units:
        keep(gates, unit)
        keep(up_downs, unit)
    count, num_read = 0, 0
    for unit in units:
        before, has_gate = count, is_requested(gates, unit)
        if not has_gate:
            if give_rows(shard, gates, unit) < 0:
                break
            count = _list_missing(shard, gates, unit, batch, count)
        if (has_gate or shard.reads_whole[0]) and not is_requested(up_downs, unit):
            if give_rows(shard, up_downs, unit) < 0:
                break
            count = _list_missing(shard, up_downs, unit, batch, count)
        if count > before:
            units[num_read], parts[num_read] = unit, queue.parts[batch, before]
            num_read += 1
    submit_reads(queue, shard.file, batch, count, shard.ahead.max_gap)
    return num_read


@njit(nogil=True, cache=True, _nrt=True)
def read_likeliest(shard, layer, first, last):
    """Submit reads of those of a layer's units first..last-1 that have the highest scores."""
    ahead = shard.ahead
    units = _likeliest(shard, first, ahead.scores[: last - first], ahead.most[layer])
    num_read = submit_ahead(shard, units, ahead.parts)
    ahead.units[:num_read] = units[:num_read]
    ahead.state[0], ahead.state[1] = layer, num_read


@njit(nogil=True, cache=True)
def adapt(shard, layer):
    """Adapt how many of a layer's units are read ahead, once it has looked up all it needs."""
    ahead, gates, up_downs = shard.ahead, shard.gates, shard.up_downs
    num_read, num_used, most = ahead.state[1], 0, ahead.most[layer]
    if ahead.state[0] != layer or num_read == 0:
        return
    for i in range(num_read):
        num_used += was_used(gates if ahead.parts[i] & GATE else up_downs, ahead.units[i])
    ahead.state[0] = -1
    ahead.counts[NUM_AHEAD] += num_read
    ahead.counts[NUM_USEFUL] += num_used
    if 2 * num_used >= num_read:
        # Relative to what was read: cancelled reads say nothing about the guess.
        more = num_read + num_read // 4 + 1
        ahead.most[layer] = min(ahead.limit, max(most, more))
    else:
        ahead.most[layer] = max(ahead.least, most - max(1, most // 8))


@njit(nogil=True, cache=True)
def note_guesses(shard, layer, blocks):
    """Compare what was guessed for the layer with `blocks`, which it has looked up, and `adapt`.

    `guessed` is already that of the layer after it, `scores` are still this one's.
    """
    ahead, first = shard.ahead, layer * num_blocks(shard)
    if ahead.state[0] == layer:
        for block in blocks:
            if shard.gates.slot_of[first + block] != STAYS:
                ahead.counts[NUM_CHOSEN] += 1
                ahead.counts[NUM_GUESSED] += ahead.scores[block] > 0
    adapt(shard, layer)


@njit(nogil=True, cache=True)
def read_guessed(shard, layer, num_tokens):
    """Submit reads of experts that the layer will probably choose, the likeliest of them."""
    ahead, first = shard.ahead, layer * num_blocks(shard)
    ahead.state[0] = -1
    if num_tokens > ahead.guessed.shape[0] or layer == shard.arrays.starts.shape[0]:
        return
    _score_blocks(shard, first, ahead.guessed, num_tokens, ahead.scores)
    read_likeliest(shard, layer, first, first + num_blocks(shard))


@njit(nogil=True, cache=True, _nrt=True)
def request_routed(shard, layer, block_weights):
    """Submit reads of experts that tokens have chosen, instead of guessed ones not begun yet.

    Nothing is done where the layer's request came first, or where the disk lags behind.
    """
    if num_pending(shard.queue, NOW) or free_batch(shard.queue) == NUM_BATCHES:
        return
    scores = np.empty(block_weights.shape[1], np.float32)
    first = layer * scores.shape[0]
    _score_blocks(shard, first, block_weights, block_weights.shape[0], scores)
    cancel_reads(shard.queue)
    units = _likeliest(shard, first, scores, np.int64(scores.shape[0]))
    submit_ahead(shard, units, np.empty(units.shape[0], np.uint8))
