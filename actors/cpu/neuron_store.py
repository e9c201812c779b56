"""A shard of neurons in a bundle file, some of them in memory; what compiled loops read them by."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from actors.protocol.stored_neurons import MOST_GAP, READ_BYTES, READ_THREADS, StoredShare
from model.bundles.bundle_file import BundleFile
from model.config.weight_formats import numpy_dtype
from model.errors import ServiceError
from model.weights.ffn import FfnWeights
from model.weights.memory import aligned_empty
from numba_kernels.serve.doorbell import INTS_A_CELL
from numba_kernels.serve.layer_ffn import FfnArrays
from numba_kernels.storage.direct_file import SHORT
from numba_kernels.storage.neuron_file import (
    DAMAGED,
    GATE,
    NUM_FACTS,
    PART_UNIT,
    REST,
    NeuronFile,
    RowBytes,
    Wanted,
    staging_bytes,
)
from numba_kernels.storage.neuron_slots import new_slots
from numba_kernels.storage.read_queue import (
    TICKETS,
    new_queue,
    read_all,
    serve_reads,
    stop_readers,
)
from numba_kernels.storage.stored_ffn import GATES, LAYER, NUM_OPTIONS, SLOTS, StoredNeurons

_PAGE_BYTES = 4096
_LOOK_S = 0.001


class NeuronStore:
    """Slots, the open file and the threads that read it."""

    def __init__(
        self,
        file: BundleFile,
        weights: FfnWeights,
        share: StoredShare,
        num_threads: int,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """`weights` has the shard's ids, offsets and biases, and no rows. Errors: ServiceError."""
        self._path, self._file = file.path, file
        self._weights, self._has_gates = weights, share.has_gates
        ids, offsets = weights.neuron_ids, weights.offsets
        self._most = int(np.diff(offsets).max(initial=0))
        num_slots = max(self._most, min(ids.size, share.num_slots))
        if num_slots < ids.size and share.num_slots < self._most + share.pinned.size:
            raise ValueError(f"{share.num_slots} slots for layers of {self._most} neurons")
        self._descriptor, unit, keeps_pages = open_direct(file.path)
        self._located = self._locate(unit, keeps_pages)
        self._wanted = Wanted(
            np.zeros(self._most, np.int32),
            np.zeros(self._most, np.uint8),
            np.zeros(self._most, np.int32),
        )
        self._queue = new_queue(READ_THREADS, self._most)
        self.arrays = self._new_arrays(num_slots, share.has_gates)
        self._layer = self._rows(self._most, not share.has_gates)
        self._stored = self._new_stored(num_slots, share, num_threads)
        self._start_readers(unit)
        try:
            if self._has_gates:
                self._load_gates(on_bytes)
            self._load_pinned(share.pinned, on_bytes)
        except ServiceError:
            self.close()
            raise

    @property
    def stored(self) -> StoredNeurons:
        """What compiled loops take."""
        return self._stored

    def _locate(self, unit: int, keeps_pages: bool) -> NeuronFile:
        geometry, offsets = self._file.geometry, self._weights.offsets
        layers = np.repeat(np.arange(geometry.num_layers, dtype=np.int32), np.diff(offsets))
        places = self._file.places()[layers, self._weights.neuron_ids]
        facts = np.zeros(NUM_FACTS, np.int64)
        facts[:] = [
            self._descriptor,
            unit,
            keeps_pages,
            geometry.first_byte,
            geometry.num_neurons,
            geometry.gate_bytes,
            geometry.rest_bytes,
        ]
        return NeuronFile(facts, layers, places, self._file.sums[layers, places])

    def _rows(self, num_rows: int, has_gates: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """New arrays for gate, up and down rows of so many neurons; memory is taken when filled."""
        geometry = self._file.geometry
        dtypes = numpy_dtype(geometry.gate_dtype), numpy_dtype(geometry.down_dtype)

        def rows(count: int, row_bytes: int, dtype: np.dtype) -> np.ndarray:
            return aligned_empty((count, row_bytes // dtype.itemsize), dtype)

        return (
            rows(num_rows if has_gates else 0, geometry.gate_row_bytes, dtypes[0]),
            rows(
                num_rows if geometry.up_row_bytes else 0,
                geometry.up_row_bytes or geometry.gate_row_bytes,
                dtypes[0],
            ),
            rows(num_rows, geometry.down_row_bytes, dtypes[1]),
        )

    def _new_arrays(self, num_slots: int, has_gates: bool) -> FfnArrays:
        weights = self._weights
        gate, up, down = self._rows(num_slots, not has_gates)
        gate_bias = weights.gate_bias
        if has_gates:
            gate = self._rows(weights.neuron_ids.size, True)[0]
        elif gate_bias.size:
            gate_bias = np.zeros(num_slots, np.float32)
        up_bias = np.zeros(num_slots if weights.up_bias.size else 0, np.float32)
        return FfnArrays(
            weights.offsets, gate, up, down, gate_bias, up_bias, down_bias=weights.down_bias
        )

    def _new_stored(self, num_slots: int, share: StoredShare, num_threads: int) -> StoredNeurons:
        options = np.zeros(NUM_OPTIONS, np.int64)
        options[:] = [share.has_gates, share.reads_whole, share.most_bytes, share.most_gap]
        num_neurons, num_places = self._weights.neuron_ids.size, self._file.geometry.num_neurons
        return StoredNeurons(
            arrays=self.arrays,
            gate_bias=self._weights.gate_bias,
            up_bias=self._weights.up_bias,
            file=self._located,
            slots=new_slots(num_neurons, num_slots, share.pinned),
            queue=self._queue,
            wanted=self._wanted,
            marks=np.zeros(num_places, np.int32),
            mark_parts=np.zeros(num_places, np.uint8),
            gate_slots=np.zeros(self._most, np.int32),
            rest_slots=np.zeros((num_threads, self._most), np.int32),
            options=options,
            waits=np.zeros(1, np.int64),
        )

    def _start_readers(self, unit: int) -> None:
        in_slots = self.arrays.gate[:0] if self._has_gates else self.arrays.gate
        slots = _bytes_of(in_slots, *self.arrays[2:4])
        own_gates = _bytes_of(self.arrays.gate, self.arrays.up[:0], self.arrays.down[:0])
        targets = (slots, _bytes_of(*self._layer), own_gates)
        size = int(staging_bytes(READ_BYTES, self._file.geometry.bundle_bytes, unit))
        self._readers = [
            threading.Thread(
                target=serve_reads,
                args=(
                    thread,
                    self._queue,
                    self._located,
                    self._wanted,
                    aligned_empty((size,), np.uint8, _PAGE_BYTES, huge_pages=False),
                    targets,
                ),
                name=f"read-{thread}",
                daemon=True,
            )
            for thread in range(READ_THREADS)
        ]
        for reader in self._readers:
            reader.start()
        # Each takes a ticket once its loop is compiled; one that cannot be must not be waited for.
        while self._queue.cells[TICKETS * INTS_A_CELL] < READ_THREADS:
            if not all(reader.is_alive() for reader in self._readers):
                raise ServiceError("the threads that read neurons could not be started")
            time.sleep(_LOOK_S)

    def _read(self, rows: np.ndarray, parts: np.ndarray, targets: np.ndarray, target: int) -> None:
        """Read parts of one layer's neurons, wherever they stand. Errors: ServiceError."""
        order = np.argsort(self._located.places[rows])
        for array, values in zip(self._wanted, (rows, parts, targets), strict=True):
            array[: rows.size] = values[order]
        # All of a layer is wanted, so what lies between is not much, or is other rows of the same.
        gap = max(MOST_GAP, self._file.geometry.rest_bytes)
        queue, file = self._queue, self._located
        if rows.size and not read_all(
            queue, file, self._wanted, rows.size, READ_BYTES, gap, target
        ):
            raise ServiceError(self.failure())

    def _load_gates(self, on_bytes: Callable[[int], None]) -> None:
        for first, last in self._layer_rows():
            rows = np.arange(first, last, dtype=np.int32)
            self._read(rows, np.full(rows.size, GATE, np.uint8), rows, GATES)
            on_bytes(rows.size * self._file.geometry.gate_row_bytes)

    def _load_pinned(self, pinned: np.ndarray, on_bytes: Callable[[int], None]) -> None:
        slots, geometry = self._stored.slots, self._file.geometry
        parts = np.uint8(REST if self._has_gates else GATE | REST)
        for first, last in self._layer_rows():
            rows = pinned[(pinned >= first) & (pinned < last)]
            own = slots.slot_of[rows]
            self._read(rows, np.full(rows.size, parts, np.uint8), own, SLOTS)
            slots.held[own] = parts
            if self.arrays.up_bias.size:
                self.arrays.up_bias[own] = self._weights.up_bias[rows]
            if self._weights.gate_bias.size and parts & GATE:
                self.arrays.gate_bias[own] = self._weights.gate_bias[rows]
            on_bytes(rows.size * (geometry.slot_bytes if parts & GATE else geometry.rest_bytes))

    def _layer_rows(self) -> Sequence[tuple[int, int]]:
        return list(pairwise(self._weights.offsets.tolist()))

    def layer_arrays(self, layer: int) -> FfnArrays:
        """All of a layer's neurons, as one layer, until the next call: slots stay as they are.

        Errors:  ServiceError
        """
        first, last = self._layer_rows()[layer]
        rows = np.arange(first, last, dtype=np.int32)
        slots, has_gates = self._stored.slots, self._has_gates
        parts = np.uint8(REST if has_gates else GATE | REST)
        slot = slots.slot_of[rows]
        is_here = (slot >= 0) & (slots.held[slot] & parts == parts)
        here = np.flatnonzero(is_here)
        for own, kept in zip(self._layer, (self.arrays.gate, *self.arrays[2:4]), strict=True):
            if own.shape[0]:
                own[here] = kept[slot[here]]
        missing = np.flatnonzero(~is_here).astype(np.int32)
        self._read(rows[missing], np.full(missing.size, parts, np.uint8), missing, LAYER)
        gate, up, down = (own[: rows.size] for own in self._layer)
        weights = self._weights

        def part(bias: np.ndarray) -> np.ndarray:
            return bias[first:last] if bias.size else bias

        return FfnArrays(
            np.array([0, rows.size]),
            self.arrays.gate[first:last] if has_gates else gate,
            up,
            down,
            part(weights.gate_bias),
            part(weights.up_bias),
            weights.down_bias[layer : layer + 1],
        )

    def failure(self) -> str:
        """What became of the last read that failed; "" where none did."""
        status, row = self._queue.failure.tolist()
        if not status:
            return ""
        layer, neuron = int(self._located.layers[row]), int(self._weights.neuron_ids[row])
        if status == SHORT:
            return f"{self._path}: became shorter while in use; make it with `hotcold pack` again"
        if status == DAMAGED:
            return (
                f"{self._path}: neuron {neuron} of layer {layer} is not what was written; see "
                "what else with `hotcold pack --verify`, and make the file again"
            )
        return (
            f"{self._path}: neuron {neuron} of layer {layer} cannot be read "
            f"({os.strerror(status)}); mend the disk, or make the file elsewhere"
        )

    def close(self) -> None:
        """End the reading threads and close the file."""
        stop_readers(self._queue)
        for reader in self._readers:
            reader.join()
        os.close(self._descriptor)


def _bytes_of(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> RowBytes:
    def rows(array: np.ndarray) -> np.ndarray:
        num_bytes = array.shape[1] * array.dtype.itemsize
        return array.reshape(-1).view(np.uint8).reshape(array.shape[0], num_bytes)

    up_bytes = rows(up) if up.shape[0] else np.zeros((0, 0), np.uint8)
    return RowBytes(rows(gate), up_bytes, rows(down))


def open_direct(path: Path) -> tuple[int, int, bool]:
    """A descriptor, the unit of reads, and whether the kernel keeps pages without being asked to.

    Direct reads in the file system's least unit; where it has none, through the page cache, whose
    pages are let go of after each read.
    Errors:  ServiceError
    """
    try:
        buffered = os.open(path, os.O_RDONLY)
    except OSError as problem:
        raise ServiceError(f"{path}: cannot be read ({problem.strerror})") from None
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return buffered, PART_UNIT, False
    page = aligned_empty((_PAGE_BYTES,), np.uint8, _PAGE_BYTES, huge_pages=False)
    for unit in (PART_UNIT, _PAGE_BYTES):
        try:
            if os.preadv(direct, [page[:unit].data], unit) == unit:
                os.close(buffered)
                return direct, unit, True
        except OSError:
            continue
    os.close(direct)
    return buffered, PART_UNIT, False
