"""How much of a queue a ring begins at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hotcold.model.bundles.direct_io import PAGE_BYTES, open_direct
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.storage import BUSY_BYTES, RING_DEPTH
from hotcold.numba_kernels.storage.io_ring import (
    IoRing,
    close_ring,
    new_ring,
    next_completion,
    submit,
)
from hotcold.numba_kernels.storage.neuron_file import GATE, NeuronFile
from hotcold.numba_kernels.storage.read_queue import (
    NOW,
    ReadQueue,
    cancel_reads,
    new_queue,
    num_pending,
    submit_reads,
)
from hotcold.numba_kernels.storage.ring_reads import _begin_spans

AHEAD = NOW + 1


@pytest.fixture
def ring() -> Iterator[IoRing]:
    """A ring; its reads must be awaited."""
    found = new_ring(RING_DEPTH)
    if found is None:
        pytest.skip("no io_uring here")
    yield found
    close_ring(found)


def queued(queue: ReadQueue, file: NeuronFile, batch: int, rows: np.ndarray) -> None:
    """Submit reads of bundles."""
    queue.rows[batch, : rows.size], queue.parts[batch, : rows.size] = rows, GATE
    submit_reads(queue, file, batch, rows.size, 1, 0)


@pytest.mark.parametrize("size", [256 << 10, 96 << 10, 8 << 10])
def test_what_is_needed_now_waits_behind_few_guesses(
    tmp_path: Path, ring: IoRing, size: int
) -> None:
    """Guesses beyond what keeps a disk busy can be cancelled, and what comes next is begun then."""
    num_guessed, num_needed = 3 * BUSY_BYTES // size, 4
    num_bundles = num_guessed + num_needed
    path = tmp_path / "f"
    path.write_bytes(bytes(num_bundles * size))
    opened = open_direct(path)
    zeros = np.zeros(num_bundles, np.int32)
    file = NeuronFile(
        np.array([opened.descriptor, PAGE_BYTES, opened.keeps_pages, 0]),
        np.zeros(1, np.int64), np.array([[size, 0]]), zeros, np.arange(num_bundles, dtype=np.int32),
        np.zeros((num_bundles, 2), np.uint32),
    )  # fmt: skip
    queue, requested = new_queue(1, num_bundles), np.zeros((2, num_bundles), np.uint8)
    staging = aligned_empty((RING_DEPTH, size + 2 * PAGE_BYTES), np.uint8)
    spans, busy = np.zeros((RING_DEPTH, 3), np.int32), np.zeros(RING_DEPTH, np.uint8)
    work = queue, file, ring, staging, spans, busy

    queued(queue, file, AHEAD, np.arange(num_guessed))
    in_flight = _begin_spans(*work, 0)
    begun = min(RING_DEPTH, -(-BUSY_BYTES // size))
    assert in_flight == begun * size and busy.sum() == begun
    assert _begin_spans(*work, in_flight) == in_flight and busy.sum() == begun
    cancel_reads(queue, *requested)
    assert num_pending(queue, AHEAD) == begun

    queued(queue, file, NOW, np.arange(num_guessed, num_bundles))
    read = 0
    while busy.any():
        assert submit(ring, 1) == 0
        done, result = next_completion(ring)
        while done >= 0:
            assert result == size
            busy[done], in_flight, read = 0, in_flight - size, read + 1
            done, result = next_completion(ring)
        in_flight = _begin_spans(*work, in_flight)
        assert in_flight < BUSY_BYTES + size
    assert read == begun + num_needed and in_flight == 0
    os.close(opened.descriptor)
