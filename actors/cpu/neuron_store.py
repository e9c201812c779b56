"""A shard of neurons in a bundle file, some of them in memory, as compiled loops use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hotcold.actors.cpu.bundle_reads import BundleReads, Bundles, bytes_of, new_rows
from hotcold.actors.protocol.offloaded_neurons import OffloadedShare
from hotcold.model.bundles.bundle_file import BundleFile
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.model.errors import ServiceError
from hotcold.model.weights.ffn import FfnWeights
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.ffn_arrays import NO_NORMS, FfnArrays, most_rows
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.predict_team import SignPredictors
from hotcold.numba_kernels.storage import MAX_GAP
from hotcold.numba_kernels.storage.layer_slots import (
    await_layer,
    copy_layer,
    request_layer,
)
from hotcold.numba_kernels.storage.neuron_file import GATE, UP_DOWN, RowBytes
from hotcold.numba_kernels.storage.offloaded_neurons import (
    NUM_COUNTERS,
    OffloadedNeurons,
)
from hotcold.numba_kernels.storage.output_rows import no_outputs
from hotcold.numba_kernels.storage.read_ahead import new_read_ahead
from hotcold.numba_kernels.storage.read_queue import drop_reads
from hotcold.numba_kernels.storage.slots import EPOCH, Slots, fill_slots, neuron_slots
from hotcold.placement.storage import LISTED, listed_rates

Together = Callable[[Callable[[int], None]], None]  # has every thread call it with its number

_MAX_AHEAD = 512  # neurons of a layer, where there are slots for them
_NO_LAYER = -1, -1


class NeuronStore(BundleReads):
    """Slots, the open file and the threads that read it."""

    def __init__(
        self,
        file: BundleFile,
        weights: FfnWeights,
        share: OffloadedShare,
        num_threads: int,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        predictors: SignPredictors | None = None,
        has_down_norms: bool = False,
    ) -> None:
        """`weights` has the shard's ids, starts and biases, and no rows.

        With `predictors` of the shard's neurons the next layer's are read ahead; their bits may
        follow by `use_bits`. With `has_down_norms` requests may have thresholds of products.
        Errors:  ServiceError
        """
        self._weights = weights
        ids = weights.neuron_ids
        self._most = most_rows(weights.starts)
        num_gates, num_up_downs = (
            max(self._most, min(ids.size, number))
            for number in (share.num_gates, share.num_up_downs)
        )
        self._num_threads = num_threads
        bundles = _bundles_of(file, weights)
        super().__init__(file, bundles, self._most)
        own = file.geometry.layer_firsts[bundles.layers] + bundles.places
        norms = file.norms[own, 0] if has_down_norms else NO_NORMS
        self._down_norms = norms
        self.arrays = self._new_arrays(num_gates, num_up_downs)
        self.stored = self._new_stored(num_gates, num_up_downs, share, num_threads, predictors)
        self._gates_stay = num_gates == ids.size
        self._slot_rows = self._new_row_bytes()
        self._requested_layer = _NO_LAYER
        self.start(self.stored.gates, self.stored.up_downs, self._slot_rows)
        self._try_layers()
        try:
            self._fill(share.rates, on_bytes)
        except ServiceError:
            self.close()
            raise

    def _new_arrays(self, num_gates: int, num_up_downs: int) -> FfnArrays:
        """Rows of all slots; memory is taken when they are filled."""
        geometry, weights = self._geometry, self._weights
        dtypes = numpy_dtype(geometry.gate_dtype), numpy_dtype(geometry.down_dtype)

        num_ups = num_up_downs if geometry.up_row_bytes else 0
        return FfnArrays(
            weights.starts,
            new_rows(num_gates, geometry.gate_row_bytes, dtypes[0]),
            new_rows(num_ups, geometry.gate_row_bytes, dtypes[0]),
            new_rows(num_up_downs, geometry.down_row_bytes, dtypes[1]),
            weights.gate_bias,
            weights.up_bias,
            weights.down_bias,
            self._down_norms,
            *weights.stripes,
        )

    def _new_stored(
        self,
        num_gates: int,
        num_up_downs: int,
        share: OffloadedShare,
        num_threads: int,
        predictors: SignPredictors | None,
    ) -> OffloadedNeurons:
        num_neurons = self._weights.neuron_ids.size
        num_places = max(self._geometry.layer_bundles)
        # Two layers may be in flight, and none may take a slot that this layer needs.
        spare = num_up_downs - self._most
        if num_gates < num_neurons:
            spare = min(spare, num_gates - self._most)
        rates = share.rates if share.rates.size else np.zeros(num_neurons, np.float32)
        return OffloadedNeurons(
            arrays=self.arrays,
            file=self.located,
            gates=neuron_slots(listed_rates(rates, LISTED * float(rates.mean())), num_gates),
            up_downs=neuron_slots(rates, num_up_downs),
            queue=self.queue,
            ahead=new_read_ahead(predictors, num_threads, min(_MAX_AHEAD, spare // 2)),
            marks=np.zeros(num_places, np.int32),
            mark_parts=np.zeros(num_places, np.uint8),
            gate_slots=np.zeros(self._most, np.int32),
            gate_order=np.zeros(self._most, np.int32),
            up_down_slots=np.zeros(self._most, np.int32),
            pending=np.zeros(self._most, np.int32),
            missing=np.zeros(self._most, np.int32),
            reads_whole=np.array([share.reads_whole]),
            counters=np.zeros(NUM_COUNTERS * INTS_A_CELL, np.int32),
            waited_ns=np.zeros(num_threads, np.int64),
            failed=np.zeros(num_threads, np.int64),
        )

    def _new_row_bytes(self) -> RowBytes:
        slots = self.stored.gates.slot_of, self.stored.up_downs.slot_of
        offsets, patterns = np.zeros((1, 1), np.int32), np.zeros(slots[0].size, np.int32)
        return RowBytes(*bytes_of(self.arrays[1:4]), *slots, offsets, patterns, no_outputs())

    def _fill(self, rates: np.ndarray, on_bytes: Callable[[int], None]) -> None:
        """Read all gates where they stay; of the rest what has the highest rates, if known."""
        geometry, (gates, up_downs) = self._geometry, (self.stored.gates, self.stored.up_downs)
        chosen = np.zeros(self._weights.neuron_ids.size, np.uint8)  # which parts of each neuron
        if self._gates_stay:
            self._choose(chosen, GATE, gates, np.arange(chosen.size, dtype=np.int32))
        elif rates.size:
            self._choose(chosen, GATE, gates, _highest(rates, gates.unit_of.size))
        if rates.size:
            self._choose(chosen, UP_DOWN, up_downs, _highest(rates, up_downs.unit_of.size))
        for first, last in self._layer_rows():
            rows = first + np.flatnonzero(chosen[first:last]).astype(np.int32)
            self.read(rows, chosen[rows])
            num_gates = int(np.count_nonzero(chosen[rows] & GATE))
            num_up_downs = int(np.count_nonzero(chosen[rows] & UP_DOWN))
            on_bytes(
                num_gates * geometry.gate_row_bytes + num_up_downs * geometry.up_down_row_bytes
            )

    @staticmethod
    def _choose(chosen: np.ndarray, part: int, slots: Slots, rows: np.ndarray) -> None:
        """Give neurons `rows` the first slots, and mark them to be read."""
        fill_slots(slots, rows)
        slots.requested[rows] = 1
        chosen[rows] |= part

    def _layer_rows(self) -> Sequence[tuple[int, int]]:
        return [(first, last) for first, last in self._weights.starts[:, [0, -1]].tolist()]

    def _try_layers(self) -> None:
        """Compile what prompts need, so that none waits for it."""
        request_layer(self.stored, 0, 0, *self._bases, MAX_GAP)
        copy_layer(*self._copied, 0, *self._bases, 0, 0)
        await_layer(self.stored)
        self._drop_reads()

    def _drop_reads(self) -> None:
        slots = self.stored.gates, self.stored.up_downs
        drop_reads(self.queue, slots[0].requested, slots[1].requested)

    def request_layer(self, layer: int) -> None:
        """Start to read the layer for `layer_arrays`, in the background.

        A step that comes before cancels what has not been begun.
        """
        self._request_layer(layer)
        self._requested_layer = layer, int(self.stored.up_downs.state[EPOCH])

    def _request_layer(self, layer: int) -> None:
        # All of the layer is read: gaps are small, or hold other rows of the same layer.
        gap = max(MAX_GAP, self._geometry.up_down_bytes)
        self._drop_reads()
        layer_rows = self._layer_rows()[layer]
        request_layer(self.stored, *layer_rows, *self._bases, gap)

    @property
    def _bases(self) -> tuple[int, int]:
        """The slots of a layer's first gate and first up and down rows, where it is contiguous."""
        gates, up_downs = self.stored.gates, self.stored.up_downs
        return gates.unit_of.size - self._most, up_downs.unit_of.size - self._most

    @property
    def _copied(self) -> tuple[RowBytes, Slots, Slots]:
        return self._slot_rows, self.stored.gates, self.stored.up_downs

    def layer_arrays(self, layer: int, together: Together) -> FfnArrays:
        """All of a layer's neurons, as one layer, until the next request.

        They are contiguous in the last slots; `together` has all threads copy what is in others.
        Where gates stay, `await_up_down` must return before up and down rows are read.
        Errors:  ServiceError
        """
        first, last = self._layer_rows()[layer]
        size, (gate_base, base) = last - first, self._bases
        if self._requested_layer != (layer, int(self.stored.up_downs.state[EPOCH])):
            self._request_layer(layer)
        self._requested_layer = _NO_LAYER

        def copy(thread: int) -> None:
            share = split_range(size, thread, self._num_threads, 1)
            copy_layer(*self._copied, first, *self._bases, *share)

        together(copy)
        if not self._gates_stay:
            self.await_up_down()
        weights = self._weights

        def part(bias: np.ndarray) -> np.ndarray:
            return bias[first:last] if bias.size else bias

        gates = slice(first, last) if self._gates_stay else slice(gate_base, gate_base + size)
        return FfnArrays(
            weights.starts[layer : layer + 1] - first,
            self.arrays.gate[gates],
            self.arrays.up[base : base + size],
            self.arrays.down[base : base + size],
            part(weights.gate_bias),
            part(weights.up_bias),
            weights.down_bias[layer : layer + 1],
            part(self._down_norms),
            *weights.stripes._replace(ends=weights.stripes.ends[layer : layer + 1]),
        )

    def use_bits(self, bits: np.ndarray) -> None:
        """Use these predictor bits (words,) uint64, unless the store has its own."""
        ahead = self.stored.ahead
        if not ahead.predictors.bits.size:
            ahead = ahead._replace(predictors=ahead.predictors._replace(bits=bits))
            self.stored = self.stored._replace(ahead=ahead)

    def await_up_down(self) -> None:
        """Return when all of the layer of `layer_arrays` is loaded. Errors: ServiceError."""
        if not await_layer(self.stored):
            raise ServiceError(self.failure())


def _bundles_of(file: BundleFile, weights: FfnWeights) -> Bundles:
    """A bundle for each neuron of the shard."""
    starts = weights.starts
    layers = np.repeat(np.arange(len(starts), dtype=np.int32), starts[:, -1] - starts[:, 0])
    parts = np.split(weights.neuron_ids, starts[1:, 0])
    places = [layer[ids] for layer, ids in zip(file.places(), parts, strict=True)]
    return Bundles(layers, np.concatenate(places), weights.neuron_ids, "neuron")


def _highest(rates: np.ndarray, count: int) -> np.ndarray:
    """The `count` neurons with the highest rates."""
    return np.argsort(-rates, kind="stable")[:count].astype(np.int32)
