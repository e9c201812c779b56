"""The sign predictor on several cores: threads that wake by themselves when its input is there.

Waking an idle core takes as long as a core needs for its share, so nobody wakes these threads for
it: like the driver they sleep at the doorbell that the GPU service rings when the FFN's input is
ready. What to do then was written down before the service was asked.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from numba_kernels.decode.predict import pack_planes_kernel, sign_scores_kernel
from numba_kernels.decode.rows import split_range
from numba_kernels.serve.doorbell import (
    INTS_A_CELL,
    atomic_add,
    atomic_load,
    atomic_store,
    sleep_change,
    wait_change,
)
from numba_kernels.serve.mailbox import DONE, IDLE_NS, SPINS, cell
from numba_kernels.serve.work_stealing import block_rows, next_block

_LOOK_NS = 50_000  # helpers leave without ringing

# words of a task
NUMBER, LAYER, NUM_TOKENS, INPUT, STOP = range(5)
NUM_TASK_WORDS = 8
OPEN, INSIDE = 0, 1  # cells of the doors
NUM_DOORS = 2
FFN_INPUT, MIXED, HIDDEN = range(3)  # as INPUT: which of the wires' arrays


class SignPredictors(NamedTuple):
    """The sign predictors of all layers, stacked: layer l scores neurons offsets[l]:offsets[l + 1].

    offsets, starts (L + 1,) int64; bits (words,) uint64: rows of layer l from starts[l] on, in the
    form of `numba_kernels.decode.predict`; thresholds (N,), centers, scales (L, d) float32
    """

    offsets: np.ndarray
    starts: np.ndarray
    bits: np.ndarray
    thresholds: np.ndarray
    centers: np.ndarray
    scales: np.ndarray


class TeamWork(NamedTuple):
    """What the threads of a team share.

    task (8,) int64: what to do at which number of the doorbell; doors (2 * 16,) int32: cell
    OPEN has that number while helpers may begin, cell INSIDE how many are at it; scores (T, N)
    float32; planes (threads, 3, words) uint64; counters
    (T, threads * 16): which blocks of rows have been taken for each token
    """

    task: np.ndarray
    doors: np.ndarray
    scores: np.ndarray
    planes: np.ndarray
    counters: np.ndarray


@njit(nogil=True, cache=True)
def _work_stealing_scores(thread, num_threads, layer, x, predictors, work):
    """scores[t, n] of the neurons in the blocks that this thread takes; checks nothing."""
    first, last = predictors.offsets[layer], predictors.offsets[layer + 1]
    bits = predictors.bits[predictors.starts[layer] : predictors.starts[layer + 1]]
    rows = bits.reshape(last - first, bits.shape[0] // (last - first))
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
def _score_task(thread, num_threads, wires, predictors, work):
    num_tokens = work.task[NUM_TOKENS]
    x = wires.ffn_input
    if work.task[INPUT] == MIXED:
        x = wires.mixed
    elif work.task[INPUT] == HIDDEN:
        x = wires.hidden
    _work_stealing_scores(thread, num_threads, work.task[LAYER], x[:num_tokens], predictors, work)


@njit(nogil=True, cache=True)
def help_predict(thread, num_threads, service, seen, wires, predictors, work):
    """A helper's life: once `service` rings, blocks of each task; STOP ends it."""
    while True:
        number = sleep_change(wires.cells, cell(service, DONE), seen, IDLE_NS)
        if work.task[STOP]:
            return
        # First it is inside, then it looks: so whoever closes the task sees it, or it sees that.
        atomic_add(work.doors, INSIDE * INTS_A_CELL, np.int32(1))
        if number != seen and atomic_load(work.doors, OPEN * INTS_A_CELL) == number:
            _score_task(thread, num_threads, wires, predictors, work)
        atomic_add(work.doors, INSIDE * INTS_A_CELL, np.int32(-1))
        seen = number


@njit(nogil=True, cache=True)
def lead_predict(num_threads, wires, predictors, work):
    """What the driver does of the task, as thread 0; returns when all of it is done.

    Helpers that have not begun by then are not waited for.
    """
    _score_task(0, num_threads, wires, predictors, work)
    close_task(work)


@njit(nogil=True, cache=True)
def open_task(work):
    """Let helpers begin the task that has been written down; it was closed before."""
    atomic_store(work.doors, OPEN * INTS_A_CELL, np.int32(work.task[NUMBER]))


@njit(nogil=True, cache=True)
def close_task(work):
    """Let nobody begin the task any more, and return when nobody is at it and all is as new."""
    atomic_store(work.doors, OPEN * INTS_A_CELL, np.int32(0))
    while True:
        inside = atomic_load(work.doors, INSIDE * INTS_A_CELL)
        if inside == 0:
            break
        wait_change(work.doors, INSIDE, inside, SPINS, _LOOK_NS)
    work.counters[:] = 0
