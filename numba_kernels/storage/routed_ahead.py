"""Reads of the experts that a layer has chosen, while its attention is still computed.

Where a router reads the layer's input, attention's service rings once it has chosen. A thread of
the CPU service then submits reads of what is missing, so that the layer's FFN, which asks next,
waits less. Its lock keeps it from changing slots while a request looks them up.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.serve.doorbell import (
    INTS_A_CELL,
    atomic_load,
    atomic_replace,
    atomic_store,
    sleep_change,
)
from hotcold.numba_kernels.serve.mailbox import LAYER, NUM_TOKENS, ROUTED, cell
from hotcold.numba_kernels.storage.offloaded_experts import request_routed

_POLL_NS = 100_000_000
_LOCK, _STOP = 0, INTS_A_CELL  # words of `OffloadedExperts.lock`


@njit(nogil=True, cache=True)
def take_lock(lock):
    """Wait for the lock, which is held for microseconds."""
    while not atomic_replace(lock, np.int64(_LOCK), np.int32(0), np.int32(1)):
        pass


@njit(nogil=True, cache=True)
def release_lock(lock):
    """Let the other thread have it."""
    atomic_store(lock, np.int64(_LOCK), np.int32(0))


def new_lock() -> np.ndarray:
    """A lock that nobody has, and the word that ends `serve_routed`."""
    return np.zeros(2 * INTS_A_CELL, np.int32)


@njit(nogil=True, cache=True)
def stop_routed(lock):
    """Let `serve_routed` return within a moment."""
    atomic_store(lock, np.int64(_STOP), np.int32(1))


@njit(nogil=True, cache=True)
def serve_routed(shard, attention, cells, requests, block_weights):
    """Until `stop_routed`: read what attention's service `attention` has chosen for few tokens."""
    routed, lock = cell(attention, ROUTED), shard.lock
    seen = atomic_load(cells, np.int64(routed * INTS_A_CELL))
    while not atomic_load(lock, np.int64(_STOP)):
        sleep_change(cells, routed, seen, np.int64(_POLL_NS))
        found = atomic_load(cells, np.int64(routed * INTS_A_CELL))
        if found == seen:
            continue
        seen = found
        layer, num_tokens = requests[attention, LAYER], requests[attention, NUM_TOKENS]
        if num_tokens <= shard.guessed.shape[0]:
            take_lock(lock)
            request_routed(shard, layer, block_weights[:num_tokens])
            release_lock(lock)
