"""The cost of a request to a service and its reply, beyond the service's own work.

Threads wait, work and reply like a service's (`numba_kernels/measure.py`). The work is a
millisecond of spinning: long enough for waiting threads to fall asleep, as between two requests of
a token, so the figure includes the wake-up of a core.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    CELLS_A_SERVICE,
    NUM_REPLY_WORDS,
    NUM_REQUEST_WORDS,
    OPERATION,
    PING,
    STOP,
    post,
)
from hotcold.numba_kernels.measure import NOT_ANSWERED, request_in_turn, work_until_stopped

_ROUNDS = 400
_MIN_SHARE = 0.05  # of undisturbed requests
_WORK_NS = 1_000_000
_TIMEOUT_NS = 60_000_000_000


def measure_exchange_us(
    cores_of_nodes: list[tuple[int, ...]], rounds: int = _ROUNDS, work_ns: int = _WORK_NS
) -> float:
    """Median over requests of (round trip - the longest work of a service), in microseconds.

    As for a token, requests alternate between one thread on the first node (the attention service)
    while other cores idle, and the services of all nodes at once, a thread on every core. Requests
    during which another program used a core take longer; they are left out, unless nearly all are.
    Errors:  RuntimeError where a service does not reply within a minute
    """
    cores_of_services = [cores_of_nodes[0][:1], *cores_of_nodes]
    count = len(cores_of_services)
    cells = aligned_empty((count * CELLS_A_SERVICE * INTS_A_CELL,), np.int32)
    requests = np.zeros((count, NUM_REQUEST_WORDS), np.int64)
    replies = np.zeros((count, NUM_REPLY_WORDS), np.int64)
    requests[:, OPERATION] = PING
    first, others = np.zeros(1, np.int64), np.arange(1, count)
    threads = []
    for service, cores in enumerate(cores_of_services):
        buffers = (cells, requests, replies, service, len(cores), work_ns)
        threads += [
            threading.Thread(target=_live, args=(core, *buffers), daemon=True) for core in cores
        ]
    for thread in threads:
        thread.start()
    try:
        costs_ns = request_in_turn(cells, replies, first, others, rounds, _TIMEOUT_NS)
    finally:
        requests[:, OPERATION] = STOP
        for service in range(count):
            post(cells, service, rounds + 1)
        for thread in threads:
            thread.join()
    if NOT_ANSWERED in costs_ns:
        raise RuntimeError("a service did not answer within a minute")
    return median_us(costs_ns, work_ns)


def median_us(costs_ns: np.ndarray, work_ns: int) -> float:
    """Median of the costs below half of `work_ns`, in µs; of all where few are below it."""
    undisturbed = costs_ns[costs_ns < work_ns // 2]
    if undisturbed.size < _MIN_SHARE * costs_ns.size:
        undisturbed = costs_ns
    return max(float(np.median(undisturbed)) / 1e3, 0.01)


def _live(core: int, *buffers: Any) -> None:
    os.sched_setaffinity(0, {core})
    work_until_stopped(*buffers)
