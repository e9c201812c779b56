"""Reads of the experts that a layer has chosen, while its attention is still computed.

Where a router reads the layer's input, attention's service rings once it has chosen. A thread of
the CPU service then submits reads of what is missing, so that the layer's FFN, which asks next,
waits less. A lock keeps it from changing slots while a request looks them up, and a request may
wait for the disk meanwhile: this thread then lets its turn pass, as it comes too late.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.loops.doorbell import (
    INTS_A_CELL,
    atomic_load,
    atomic_replace,
    atomic_store,
    sleep_change,
    wait_change,
    wake,
)
from hotcold.numba_kernels.loops.mailbox import (
    DONE,
    LAYER,
    NUM_TOKENS,
    REQUEST,
    ROUTED,
    SPINS,
    cell,
)
from hotcold.numba_kernels.storage.read_ahead import request_routed

_POLL_NS = 100_000_000
_LOCK, _STOP = range(2)  # cells of `OffloadedExperts.lock`


@njit(nogil=True, cache=True)
def try_lock(lock):
    """Take the lock if nobody has it; whether it was taken."""
    return atomic_replace(lock, np.int64(_LOCK * INTS_A_CELL), np.int32(0), np.int32(1))


@njit(nogil=True, cache=True)
def take_lock(lock):
    """Wait for the lock, which `serve_routed` holds for microseconds."""
    while not try_lock(lock):
        wait_change(lock, _LOCK, np.int32(1), SPINS, _POLL_NS)


@njit(nogil=True, cache=True)
def release_lock(lock):
    """Let the other thread have it."""
    atomic_store(lock, np.int64(_LOCK * INTS_A_CELL), np.int32(0))
    wake(lock, _LOCK)


def new_lock() -> np.ndarray:
    """A lock that nobody has, and the cell that ends `serve_routed`."""
    return np.zeros(2 * INTS_A_CELL, np.int32)


@njit(nogil=True, cache=True)
def stop_routed(lock):
    """Let `serve_routed` return within a moment."""
    atomic_store(lock, np.int64(_STOP * INTS_A_CELL), np.int32(1))


@njit(nogil=True, cache=True)
def serve_routed(shard, attention, cells, requests, block_weights):
    """Until `stop_routed`: read what attention's service `attention` has chosen for few tokens."""
    routed, lock = cell(attention, ROUTED), shard.lock
    seen = atomic_load(cells, np.int64(routed * INTS_A_CELL))
    while not atomic_load(lock, np.int64(_STOP * INTS_A_CELL)):
        sleep_change(cells, routed, seen, np.int64(_POLL_NS))
        found = atomic_load(cells, np.int64(routed * INTS_A_CELL))
        if found == seen:
            continue
        seen = found
        read_routed(shard, attention, cells, requests, block_weights, found)


@njit(nogil=True, cache=True, _nrt=True)
def read_routed(shard, attention, cells, requests, block_weights, number):
    """`request_routed` for attention's request `number`, unless that is over or the lock is taken.

    From its end on, the arrays may be of another request, and the layer's own is coming.
    """
    layer, num_tokens = requests[attention, LAYER], requests[attention, NUM_TOKENS]
    if num_tokens > shard.ahead.guessed.shape[0]:
        return
    weights = block_weights[:num_tokens].copy()
    asked = atomic_load(cells, np.int64(cell(attention, REQUEST) * INTS_A_CELL))
    done = atomic_load(cells, np.int64(cell(attention, DONE) * INTS_A_CELL))
    if asked != number or done == number:
        return
    if try_lock(shard.lock):
        request_routed(shard, layer, weights)
        release_lock(shard.lock)
