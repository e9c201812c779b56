"""Services that work for a given time, and how long asking them takes."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.serve.doorbell import now_ns
from hotcold.numba_kernels.serve.mailbox import (
    BUSY_NS,
    OPERATION,
    STOP,
    ask_all,
    finish_request,
    next_request,
)

NOT_ANSWERED = np.iinfo(np.int64).min


@njit(nogil=True, cache=True)
def work_until_stopped(cells, requests, replies, service, num_threads, work_ns):  # type: ignore[no-untyped-def]
    """Be one thread of a service until it is told to stop."""
    seen = np.int32(0)
    while True:
        seen = next_request(cells, service, seen)
        if requests[service, OPERATION] == STOP:
            return
        started_ns = now_ns()
        while now_ns() < started_ns + work_ns:
            pass
        finish_request(cells, replies, cells[:0], service, seen, num_threads, started_ns)


@njit(nogil=True, cache=True)
def ask_in_turn(cells, replies, first, others, rounds, timeout_ns):  # type: ignore[no-untyped-def]
    """What each question cost beyond the longest work, (2 * rounds,) ns."""
    costs_ns = np.full(2 * rounds, NOT_ANSWERED, np.int64)
    for i in range(2 * rounds):
        services = first if i % 2 == 0 else others
        started_ns = now_ns()
        if ask_all(cells, services, i // 2 + 1, timeout_ns) < services.shape[0]:
            return costs_ns
        took_ns = now_ns() - started_ns
        longest_ns = 0
        for service in services:
            longest_ns = max(longest_ns, replies[service, BUSY_NS])
        costs_ns[i] = took_ns - longest_ns
    return costs_ns
