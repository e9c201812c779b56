"""Predictors' scores on several cores: the driver and helper threads.

Waking an idle core takes as long as a core needs for its share, so the driver does not wake the
helpers: like the driver they sleep at the doorbell that the attention service rings when the FFN's
input is ready. Their task was written before that request was sent. Where there is no such
doorbell, the driver scores alone, by the same functions.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import by_types, njit
from hotcold.numba_kernels.decode.predict import (
    lowrank_hidden_kernel,
    lowrank_scores_kernel,
    pack_planes_kernel,
    sign_scores_kernel,
)
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.loops.doorbell import (
    INTS_A_CELL,
    atomic_add,
    atomic_load,
    atomic_store,
    sleep_change,
    wait_change,
    wake,
)
from hotcold.numba_kernels.loops.mailbox import DONE, IDLE_NS, SPINS, cell
from hotcold.numba_kernels.loops.work_stealing import block_rows, next_block

_POLL_NS = 50_000  # helpers leave without ringing
_COLUMN_UNIT, _COLUMNS = 64, 2048  # of `up`: of a thread's part, of a block

# words of a task
NUMBER, LAYER, NUM_TOKENS, INPUT, STOP = range(5)
NUM_TASK_WORDS = 8
OPEN, INSIDE, NUM_HIDDEN = 0, 1, 2  # cells of `doors`
NUM_DOORS = 3
FFN_INPUT, FFN_RESIDUAL, HIDDEN = range(3)  # as INPUT: the scored array of the buffers
_HIDDEN_ROWS, _SCORE_COLUMNS = 0, 1  # kinds of counters of a low-rank predictor


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


class LowRankPredictors(NamedTuple):
    """The low-rank predictors of all layers, stacked as `SignPredictors`.

    width: d; offsets, hidden_offsets (L + 1,) int64: of neurons, and of units between the matrices;
    starts (L, 2), item_bytes (L,) int64: `weights` (bytes,) uint8 has down (r, d) and up (r, n) of
    layer l from starts[l] on, of int8 (1 byte) or float16 bits (2); scales (R,), thresholds (N,)
    float32
    """

    width: int
    offsets: np.ndarray
    hidden_offsets: np.ndarray
    starts: np.ndarray
    item_bytes: np.ndarray
    weights: np.ndarray
    scales: np.ndarray
    thresholds: np.ndarray


class NoPredictors(NamedTuple):
    """Instead of `LowRankPredictors` where no layer has one: offsets (L + 1,) int64 are zero.

    Of another type, so that compiled code has no kernels of theirs: they take seconds to compile.
    """

    offsets: np.ndarray


class TeamWork(NamedTuple):
    """State that the threads of a team share.

    task (8,) int64: the words above; doors (3 * 16,) int32: cell OPEN has the task's sequence
    number while helpers may start, cell INSIDE counts helpers at work, NUM_HIDDEN hidden units that
    are ready; scores (T, N) float32; hidden (T * r,) float32; planes (threads, 3, words) uint64;
    counters (T >= 2, threads * 16) int32: blocks of rows taken
    """

    task: np.ndarray
    doors: np.ndarray
    scores: np.ndarray
    hidden: np.ndarray
    planes: np.ndarray
    counters: np.ndarray


class PredictTeam(NamedTuple):
    """Threads, the driver's being one, and the predictors of all layers that they score.

    Helpers sleep at the bell of `service`, which has attention; of layers whose input another
    service makes the driver scores all. A layer has a sign predictor, a low-rank one, or none.
    """

    num_threads: int
    service: int
    signs: SignPredictors
    lowrank: LowRankPredictors | NoPredictors
    work: TeamWork


@njit(nogil=True, cache=True, inline="always")
def bit_rows(predictors, layer):
    """The bits of the layer's neurons: (neurons, words) uint64."""
    count = predictors.offsets[layer + 1] - predictors.offsets[layer]
    first, words = predictors.starts[layer], predictors.row_words[layer]
    return predictors.bits[first : first + count * words].reshape(count, words)


@njit(nogil=True, cache=True)
def int8_matrix(weights, first, rows, columns):
    """The int8 matrix (rows, columns) that begins at byte `first` of `weights`."""
    return weights[first : first + rows * columns].view(np.int8).reshape(rows, columns)


@njit(nogil=True, cache=True)
def float16_matrix(weights, first, rows, columns):
    """The same of float16 bits, uint16."""
    return weights[first : first + 2 * rows * columns].view(np.uint16).reshape(rows, columns)


@njit(nogil=True, cache=True)
def num_scored(predictors, layer):
    """Number of the layer's neurons that these predictors score."""
    return predictors.offsets[layer + 1] - predictors.offsets[layer]


@njit(nogil=True, cache=True)
def _sign_scores(thread, num_threads, layer, x, predictors, work):
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
def _lowrank_scores(thread, num_threads, down, up, scales, thresholds, x, work):
    """The same of a low-rank predictor. The second matrix waits for all of the first."""
    num_tokens, size, num_neurons = x.shape[0], down.shape[0], up.shape[1]
    hidden = work.hidden[: num_tokens * size].reshape(num_tokens, size)
    rows, counters = block_rows(down), work.counters[_HIDDEN_ROWS]
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        begin, end = split_range(size, part, num_threads, 4)
        row = begin + next_block(counters, part) * rows
        while row < end:
            last = min(row + rows, end)
            lowrank_hidden_kernel(down, scales, x, hidden, row, last)
            atomic_add(work.doors, NUM_HIDDEN * INTS_A_CELL, np.int32(last - row))
            row = begin + next_block(counters, part) * rows
    _await_hidden(work, size)
    counters = work.counters[_SCORE_COLUMNS]
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        begin, end = split_range(num_neurons, part, num_threads, _COLUMN_UNIT)
        column = begin + next_block(counters, part) * _COLUMNS
        while column < end:
            last = min(column + _COLUMNS, end)
            for t in range(num_tokens):
                lowrank_scores_kernel(up, hidden[t], thresholds, work.scores[t], column, last)
            column = begin + next_block(counters, part) * _COLUMNS


@njit(nogil=True, cache=True)
def _await_hidden(work, size):
    """Wait until all `size` hidden units are ready."""
    num_ready = atomic_load(work.doors, NUM_HIDDEN * INTS_A_CELL)
    while num_ready < size:
        wait_change(work.doors, NUM_HIDDEN, num_ready, SPINS, _POLL_NS)
        num_ready = atomic_load(work.doors, NUM_HIDDEN * INTS_A_CELL)
    wake(work.doors, NUM_HIDDEN)


@njit(nogil=True, cache=True)
def _score_task(thread, team, buffers):
    """This thread's part of the task; checks nothing."""
    task, work, num_threads = team.work.task, team.work, team.num_threads
    layer, num_tokens = task[LAYER], task[NUM_TOKENS]
    x = buffers.ffn_input
    if task[INPUT] == FFN_RESIDUAL:
        x = buffers.ffn_residual
    elif task[INPUT] == HIDDEN:
        x = buffers.hidden
    x = x[:num_tokens]
    if num_scored(team.signs, layer):
        _sign_scores(thread, num_threads, layer, x, team.signs, work)
    else:
        _lowrank_task(thread, num_threads, layer, x, team.lowrank, work)


@by_types
def _lowrank_task(thread, num_threads, layer, x, predictors, work):  # type: ignore[no-untyped-def]
    """This thread's part of a layer that has a low-rank predictor; for compiled code."""
    return _scored if predictors.instance_class is LowRankPredictors else _never


def _never(thread, num_threads, layer, x, predictors, work):  # type: ignore[no-untyped-def]
    pass


def _scored(thread, num_threads, layer, x, predictors, work):  # type: ignore[no-untyped-def]
    num_neurons, width = num_scored(predictors, layer), predictors.width
    first, last = predictors.hidden_offsets[layer], predictors.hidden_offsets[layer + 1]
    scales, size, weights = predictors.scales[first:last], last - first, predictors.weights
    offset = predictors.offsets[layer]
    thresholds = predictors.thresholds[offset : offset + num_neurons]
    at_down, at_up = predictors.starts[layer]
    if predictors.item_bytes[layer] == 1:
        _lowrank_scores(
            thread, num_threads, int8_matrix(weights, at_down, size, width),
            int8_matrix(weights, at_up, size, num_neurons), scales, thresholds, x, work,
        )  # fmt: skip
    else:
        _lowrank_scores(
            thread, num_threads, float16_matrix(weights, at_down, size, width),
            float16_matrix(weights, at_up, size, num_neurons), scales, thresholds, x, work,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def help_predict(thread, seen, buffers, team):
    """A helper's loop until STOP: compute blocks of each task once the team's service rings."""
    task, doors = team.work.task, team.work.doors
    while True:
        number = sleep_change(buffers.cells, cell(team.service, DONE), seen, IDLE_NS)
        if task[STOP]:
            return
        # Enter, then check: either `close_task` sees this thread, or this thread sees it closed.
        atomic_add(doors, INSIDE * INTS_A_CELL, np.int32(1))
        is_open = atomic_load(doors, OPEN * INTS_A_CELL) == number
        if is_open and number > 0 and number != seen:
            _score_task(thread, team, buffers)
        atomic_add(doors, INSIDE * INTS_A_CELL, np.int32(-1))
        seen = number


@njit(nogil=True, cache=True)
def close_task(work):
    """Let no helper start any more, wait for those at work, and reset the counters."""
    work.task[NUMBER] = 0
    atomic_store(work.doors, OPEN * INTS_A_CELL, np.int32(0))
    while True:
        inside = atomic_load(work.doors, INSIDE * INTS_A_CELL)
        if inside == 0:
            break
        wait_change(work.doors, INSIDE, inside, SPINS, _POLL_NS)
    work.counters[: max(_SCORE_COLUMNS + 1, work.task[NUM_TOKENS])] = 0
    work.doors[NUM_HIDDEN * INTS_A_CELL] = 0


@njit(nogil=True, cache=True)
def write_task(team, layer, num_tokens, input_code, number):
    """Let the team score a layer that has a predictor, from the reply to request `number` on.

    0: the team's service rings for no request, so no helper wakes. Drops a task that was never
    scored because its request failed.
    """
    task = team.work.task
    close_task(team.work)
    task[LAYER], task[NUM_TOKENS], task[INPUT] = layer, num_tokens, input_code
    task[NUMBER] = number
    atomic_store(team.work.doors, OPEN * INTS_A_CELL, np.int32(number))


@njit(nogil=True, cache=True)
def score_task(team, buffers):
    """The written task's scores, work.scores[:num_tokens], once the input is ready.

    Computed with the helpers where the service has replied to the request that was told. Otherwise
    the request was sent again: helpers may have read the input too early, so none of them helps.
    """
    work = team.work
    answered = atomic_load(buffers.cells, cell(team.service, DONE) * INTS_A_CELL)
    if work.task[NUMBER] != answered:
        close_task(work)
    _score_task(0, team, buffers)
    close_task(work)  # helpers that have not started are not awaited
    return work.scores[: work.task[NUM_TOKENS]]
