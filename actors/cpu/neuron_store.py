"""A shard of neurons in a bundle file, some of them in memory; what compiled loops read them by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from actors.cpu.bundle_reads import BundleReads
from actors.protocol.stored_neurons import MOST_GAP, READ_BYTES, StoredShare
from model.bundles.bundle_file import BundleFile
from model.config.weight_formats import numpy_dtype
from model.errors import ServiceError
from model.weights.ffn import FfnWeights
from model.weights.memory import aligned_empty
from numba_kernels.decode.rows import split_range
from numba_kernels.serve.layer_ffn import NO_NORMS, FfnArrays
from numba_kernels.serve.predict_team import SignPredictors
from numba_kernels.storage.layer_slots import (
    ask_for_layer,
    await_layer,
    copy_layer,
    settle_reads,
)
from numba_kernels.storage.neuron_slots import EPOCH, forget_slots, new_slots
from numba_kernels.storage.read_ahead import new_read_ahead
from numba_kernels.storage.reads.neuron_file import GATE, REST, RowBytes
from numba_kernels.storage.stored_neurons import GATES, NUM_OPTIONS, SLOTS, StoredNeurons

Together = Callable[[Callable[[int], None]], None]  # has every thread call it with its number

_MOST_AHEAD = 512  # neurons of a layer, where there are slots for them
_NO_LAYER = -1, -1


class NeuronStore:
    """Slots, the open file and the threads that read it."""

    def __init__(
        self,
        file: BundleFile,
        weights: FfnWeights,
        share: StoredShare,
        num_threads: int,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        predictors: SignPredictors | None = None,
        has_down_norms: bool = False,
    ) -> None:
        """`weights` has the shard's ids, offsets and biases, and no rows.

        With `predictors` of the shard's neurons the next layer's are read ahead. With
        `has_down_norms` thresholds of products can be told in requests.
        Errors:  ServiceError
        """
        self._file, self._weights, self._has_gates = file, weights, share.has_gates
        ids, offsets = weights.neuron_ids, weights.offsets
        self._most = int(np.diff(offsets).max(initial=0))
        num_slots = max(self._most, min(ids.size, share.num_slots))
        if num_slots > share.num_slots and num_slots < ids.size:
            raise ValueError(f"{share.num_slots} slots for layers of {self._most} neurons")
        self._num_threads = num_threads
        self._reads = BundleReads(file, weights, self._most, share.piece_bytes)
        located = self._reads.located
        norms = file.norms[located.layers, located.places] if has_down_norms else NO_NORMS
        self._down_norms = norms
        self.arrays = self._new_arrays(num_slots, share.has_gates)
        self._slot_rows, own_gates = self._targets()
        self.stored = self._new_stored(num_slots, share, num_threads, predictors)
        self._asked_layer = _NO_LAYER
        self._reads.start(self.stored.slots, (self._slot_rows, own_gates))
        self._try_layers()
        try:
            if self._has_gates:
                self._load_gates(on_bytes)
            self._fill(share.rates, on_bytes)
        except ServiceError:
            self.close()
            raise

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
        norms = np.zeros(num_slots if self._down_norms.size else 0, np.float32)
        return FfnArrays(
            weights.offsets, gate, up, down, gate_bias, up_bias, weights.down_bias, norms
        )

    def _new_stored(
        self,
        num_slots: int,
        share: StoredShare,
        num_threads: int,
        predictors: SignPredictors | None,
    ) -> StoredNeurons:
        options = np.zeros(NUM_OPTIONS, np.int64)
        options[:] = [
            share.has_gates,
            share.reads_whole,
            share.most_bytes,
            share.most_gap,
            share.forgets,
            share.waits_first,
        ]
        num_neurons, num_places = self._weights.neuron_ids.size, self._file.geometry.num_neurons
        # Two layers' may be under way, and none may take a slot that this layer needs.
        spare = num_slots - self._most
        rates = share.rates if share.rates.size else np.zeros(num_neurons, np.float32)
        return StoredNeurons(
            arrays=self.arrays,
            gate_bias=self._weights.gate_bias,
            up_bias=self._weights.up_bias,
            down_norms=self._down_norms,
            file=self._reads.located,
            slots=new_slots(rates, num_slots),
            queue=self._reads.queue,
            ahead=new_read_ahead(predictors, num_threads, min(_MOST_AHEAD, spare // 2)),
            marks=np.zeros(num_places, np.int32),
            mark_parts=np.zeros(num_places, np.uint8),
            gate_slots=np.zeros(self._most, np.int32),
            rest_slots=np.zeros((num_threads, self._most), np.int32),
            to_come=np.zeros((num_threads, self._most), np.int32),
            options=options,
            waits=np.zeros(num_threads, np.int64),
            failed=np.zeros(num_threads, np.int64),
        )

    def _targets(self) -> tuple[RowBytes, RowBytes]:
        in_slots = self.arrays.gate[:0] if self._has_gates else self.arrays.gate
        slots = _bytes_of(in_slots, *self.arrays[2:4])
        own_gates = _bytes_of(self.arrays.gate, self.arrays.up[:0], self.arrays.down[:0])
        return slots, own_gates

    def _load_gates(self, on_bytes: Callable[[int], None]) -> None:
        for first, last in self._layer_rows():
            rows = np.arange(first, last, dtype=np.int32)
            self._reads.read(rows, np.full(rows.size, GATE, np.uint8), rows, GATES)
            on_bytes(rows.size * self._file.geometry.gate_row_bytes)

    def _fill(self, rates: np.ndarray, on_bytes: Callable[[int], None]) -> None:
        """Read the neurons that are wanted most; where nothing is known of that, none."""
        slots, geometry = self.stored.slots, self._file.geometry
        most = np.argsort(-rates, kind="stable")[: slots.row_of.size].astype(np.int32)
        slots.slot_of[most] = np.arange(most.size, dtype=np.int32)
        slots.row_of[: most.size] = most
        for first, last in self._layer_rows():
            rows = most[(most >= first) & (most < last)]
            own = slots.slot_of[rows]
            slots.asked[own] = self._parts
            parts = np.full(rows.size, self._parts, np.uint8)
            self._reads.read(rows, parts, own, SLOTS)
            if self.arrays.up_bias.size:
                self.arrays.up_bias[own] = self._weights.up_bias[rows]
            if self._down_norms.size:
                self.arrays.down_norms[own] = self._down_norms[rows]
            if self._weights.gate_bias.size and not self._has_gates:
                self.arrays.gate_bias[own] = self._weights.gate_bias[rows]
            on_bytes(rows.size * (geometry.rest_bytes if self._has_gates else geometry.slot_bytes))

    @property
    def _parts(self) -> int:
        """All that slots have of a neuron."""
        return REST if self._has_gates else GATE | REST

    def _layer_rows(self) -> Sequence[tuple[int, int]]:
        return list(pairwise(self._weights.offsets.tolist()))

    def _try_layers(self) -> None:
        """Go through what prompts need, so that none waits until it is compiled."""
        ask_for_layer(self.stored, 0, self._base, 0, READ_BYTES, MOST_GAP)
        copy_layer(self.stored.slots, self._slot_rows, 0, self._base, 0, 0)
        await_layer(self.stored)
        settle_reads(self.stored)
        forget_slots(self.stored.slots)

    def ask_for_layer(self, layer: int) -> None:
        """Let the layer be read for `layer_arrays`, while something else is done.

        A step that comes before takes back what has not been begun.
        """
        self._ask_for_layer(layer)
        self._asked_layer = layer, int(self.stored.slots.state[EPOCH])

    def _ask_for_layer(self, layer: int) -> None:
        # All of the layer is wanted: what lies between is not much, or is other rows of the same.
        gap = max(MOST_GAP, self._file.geometry.rest_bytes)
        settle_reads(self.stored)
        ask_for_layer(self.stored, layer, self._base, self._parts, READ_BYTES, gap)

    @property
    def _base(self) -> int:
        """The slot of a layer's first neuron, where it lies side by side."""
        return self.stored.slots.row_of.size - self._most

    def layer_arrays(self, layer: int, together: Together) -> FfnArrays:
        """All of a layer's neurons, as one layer, until the next request.

        They lie side by side in the last slots; `together` has all threads copy what is in others.
        Where gates stay, `await_rest` comes before up and down rows are looked at.
        Errors:  ServiceError
        """
        first, last = self._layer_rows()[layer]
        slots, base, size = self.stored.slots, self._base, last - first
        if self._asked_layer != (layer, int(slots.state[EPOCH])):
            self._ask_for_layer(layer)
        self._asked_layer = _NO_LAYER

        def copy(thread: int) -> None:
            share = split_range(size, thread, self._num_threads, 1)
            copy_layer(slots, self._slot_rows, first, base, *share)

        together(copy)
        if not self._has_gates:
            self.await_rest()
        weights = self._weights

        def part(bias: np.ndarray) -> np.ndarray:
            return bias[first:last] if bias.size else bias

        gates = slice(first, last) if self._has_gates else slice(base, base + size)
        return FfnArrays(
            np.array([0, size]),
            self.arrays.gate[gates],
            self.arrays.up[base : base + size],
            self.arrays.down[base : base + size],
            part(weights.gate_bias),
            part(weights.up_bias),
            weights.down_bias[layer : layer + 1],
            part(self._down_norms),
        )

    def await_rest(self) -> None:
        """Return when all of the layer of `layer_arrays` has come. Errors: ServiceError."""
        if not await_layer(self.stored):
            raise ServiceError(self.failure())

    def failure(self) -> str:
        """What became of the last read that failed; "" where none did."""
        return self._reads.failure()

    def close(self) -> None:
        """End the reading threads and close the file."""
        self._reads.close()


def _bytes_of(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> RowBytes:
    def rows(array: np.ndarray) -> np.ndarray:
        num_bytes = array.shape[1] * array.dtype.itemsize
        return array.reshape(-1).view(np.uint8).reshape(array.shape[0], num_bytes)

    up_bytes = rows(up) if up.shape[0] else np.zeros((0, 0), np.uint8)
    return RowBytes(rows(gate), up_bytes, rows(down))
