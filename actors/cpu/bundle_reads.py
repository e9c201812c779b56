"""An open bundle file, and the threads that read neurons from it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from hotcold.actors.cpu.units import Units
from hotcold.model.bundles.bundle_file import BundleFile
from hotcold.model.bundles.direct_io import PAGE_BYTES, open_direct
from hotcold.model.errors import ServiceError
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.storage import MAX_GAP, NUM_THREADS, RING_DEPTH
from hotcold.numba_kernels.storage.direct_file import SHORT
from hotcold.numba_kernels.storage.io_ring import (
    close_ring,
    leak_buffers,
    new_ring,
    register_buffers,
)
from hotcold.numba_kernels.storage.neuron_file import (
    DAMAGED,
    DESCRIPTOR,
    KEEPS_PAGES,
    NUM_FACTS,
    UNIT,
    NeuronFile,
    RowBytes,
    staging_bytes,
)
from hotcold.numba_kernels.storage.read_queue import (
    IS_RUNNING,
    NOW,
    batch_reads,
    new_queue,
    read_all,
    serve_reads,
    stop_readers,
)
from hotcold.numba_kernels.storage.ring_reads import go_on_without_ring, serve_ring
from hotcold.numba_kernels.storage.slots import Slots

_POLL_S = 0.001


def new_rows(count: int, row_bytes: int, dtype: np.dtype) -> np.ndarray:
    """Rows in memory, which is taken when they are filled."""
    return aligned_empty((count, row_bytes // dtype.itemsize), dtype)


def bytes_of(matrices: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gate, up and down rows as bytes; of none, no bytes."""
    gate, up, down = (
        rows.reshape(-1).view(np.uint8).reshape(rows.shape[0], -1)
        if rows.shape[0]
        else np.zeros((0, 0), np.uint8)
        for rows in matrices
    )
    return gate, up, down


class BundleReads:
    """The open file, where a shard's bundles are in it, and the queue of its reading threads."""

    def __init__(self, file: BundleFile, units: Units, gates: Slots, up_downs: Slots) -> None:
        """Up to a layer of the shard's `units` may be requested at once.

        What is requested and loaded of them is noted in `gates` and `up_downs`.
        Errors:  ServiceError
        """
        self._path, self._geometry, self._units = file.path, file.geometry, units
        try:
            self._descriptor, self._unit, keeps_pages = open_direct(file.path)
        except OSError as problem:
            raise ServiceError(f"{file.path}: cannot be read ({problem.strerror})") from None
        self.located = self._locate(file, keeps_pages)
        most = int(np.bincount(units.layers).max(initial=1))
        requested, loaded = (gates.requested, up_downs.requested), (gates.loaded, up_downs.loaded)
        self.queue = new_queue(NUM_THREADS, most, requested, loaded)
        self._readers: list[threading.Thread] = []
        self._has_ring = False

    def _locate(self, file: BundleFile, keeps_pages: bool) -> NeuronFile:
        geometry, layers, places = self._geometry, self._units.layers, self._units.places
        facts = np.zeros(NUM_FACTS, np.int64)
        facts[[DESCRIPTOR, UNIT, KEEPS_PAGES]] = self._descriptor, self._unit, keeps_pages
        num_blocks = max(map(len, geometry.blocks))
        begins = np.zeros(geometry.num_layers * num_blocks, np.int64)
        sizes = np.zeros((begins.size, 2), np.int64)
        for layer, blocks in enumerate(geometry.blocks):
            number, spans = 0, geometry.block_spans(layer)
            for block, (one, (begin, _)) in enumerate(zip(blocks, spans, strict=True)):
                kind, parts = layer * num_blocks + block, geometry.part_bytes(layer, block)
                begins[kind], sizes[kind] = begin - number * sum(parts), parts
                number += one.num_bundles
        kinds = self._units.units if self._units.units.size else layers  # those have one block
        checksums = file.checksums[geometry.layer_firsts[layers] + places]
        return NeuronFile(facts, begins, sizes, kinds, places, self._units.parts, checksums)

    def start(self, rows: RowBytes) -> None:
        """Start threads that read into `rows`. Errors: ServiceError where that fails."""
        self._rows = rows
        if self.located.facts[KEEPS_PAGES]:  # direct
            self._begin([threading.Thread(target=self._by_ring, name="read", daemon=True)])
        if not self._has_ring:
            staging = self._staging(NUM_THREADS)
            readers = [
                threading.Thread(
                    target=self._by_thread, args=(n, staging[n]), name=f"read-{n}", daemon=True
                )
                for n in range(NUM_THREADS)
            ]
            self._begin(readers)
            if not all(reader.is_alive() for reader in readers):
                raise ServiceError("the threads that read neurons could not be started")

    def _begin(self, readers: list[threading.Thread]) -> None:
        """Start threads; return once each reads, its loop compiled, or has ended."""
        self._readers = readers
        for reader in readers:
            reader.start()
        begun = self.queue.counts[: len(readers), IS_RUNNING]
        while not begun.all() and all(reader.is_alive() for reader in readers):
            time.sleep(_POLL_S)

    def _by_ring(self) -> None:
        """Many reads in flight from one thread, where kernel and container allow io_uring."""
        ring = new_ring(RING_DEPTH)
        if ring is None:
            return
        self._has_ring = True
        staging = self._staging(RING_DEPTH)
        register_buffers(ring, staging)
        work = self.queue, self.located
        spans, busy = np.zeros((RING_DEPTH, 3), np.int32), np.zeros(RING_DEPTH, np.uint8)
        status = serve_ring(*work, staging, self._rows, ring, spans, busy)
        if status:
            leak_buffers(staging)
            go_on_without_ring(*work, self._staging(1)[0], self._rows, spans, busy)
        close_ring(ring)

    def _by_thread(self, number: int, staging: np.ndarray) -> None:
        span = np.zeros(3, np.int32)
        serve_reads(number, self.queue, self.located, staging, self._rows, span)

    def _staging(self, num_reads: int) -> np.ndarray:
        """Buffers of so many reads, in huge pages: disks read faster into contiguous memory."""
        size = int(staging_bytes(self._geometry.bundle_bytes, PAGE_BYTES))
        return aligned_empty((num_reads, size), np.uint8)

    def read(self, rows: np.ndarray, parts: np.ndarray) -> None:
        """Read parts of one layer's bundles into their slots, once nothing else is being read.

        Errors:  ServiceError
        """
        order = np.argsort(self.located.places[rows])
        wanted = batch_reads.py_func(self.queue, NOW)
        for array, values in zip(wanted, (rows, parts), strict=True):
            array[: rows.size] = values[order]
        # All of a layer is read, so gaps are small, or hold other rows of the same layer.
        gap = max(MAX_GAP, self._geometry.up_down_bytes)
        if rows.size and not read_all(self.queue, self.located, rows.size, gap):
            raise ServiceError(self.failure())

    def failure(self) -> str:
        """Why the last read failed; "" where none did."""
        status, row = self.queue.failure.tolist()
        if not status:
            return ""
        layer, number = int(self._units.layers[row]), int(self._units.numbers[row])
        what = f"{self._units.noun} {number} of layer {layer}"
        if status == SHORT:
            return f"{self._path}: became shorter while in use; make it with `hotcold pack` again"
        if status == DAMAGED:
            return (
                f"{self._path}: {what} is not what was written; see "
                "what else with `hotcold pack --verify`, and make the file again"
            )
        return (
            f"{self._path}: {what} cannot be read "
            f"({os.strerror(status)}); mend the disk, or make the file elsewhere"
        )

    def close(self) -> None:
        """End the reading threads and close the file."""
        stop_readers(self.queue)
        for reader in self._readers:
            reader.join()
        os.close(self._descriptor)
