"""A shard in a bundle file, some of its units in memory, as compiled loops use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hotcold.actors.cpu.bundle_reads import BundleReads, bytes_of, new_rows
from hotcold.actors.cpu.units import Units
from hotcold.actors.protocol.offloaded_neurons import OffloadedShare
from hotcold.model.bundles.bundle_file import BundleFile
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.model.errors import ServiceError
from hotcold.model.weights.ffn import FfnWeights
from hotcold.numba_kernels.block_rows import NUM_PLACE_NUMBERS, BlockRows
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.ffn_arrays import (
    NO_NORMS,
    NO_STRIPES,
    FfnArrays,
    TransposedArrays,
    most_rows,
)
from hotcold.numba_kernels.loops.mailbox import SharedBuffers
from hotcold.numba_kernels.loops.predict_team import SignPredictors
from hotcold.numba_kernels.loops.work_stealing import new_block_counters
from hotcold.numba_kernels.storage import MAX_GAP
from hotcold.numba_kernels.storage.layer_slots import await_layer, copy_layer, request_layer
from hotcold.numba_kernels.storage.neuron_file import GATE, UP_DOWN, RowBytes
from hotcold.numba_kernels.storage.offloaded_units import (
    OffloadedExperts,
    OffloadedNeurons,
    ReadAhead,
    await_units,
    request_experts,
)
from hotcold.numba_kernels.storage.output_rows import OutputRows, no_outputs, place_unit
from hotcold.numba_kernels.storage.read_ahead import MIN_AHEAD, new_read_ahead, submit_ahead
from hotcold.numba_kernels.storage.read_queue import drop_reads
from hotcold.numba_kernels.storage.routed_ahead import (
    new_lock,
    release_lock,
    serve_routed,
    stop_routed,
    take_lock,
)
from hotcold.numba_kernels.storage.slots import (
    EPOCH,
    Slots,
    expert_slots,
    fill_slots,
    has_all,
    neuron_slots,
)
from hotcold.placement.storage import LISTED, listed_rates

Together = Callable[[Callable[[int], None]], None]  # has every thread call it with its number
OnBytes = Callable[[int], None]

_MAX_AHEAD = 512  # neurons of a layer, where there are slots for them
_NO_LAYER = -1, -1
_NO_BLOCKS = np.empty(0, np.int64)


class UnitStore(BundleReads):
    """Slots, the open file and the threads that read it."""

    def __init__(
        self,
        file: BundleFile,
        units: Units,
        weights: FfnWeights,
        caches: tuple[Slots, Slots],
        ahead: ReadAhead,
        num_threads: int,
        *,
        outputs: OutputRows,
        reads_whole: bool,
        has_down_norms: bool,
    ) -> None:
        """`weights` has the shard's ids, starts and biases, and no rows.

        Gates are in one of both `caches`, up and down rows in the other, or whole units in one that
        is given twice. With `has_down_norms` requests may have thresholds of products.
        Errors:  ServiceError
        """
        super().__init__(file, units, *caches)
        self._weights, self._num_threads = weights, num_threads
        norms = units.norms(file) if has_down_norms else NO_NORMS
        self.arrays = self._new_arrays(caches, outputs, norms)
        self.stored = self._new_stored(caches, outputs, ahead, reads_whole)
        arrays, none = self.arrays, np.zeros((0, 0), np.uint8)
        matrices = none, none, none
        if isinstance(arrays, FfnArrays):
            matrices = arrays.gate, arrays.up, arrays.down
        gate_rows, up_down_rows = (slots.row_of for slots in caches)
        self._rows = RowBytes(
            *bytes_of(matrices), units.units, gate_rows, up_down_rows, units.offsets,
            units.patterns, outputs,
        )  # fmt: skip
        self.start(self._rows)

    def _new_arrays(
        self, caches: tuple[Slots, Slots], memory: OutputRows, norms: np.ndarray
    ) -> FfnArrays | TransposedArrays:
        """Rows of units that stay, then of all slots; memory is taken when they are filled.

        Where down is a row an output all are in `memory`.
        """
        geometry, weights = self._geometry, self._weights
        vectors = weights.gate_bias, weights.up_bias, weights.down_bias, norms
        stripes, first, at_once = weights.stripes
        if geometry.has_outputs:
            shape = len(weights.starts), -1, NUM_PLACE_NUMBERS
            gates, ups, downs = (
                BlockRows(
                    tuple(memory.rows.view(numpy_dtype(name)) for name in geometry.formats(role)),
                    places.reshape(shape) if places.size else places.reshape(shape[0], 0, shape[2]),
                )
                for role, places in enumerate((memory.gates, memory.ups, memory.places))
            )
            return TransposedArrays(
                weights.starts, gates, ups, downs, *vectors, NO_STRIPES, stripes, first, at_once
            )  # fmt: skip
        gate, down = numpy_dtype(geometry.gate_dtype), numpy_dtype(geometry.down_dtype)
        num_gates, num_others = (
            slots.first_row + slots.unit_of.size * slots.rows_a_slot for slots in caches
        )
        num_ups = num_others if geometry.up_row_bytes else 0
        matrices = (
            new_rows(num_gates, geometry.gate_row_bytes, gate),
            new_rows(num_ups, geometry.gate_row_bytes, gate),
            new_rows(num_others, geometry.down_row_bytes, down),
        )
        return FfnArrays(weights.starts, *matrices, *vectors, stripes, first, at_once)

    def _new_stored(
        self, caches: tuple[Slots, Slots], outputs: OutputRows, ahead: ReadAhead, reads_whole: bool
    ) -> OffloadedNeurons:
        geometry, starts, threads = self._geometry, self._weights.starts, self._num_threads
        num_places, most = max(geometry.layer_bundles), most_rows(starts)
        num_blocks = starts.shape[1] - 1
        kind = OffloadedExperts if geometry.is_mixture else OffloadedNeurons
        num_units = num_blocks if geometry.is_mixture else most
        return kind(
            arrays=self.arrays,
            outputs=outputs,
            file=self.located,
            gates=caches[0],
            up_downs=caches[1],
            queue=self.queue,
            ahead=ahead,
            marks=np.zeros(num_places, np.int32),
            mark_parts=np.zeros(num_places, np.uint8),
            slots=np.zeros(num_units, np.int32),
            order=np.zeros(num_units, np.int32),
            places=np.zeros(most, np.int32),
            reads_whole=np.array([reads_whole]),
            counters=np.stack([new_block_counters(2, threads) for _ in range(num_blocks)]),
            misses=np.zeros(self._units.sizes.size if geometry.is_mixture else 0, np.uint32),
            lock=new_lock(),
            counts=np.zeros(4, np.int64),
            waited_ns=np.zeros(threads, np.int64),
            failed=np.zeros(threads, np.int64),
        )

    def _fill(self, on_bytes: OnBytes) -> None:
        """Read what stays, then into slots what is wanted most, if that is known.

        Errors:  ServiceError; then the store is closed
        """
        try:
            self._read_first(on_bytes)
        except ServiceError:
            self.close()
            raise

    def _read_first(self, on_bytes: OnBytes) -> None:
        units, located = self._units, self.located
        parts, num_bytes = np.zeros(units.layers.size, np.uint8), np.zeros(units.layers.size)
        caches = [self.stored.gates, self.stored.up_downs]
        for slots in caches[:1] if self._geometry.is_mixture else caches:
            bundles = np.flatnonzero(units.by_bundle(self._filled(slots)))
            slots.requested[bundles] = 1
            parts[bundles] |= slots.part & units.parts[bundles]
        for number, part in enumerate((GATE, UP_DOWN)):
            num_bytes += located.sizes[located.kinds, number] * (parts & part > 0)
        for layer in range(len(self._weights.starts)):
            rows = np.flatnonzero((units.layers == layer) & (parts > 0)).astype(np.int32)
            self.read(rows, parts[rows])
            on_bytes(int(num_bytes[rows].sum()))

    def _filled(self, slots: Slots) -> np.ndarray:
        """Give slots to what is wanted most; returns which units are in memory then: (E,) bool."""
        units, wanted = self._units, np.zeros(0, np.int64)
        if slots.part == GATE and has_all(slots):
            wanted = np.arange(slots.unit_of.size)
        elif slots.weights.any():
            order = np.argsort(-np.where(units.shares, slots.weights, -1), kind="stable")
            wanted = order[: slots.unit_of.size]
        fill_slots(slots, wanted)
        outputs, chosen = self.stored.outputs, units.stays.copy()
        for unit in wanted if outputs.begins.size else ():
            place_unit(outputs, unit, outputs.begins[slots.slot_of[unit]])
        chosen[wanted] = True
        return chosen

    def block_firsts(self, layer: int) -> np.ndarray | None:
        """The first row of each block of a layer in `layer_arrays`; None where they follow on."""
        return None

    def await_up_down(self) -> None:
        """Return when all of the layer of `layer_arrays` is loaded. Errors: ServiceError."""


class NeuronStore(UnitStore):
    """Of single neurons: a cache of gate rows, and one of up and down rows."""

    def __init__(
        self,
        file: BundleFile,
        weights: FfnWeights,
        share: OffloadedShare,
        num_threads: int,
        on_bytes: OnBytes = lambda num_bytes: None,
        predictors: SignPredictors | None = None,
        has_down_norms: bool = False,
    ) -> None:
        """As `UnitStore`. With `predictors` of the shard's neurons the next layer's are read ahead.

        Their bits may follow by `attach`.
        """
        num_neurons = weights.neuron_ids.size
        self._most = most_rows(weights.starts)
        num_gates, num_up_downs = (
            max(self._most, min(num_neurons, number))
            for number in (share.num_gates, share.num_up_downs)
        )
        # Two layers may be in flight, and none may take a slot that this layer needs.
        spare = num_up_downs - self._most
        if num_gates < num_neurons:
            spare = min(spare, num_gates - self._most)
        limit, num_layers = min(_MAX_AHEAD, spare // 2), len(weights.starts)
        if limit < MIN_AHEAD:
            predictors = None
        rates = share.rates if share.rates.size else np.zeros(num_neurons, np.float32)
        listed = listed_rates(rates, LISTED * float(rates.mean()))
        self._gates_stay, self._requested_layer = num_gates == num_neurons, _NO_LAYER
        super().__init__(
            file,
            Units.of_neurons(file, weights),
            weights,
            (neuron_slots(listed, num_gates, GATE), neuron_slots(rates, num_up_downs, UP_DOWN)),
            new_read_ahead(predictors, num_layers, self._most, num_threads, limit),
            num_threads,
            outputs=no_outputs(),
            reads_whole=share.reads_whole,
            has_down_norms=has_down_norms,
        )
        # Compiled now, so that no prompt waits for it.
        request_layer(self.stored, 0, 0, *self._bases, MAX_GAP)
        copy_layer(*self._copied, 0, *self._bases, 0, 0)
        await_layer(self.stored)
        drop_reads(self.queue)
        self._fill(on_bytes)

    def _layer_rows(self, layer: int) -> tuple[int, int]:
        first, last = self._weights.starts[layer, [0, -1]].tolist()
        return first, last

    def attach(self, buffers: SharedBuffers, service: int) -> None:
        """Use the predictor bits in the arena, unless the store has its own."""
        ahead = self.stored.ahead
        if not ahead.predictors.bits.size:
            predictors = ahead.predictors._replace(bits=buffers.predictor_bits)
            self.stored = self.stored._replace(ahead=ahead._replace(predictors=predictors))

    def request_layer(self, layer: int) -> None:
        """Start to read the layer for `layer_arrays`, in the background.

        A step that comes before cancels what has not been begun.
        """
        self._request_layer(layer)
        self._requested_layer = layer, int(self.stored.up_downs.state[EPOCH])

    def _request_layer(self, layer: int) -> None:
        # All of the layer is read: gaps are small, or hold other rows of the same layer.
        gap = max(MAX_GAP, self._geometry.up_down_bytes)
        drop_reads(self.queue)
        request_layer(self.stored, *self._layer_rows(layer), *self._bases, gap)

    @property
    def _bases(self) -> tuple[int, int]:
        """The slots of a layer's first gate and first up and down rows, where it is contiguous."""
        gates, up_downs = self.stored.gates, self.stored.up_downs
        return gates.unit_of.size - self._most, up_downs.unit_of.size - self._most

    @property
    def _copied(self) -> tuple[RowBytes, Slots, Slots]:
        return self._rows, self.stored.gates, self.stored.up_downs

    def layer_arrays(
        self, layer: int, block_weights: np.ndarray, together: Together
    ) -> tuple[FfnArrays, int]:
        """All of a layer's neurons, as one layer, until the next request; and 0, its number there.

        They are contiguous in the last slots; `together` has all threads copy what is in others.
        Where gates stay, `await_up_down` must return before up and down rows are read.
        Errors:  ServiceError
        """
        first, last = self._layer_rows(layer)
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
        weights, arrays = self._weights, self.arrays
        assert isinstance(arrays, FfnArrays)

        def part(vector: np.ndarray) -> np.ndarray:
            return vector[first:last] if vector.size else vector

        gates = slice(first, last) if self._gates_stay else slice(gate_base, gate_base + size)
        return FfnArrays(
            weights.starts[layer : layer + 1] - first,
            arrays.gate[gates],
            arrays.up[base : base + size],
            arrays.down[base : base + size],
            part(arrays.gate_bias),
            part(arrays.up_bias),
            arrays.down_bias[layer : layer + 1],
            part(arrays.down_norms),
            *weights.stripes._replace(ends=weights.stripes.ends[layer : layer + 1]),
        ), 0

    def await_up_down(self) -> None:
        """As `UnitStore`."""
        if not await_layer(self.stored):
            raise ServiceError(self.failure())


class ExpertStore(UnitStore):
    """Of whole experts, in one cache; blocks that every token uses stay beside it."""

    def __init__(
        self,
        file: BundleFile,
        layers: Sequence[FfnSpec],
        weights: FfnWeights,
        share: OffloadedShare,
        num_threads: int,
        on_bytes: OnBytes = lambda num_bytes: None,
        has_down_norms: bool = False,
        runs: np.ndarray | None = None,
    ) -> None:
        """As `UnitStore`; `layers` are the model's, `runs` as in `Units.of_experts`.

        share.num_up_downs says of how many neurons there may be rows in memory.
        """
        self._routed: threading.Thread | None = None
        routers = [ffn.router for ffn in layers if ffn.router is not None]
        self._routes_early = any(router.reads == "layer_input" for router in routers)
        self.units = units = Units.of_experts(file.geometry, layers, weights, runs)
        num_layers, num_blocks = len(layers), weights.starts.shape[1] - 1
        least = int(units.shares.reshape(-1, num_blocks).sum(axis=1).max(initial=0))
        spare = max(0, share.num_up_downs - int(units.sizes[units.stays].sum()))
        most_slots = spare // max(1, int(units.sizes[~units.stays].max(initial=0)))
        num_slots = min(max(least, most_slots), int(units.shares.sum()))
        rates = _unit_rates(share.rates, units.sizes)
        slots = expert_slots(units.firsts, rates, units.sizes, units.stays, num_slots)
        outputs = no_outputs()
        if file.geometry.has_outputs:
            outputs = units.new_outputs(file.geometry, layers, num_slots)
        super().__init__(
            file,
            units,
            weights,
            (slots, slots),
            new_read_ahead(None, num_layers, num_blocks),
            num_threads,
            outputs=outputs,
            reads_whole=True,
            has_down_norms=has_down_norms,
        )
        self.request(0, _NO_BLOCKS)  # compiled now, so that no prompt waits for it
        self.request_ahead(0, _NO_BLOCKS)
        self.await_blocks(0, _NO_BLOCKS)
        self._fill(on_bytes)

    def attach(self, buffers: SharedBuffers, service: int) -> None:
        """Count misses there, and read by what is guessed, or by what routers chose early.

        The attention service is the first one.
        """
        misses = buffers.block_misses[service].reshape(-1)
        ahead = self.stored.ahead._replace(guessed=buffers.guessed_weights)
        self.stored = self.stored._replace(misses=misses, ahead=ahead)
        if self._routes_early and buffers.guessed_weights.size:
            arguments = self.stored, 0, buffers.cells, buffers.requests, buffers.block_weights
            self._routed = threading.Thread(
                target=serve_routed, args=arguments, name="routed", daemon=True
            )
            self._routed.start()

    def request(self, layer: int, blocks: np.ndarray) -> None:
        """Start to read those of a layer's `blocks`, ascending, that are not in memory."""
        with self._locked():
            request_experts(self.stored, layer, blocks)

    def request_layer(self, layer: int) -> None:
        """Start to read all experts of a layer, in the background."""
        self.request_ahead(layer, self._blocks_of(layer))

    def request_ahead(self, layer: int, blocks: np.ndarray) -> None:
        """Start to read `blocks` of a layer that will probably be requested next."""
        units = self._first_unit(layer) + blocks
        with self._locked():
            submit_ahead(self.stored, units, np.empty(units.size, np.uint8))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        take_lock(self.stored.lock)
        try:
            yield
        finally:
            release_lock(self.stored.lock)

    def await_blocks(self, layer: int, blocks: np.ndarray) -> None:
        """Return when `blocks`, which were requested, are in memory. Errors: ServiceError."""
        first, gates = self._first_unit(layer), self.stored.gates
        if not await_units(self.stored, 0, gates, first, blocks, blocks.size):
            raise ServiceError(self.failure())

    def _first_unit(self, layer: int) -> int:
        return layer * (self._weights.starts.shape[1] - 1)

    def _blocks_of(self, layer: int) -> np.ndarray:
        return np.flatnonzero(np.diff(self._weights.starts[layer])).astype(np.int64)

    def layer_arrays(
        self, layer: int, block_weights: np.ndarray, together: Together
    ) -> tuple[FfnArrays | TransposedArrays, int]:
        """All rows in memory, once those of the experts that a prompt's tokens chose are there.

        block_weights (T, B); (0, B) where all are. Errors: ServiceError
        """
        blocks = self._blocks_of(layer)
        if block_weights.shape[0]:
            blocks = blocks[(block_weights[:, blocks] != 0).any(axis=0)]
        self.request(layer, blocks)
        self.await_blocks(layer, blocks)
        rows = self.block_firsts(layer)
        if rows is None:
            return self.arrays, layer
        gate_bias, up_bias = (
            self._by_row(bias, layer, blocks, rows)
            for bias in (self._weights.gate_bias, self._weights.up_bias)
        )
        return self.arrays._replace(gate_bias=gate_bias, up_bias=up_bias), layer

    def _by_row(
        self, bias: np.ndarray, layer: int, blocks: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """The biases of a layer's `blocks` where their rows are in memory."""
        if not bias.size:
            return bias
        found = np.zeros(len(self.arrays.gate), np.float32)
        for block in blocks.tolist():
            first, end = self._weights.starts[layer, block : block + 2].tolist()
            found[rows[block] : rows[block] + end - first] = bias[first:end]
        return found

    def block_firsts(self, layer: int) -> np.ndarray | None:
        """As `UnitStore`."""
        if isinstance(self.arrays, TransposedArrays):
            return None
        own = slice(self._first_unit(layer), self._first_unit(layer + 1))
        return self.stored.gates.row_of[own].astype(np.int64)

    def close(self) -> None:
        """End the reading threads and close the file."""
        stop_routed(self.stored.lock)
        if self._routed is not None:
            self._routed.join()
        super().close()


def _unit_rates(rates: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """How often each unit is used: as often as the neuron of it that is used most."""
    found = np.zeros(sizes.size, np.float32)
    if rates.size:
        firsts = (np.cumsum(sizes) - sizes)[sizes > 0]
        found[sizes > 0] = np.maximum.reduceat(rates, firsts)
    return found
