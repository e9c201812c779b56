"""The sign predictor on several cores: the driver and helper threads.

Waking an idle core takes as long as a core needs for its share, so the driver does not wake the
helpers: like the driver they sleep at the doorbell that the attention service rings when the FFN's
input is ready. Their task was written before that request was sent.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.predict import (
    pack_planes_kernel,
    select_kernel,
    sign_scores_kernel,
)
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.serve.doorbell import (
    INTS_A_CELL,
    atomic_add,
    atomic_load,
    atomic_store,
    sleep_change,
    wait_change,
)
from hotcold.numba_kernels.serve.mailbox import DONE, IDLE_NS, NUM_IDS, SPINS, cell
from hotcold.numba_kernels.serve.work_stealing import block_rows, next_block

_POLL_NS = 50_000  # helpers leave without ringing

# words of a task
NUMBER, LAYER, NUM_TOKENS, INPUT, STOP = range(5)
NUM_TASK_WORDS = 8
OPEN, INSIDE = 0, 1  # cells of `doors`
NUM_DOORS = 2
FFN_INPUT, MIXED, HIDDEN = range(3)  # as INPUT: the scored array of the buffers


class SignPredictors(NamedTuple):
    """The sign predictors of all layers, stacked: layer l scores neurons offsets[l]:offsets[l + 1].

    offsets (L + 1,), starts, row_words (L,) int64; bits (words,) uint64: rows of layer l, each of
    row_words[l] words, from starts[l] on, in the form of `numba_kernels.decode.predict`;
    thresholds (N,), centers, scales (L, d) float32
    """

    offsets: np.ndarray
    starts: np.ndarray
    row_words: np.ndarray
    bits: np.ndarray
    thresholds: np.ndarray
    centers: np.ndarray
    scales: np.ndarray


class TeamWork(NamedTuple):
    """State that the threads of a team share.

    task (8,) int64: the words above; doors (2 * 16,) int32: cell OPEN has the task's sequence
    number while helpers may start, cell INSIDE counts helpers at work; scores (T, N) float32;
    planes (threads, 3, words) uint64; counters (T, threads * 16) int32: blocks of rows taken
    """

    task: np.ndarray
    doors: np.ndarray
    scores: np.ndarray
    planes: np.ndarray
    counters: np.ndarray


class PredictTeam(NamedTuple):
    """A team, and the CPU services' shares of the neurons that it scores.

    bounds (L, S + 1) int64: service s has the neurons bounds[l, s]:bounds[l, s + 1] of layer l
    """

    num_threads: int
    predictors: SignPredictors
    work: TeamWork
    bounds: np.ndarray


def _no_team() -> PredictTeam:
    ints, floats = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
    bits, planes = np.zeros(0, np.uint64), np.zeros((0, 0, 0), np.uint64)
    predictors = SignPredictors(ints, ints, ints, bits, floats.reshape(-1), floats, floats)
    counters = np.zeros((0, 0), np.int32)
    work = TeamWork(ints, counters.reshape(-1), floats, planes, counters)
    return PredictTeam(0, predictors, work, np.zeros((0, 0), np.int64))


NO_TEAM = _no_team()  # where no team predicts


@njit(nogil=True, cache=True)
def bit_rows(predictors, layer):
    """The bits of the layer's neurons: (neurons, words) uint64."""
    count = predictors.offsets[layer + 1] - predictors.offsets[layer]
    first, words = predictors.starts[layer], predictors.row_words[layer]
    return predictors.bits[first : first + count * words].reshape(count, words)


@njit(nogil=True, cache=True)
def _work_stealing_scores(thread, num_threads, layer, x, predictors, work):
    """scores[t, n] of the neurons in the blocks that this thread takes; checks nothing."""
    first, last = predictors.offsets[layer], predictors.offsets[layer + 1]
    rows = bit_rows(predictors, layer)
    center, scale = predictors.centers[layer], predictors.scales[layer]
    thresholds, size = predictors.thresholds[first:last], block_rows(rows)
    planes = work.planes[thread]
    for t in range(x.shape[0]):
        counters, scores = work.counters[t], work.scores[t]
        unit = pack_planes_kernel(x[t], center, scale, planes)
        for turn in range(num_threads):
            part = (thread + turn) % num_threads
            begin, end = split_range(last - first, part, num_threads, 4)
            row = begin + next_block(counters, part) * size
            while row < end:
                sign_scores_kernel(
                    rows, planes, unit, x.shape[1], thresholds, scores, row, min(row + size, end)
                )
                row = begin + next_block(counters, part) * size


@njit(nogil=True, cache=True)
def _score_task(thread, num_threads, buffers, predictors, work):
    num_tokens = work.task[NUM_TOKENS]
    x = buffers.ffn_input
    if work.task[INPUT] == MIXED:
        x = buffers.mixed
    elif work.task[INPUT] == HIDDEN:
        x = buffers.hidden
    _work_stealing_scores(thread, num_threads, work.task[LAYER], x[:num_tokens], predictors, work)


@njit(nogil=True, cache=True)
def help_predict(thread, num_threads, service, seen, buffers, predictors, work):
    """A helper's loop until STOP: compute blocks of each task once `service` rings."""
    while True:
        number = sleep_change(buffers.cells, cell(service, DONE), seen, IDLE_NS)
        if work.task[STOP]:
            return
        # Enter, then check: either `close_task` sees this thread, or this thread sees it closed.
        atomic_add(work.doors, INSIDE * INTS_A_CELL, np.int32(1))
        if number != seen and atomic_load(work.doors, OPEN * INTS_A_CELL) == number:
            _score_task(thread, num_threads, buffers, predictors, work)
        atomic_add(work.doors, INSIDE * INTS_A_CELL, np.int32(-1))
        seen = number


@njit(nogil=True, cache=True)
def close_task(work):
    """Let no helper start any more, wait for those at work, and reset the counters."""
    atomic_store(work.doors, OPEN * INTS_A_CELL, np.int32(0))
    while True:
        inside = atomic_load(work.doors, INSIDE * INTS_A_CELL)
        if inside == 0:
            break
        wait_change(work.doors, INSIDE, inside, SPINS, _POLL_NS)
    work.counters[:] = 0


@njit(nogil=True, cache=True)
def has_predictor(predictors, layer):
    """Whether the layer's neurons are scored."""
    return predictors.offsets[layer + 1] > predictors.offsets[layer]


@njit(nogil=True, cache=True)
def write_task(team, layer, num_tokens, input_code, number):
    """Let the team score the layer when its service replies to request `number`.

    Drops a task that was never scored because its request failed.
    """
    task = team.work.task
    close_task(team.work)
    task[NUMBER] = 0
    if has_predictor(team.predictors, layer):
        task[LAYER], task[NUM_TOKENS], task[INPUT] = layer, num_tokens, input_code
        task[NUMBER] = number
        atomic_store(team.work.doors, OPEN * INTS_A_CELL, np.int32(number))


@njit(nogil=True, cache=True)
def score_task(team, layer, num_tokens, buffers, service):
    """work.scores[:num_tokens] = the written task's scores, computed with the helpers.

    False unless the task is this layer's and `service` has replied to its request.
    """
    task = team.work.task
    answered = atomic_load(buffers.cells, cell(service, DONE) * INTS_A_CELL)
    is_written = task[NUMBER] == answered and task[NUMBER] != 0
    if not is_written or task[LAYER] != layer or task[NUM_TOKENS] != num_tokens:
        return False
    _score_task(0, team.num_threads, buffers, team.predictors, team.work)
    close_task(team.work)  # helpers that have not started are not awaited
    task[NUMBER] = 0
    return True


@njit(nogil=True, cache=True)
def choose_neurons(team, layer, num_tokens, buffers, service, targets):
    """Write NUM_IDS and ids of the services `targets` (int64): the predicted neurons.

    Writes nothing for a layer without a predictor. False where `score_task` is.
    """
    if not has_predictor(team.predictors, layer):
        return True
    if not score_task(team, layer, num_tokens, buffers, service):
        return False
    scores, bounds = team.work.scores[:num_tokens], team.bounds[layer]
    for s, target in enumerate(targets):
        ids, masks = buffers.active_ids[target], buffers.active_masks[target]
        count = select_kernel(scores, bounds[s], bounds[s + 1], ids, masks)
        buffers.requests[target, NUM_IDS] = count
    return True
