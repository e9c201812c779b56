"""A shard of whole experts in a bundle file, some of them in memory, as compiled loops use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hotcold.actors.cpu.bundle_reads import BundleReads, Bundles, bytes_of, new_rows
from hotcold.actors.protocol.offloaded_neurons import OffloadedShare
from hotcold.model.bundles.bundle_file import BundleFile
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.model.errors import ServiceError
from hotcold.model.weights.ffn import FfnWeights
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.block_rows import (
    ALIGNED_ITEMS,
    IS_SECOND,
    NUM_PLACE_NUMBERS,
    ROW_ITEMS,
    BlockRows,
)
from hotcold.numba_kernels.ffn_arrays import (
    NO_NORMS,
    NO_STRIPES,
    FfnArrays,
    TransposedArrays,
    most_rows,
)
from hotcold.numba_kernels.formats import row_items
from hotcold.numba_kernels.loops.mailbox import SharedBuffers
from hotcold.numba_kernels.loops.work_stealing import new_block_counters
from hotcold.numba_kernels.storage.neuron_file import GATE, UP_DOWN, RowBytes
from hotcold.numba_kernels.storage.offloaded_experts import (
    OffloadedExperts,
    await_blocks,
    begin_experts,
    place_block,
    request_ahead,
    request_experts,
)
from hotcold.numba_kernels.storage.output_rows import (
    NUM_CUT_NUMBERS,
    OutputRows,
    new_cut,
    no_outputs,
    place_unit,
)
from hotcold.numba_kernels.storage.routed_ahead import (
    new_lock,
    release_lock,
    serve_routed,
    stop_routed,
    take_lock,
)
from hotcold.numba_kernels.storage.slots import expert_slots, fill_slots

_NO_BLOCKS = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Units:
    """What a shard holds of each block of each layer; unit l * B + b is block b of layer l.

    Shapes:  sizes (L * B,), its neurons; runs (L * B, n, 2), where down is a row an output what
             each stripe has of the block: first neuron and end; firsts (L * B + 1,), its first
             bundle, and the end; stays (L * B,), whether every token uses it; layers, places,
             patterns (N,) of bundles as in `Bundles` and `RowBytes`; turns (N,) and parts (N,) as
             in `OutputRows` and `OffloadedExperts`; offsets (patterns, K)
    """

    sizes: np.ndarray
    runs: np.ndarray
    firsts: np.ndarray
    stays: np.ndarray
    layers: np.ndarray
    places: np.ndarray
    patterns: np.ndarray
    turns: np.ndarray
    parts: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(
        cls,
        geometry: BundleGeometry,
        layers: Sequence[FfnSpec],
        starts: np.ndarray,
        ids: np.ndarray,
        runs: np.ndarray | None = None,
    ) -> Units:
        """Of a shard with `starts` and `ids` of `FfnWeights`.

        runs (L, B, n, 2) int64: of its stripes; without them its neurons of each block are a run.
        """
        num_blocks, found = starts.shape[1] - 1, _Patterns(geometry)
        parts: list[_Part] = []
        stays = np.zeros((len(layers), num_blocks), bool)
        own_runs = np.zeros((len(layers), num_blocks, 1, 2), np.int64)
        for layer, ffn in enumerate(layers):
            first = bundle = 0
            stays[layer, ffn.router.num_experts if ffn.router else 0 :] = True
            counts = geometry.block_bundles(layer, ffn.block_sizes)
            for block in range(num_blocks):
                own = ids[starts[layer, block] : starts[layer, block + 1]] - first
                parts.append(found.part(layer, block, bundle, own))
                if own.size:
                    own_runs[layer, block] = own[0], own[-1] + 1
                if block < len(counts):
                    first, bundle = first + ffn.block_sizes[block], bundle + counts[block]
        if runs is not None:
            own_runs = runs
        return cls(
            sizes=np.diff(starts, axis=1).ravel(),
            runs=own_runs.reshape(-1, *own_runs.shape[2:]),
            firsts=np.concatenate([[0], np.cumsum([part.places.size for part in parts])]),
            stays=stays.ravel(),
            layers=np.concatenate([part.layers for part in parts]),
            places=np.concatenate([part.places for part in parts]),
            patterns=np.concatenate([part.patterns for part in parts]),
            turns=np.concatenate([part.turns for part in parts]),
            parts=np.concatenate([part.parts for part in parts]),
            offsets=np.array(found.offsets, np.int32).reshape(-1, geometry.bundle_neurons),
        )

    @property
    def slot_rows(self) -> int:
        """Rows of a slot: of the largest unit that shares them."""
        return int(self.sizes[~self.stays].max(initial=0))

    @property
    def num_own_rows(self) -> int:
        """Rows of units that every token uses."""
        return int(self.sizes[self.stays].sum())

    @property
    def shares(self) -> np.ndarray:
        """Which units have neurons and share slots."""
        found: np.ndarray = ~self.stays & (self.sizes > 0)
        return found

    def new_outputs(
        self, geometry: BundleGeometry, layers: Sequence[FfnSpec], num_slots: int
    ) -> OutputRows:
        """Memory for down matrices that are a row an output; those of units that stay have some.

        A slot has place for the largest matrices of a unit that shares it.
        """
        num_blocks, height = self.sizes.size // len(layers), geometry.num_outputs
        num_stripes = self.runs.shape[1]
        places = np.zeros((self.sizes.size, num_stripes, NUM_PLACE_NUMBERS), np.int64)
        cuts = np.zeros((self.sizes.size, num_stripes, NUM_CUT_NUMBERS), np.int64)
        for unit in np.flatnonzero(self.sizes).tolist():
            layer, number = divmod(unit, num_blocks)
            block = geometry.down_blocks[layer][number]
            dtype, width = numpy_dtype(block.dtype), layers[layer].block_sizes[number]
            places[unit, :, IS_SECOND] = block.dtype != geometry.down_dtype
            for stripe, (first, end) in enumerate(self.runs[unit].tolist()):
                places[unit, stripe, ROW_ITEMS] = row_items(dtype, end - first)
                cuts[unit, stripe] = new_cut(dtype, width, first, end - first, block.rows, height)
        sizes = -(-height * places[:, :, ROW_ITEMS] // ALIGNED_ITEMS) * ALIGNED_ITEMS
        sizes = sizes.sum(axis=1)
        ends = np.cumsum(sizes * self.stays)
        slot_bytes, first = int(sizes[~self.stays].max(initial=0)), int(ends[-1])
        found = OutputRows(
            rows=aligned_empty((first + num_slots * slot_bytes,), np.uint8),
            places=places,
            begins=first + np.arange(num_slots) * slot_bytes,
            cuts=cuts,
            units=np.repeat(np.arange(self.sizes.size), np.diff(self.firsts)).astype(np.int32),
            turns=self.turns,
        )
        for unit in np.flatnonzero(self.stays & (self.sizes > 0)).tolist():
            place_unit(found, unit, ends[unit] - sizes[unit])
        return found


class _Part(NamedTuple):
    layers: np.ndarray
    places: np.ndarray
    patterns: np.ndarray
    turns: np.ndarray
    parts: np.ndarray


class _Patterns:
    """Which rows of a unit's bundles are whose: mostly the same in all units."""

    def __init__(self, geometry: BundleGeometry) -> None:
        self.offsets: list[tuple[int, ...]] = []
        self._geometry, self._size = geometry, geometry.bundle_neurons
        self._known: dict[tuple[bytes, int], tuple[np.ndarray, np.ndarray]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}

    def part(self, layer: int, block: int, bundle: int, neurons: np.ndarray) -> _Part:
        """A unit of these neurons of a block, whose first bundle in the layer is `bundle`.

        Of down rows that are an output each all bundles are read.
        """
        geometry, num_outputs = self._geometry, 0
        if geometry.has_outputs and neurons.size:
            num_outputs = geometry.down_blocks[layer][block].num_with_rows(geometry.num_outputs)
        key = neurons.tobytes(), num_outputs
        if key not in self._known:
            self._known[key] = self._find(neurons, num_outputs)
        turns, patterns = self._known[key]
        layers = np.full(turns.size, layer, np.int32)
        has_neurons = np.isin(turns, neurons // self._size)
        has_down = turns < num_outputs if geometry.has_outputs else True
        parts = (GATE * has_neurons | UP_DOWN * has_down).astype(np.uint8)
        return _Part(layers, (turns + bundle).astype(np.int32), patterns, turns, parts)

    def _find(self, neurons: np.ndarray, num_outputs: int) -> tuple[np.ndarray, np.ndarray]:
        bundles = np.union1d(neurons // self._size, np.arange(num_outputs)).astype(np.int32)
        offsets = np.full((bundles.size, self._size), -1, np.int32)
        of_neuron = np.searchsorted(bundles, neurons // self._size)
        offsets[of_neuron, neurons % self._size] = np.arange(neurons.size)
        numbers = []
        for row in map(tuple, offsets.tolist()):
            if row not in self._numbers:
                self._numbers[row] = len(self.offsets)
                self.offsets.append(row)
            numbers.append(self._numbers[row])
        return bundles, np.array(numbers, np.int32)


class ExpertStore(BundleReads):
    """Slots, the open file and the threads that read it."""

    def __init__(
        self,
        file: BundleFile,
        layers: Sequence[FfnSpec],
        weights: FfnWeights,
        share: OffloadedShare,
        num_threads: int,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        has_down_norms: bool = False,
        runs: np.ndarray | None = None,
    ) -> None:
        """`weights` has the shard's ids, starts and biases, and no rows; `layers` are the model's.

        share.num_up_downs says of how many neurons there may be rows in memory; `runs` as in
        `Units.of`.
        Errors:  ServiceError
        """
        self._file, self._weights, self._num_threads = file, weights, num_threads
        self._routed: threading.Thread | None = None
        routers = [ffn.router for ffn in layers if ffn.router is not None]
        self._routes_early = any(router.reads == "layer_input" for router in routers)
        ids, starts = weights.neuron_ids, weights.starts
        self.units = Units.of(file.geometry, layers, starts, ids, runs)
        units, num_blocks = self.units, starts.shape[1] - 1
        least = int(units.shares.reshape(-1, num_blocks).sum(axis=1).max(initial=0))
        spare = max(0, share.num_up_downs - units.num_own_rows)
        num_slots = min(max(least, spare // max(1, units.slot_rows)), int(units.shares.sum()))
        numbers = np.repeat(np.arange(units.sizes.size) % num_blocks, np.diff(units.firsts))
        bundles = Bundles(units.layers, units.places, numbers, "expert")
        most = int(np.bincount(units.layers).max(initial=1))
        super().__init__(file, bundles, most)
        num_rows = units.num_own_rows + num_slots * units.slot_rows
        self._norms = self._own_norms() if has_down_norms else NO_NORMS
        self._outputs = no_outputs()
        if file.geometry.has_outputs:
            self._outputs = units.new_outputs(file.geometry, layers, num_slots)
        self.arrays = self._new_arrays(num_rows)
        self.stored = self._new_stored(share, num_slots)
        self.start(self.stored.slots, self.stored.slots, self._row_bytes())
        self.request(0, _NO_BLOCKS)  # compiled now, so that no prompt waits for it
        self.request_ahead(0, _NO_BLOCKS)
        self.await_blocks(0, _NO_BLOCKS)
        try:
            self._fill(on_bytes)
        except ServiceError:
            self.close()
            raise

    def _own_norms(self) -> np.ndarray:
        """Norms of down rows, in the order of the shard's neurons."""
        units = self.units
        norms = self._file.norms[self._file.geometry.layer_firsts[units.layers] + units.places]
        found = np.zeros(self._weights.neuron_ids.size, np.float32)
        firsts = np.repeat(np.cumsum(units.sizes) - units.sizes, np.diff(units.firsts))
        rows = firsts[:, None] + units.offsets[units.patterns]
        is_own = units.offsets[units.patterns] >= 0
        found[rows[is_own]] = norms[is_own]
        return found

    def _new_arrays(self, num_rows: int) -> FfnArrays | TransposedArrays:
        """Rows of units that stay, then of all slots; memory is taken when they are filled."""
        geometry, weights = self._file.geometry, self._weights
        gate, down = numpy_dtype(geometry.gate_dtype), numpy_dtype(geometry.down_dtype)

        def vector(own: np.ndarray) -> np.ndarray:
            return np.zeros(num_rows if own.size else 0, np.float32)

        up_rows = num_rows if geometry.up_row_bytes else 0
        matrices = (
            new_rows(num_rows, geometry.gate_row_bytes, gate),
            new_rows(up_rows, geometry.gate_row_bytes, gate),
        )
        vectors = (
            vector(weights.gate_bias),
            vector(weights.up_bias),
            weights.down_bias,
            vector(self._norms),
        )
        stripes, first, at_once = weights.stripes
        if not geometry.has_outputs:
            of_down = new_rows(num_rows, geometry.down_row_bytes, down)
            return FfnArrays(weights.starts, *matrices, of_down, *vectors, stripes, first, at_once)
        memory, num_layers = self._outputs, len(weights.starts)
        one, other = (memory.rows.view(numpy_dtype(name)) for name in geometry.down_dtypes)
        places = memory.places.reshape(num_layers, -1, NUM_PLACE_NUMBERS)
        outputs = BlockRows(one, other, places)
        return TransposedArrays(
            weights.starts, *matrices, outputs, *vectors, NO_STRIPES, stripes, first, at_once
        )

    def _new_stored(self, share: OffloadedShare, num_slots: int) -> OffloadedExperts:
        units, weights = self.units, self._weights
        num_blocks = weights.starts.shape[1] - 1
        firsts = np.cumsum(units.sizes * units.stays) - units.sizes * units.stays
        row_of = np.where(units.stays, firsts, 0)
        rates = _unit_rates(share.rates, units.sizes)
        none = weights.gate_bias[:0]
        own = FfnArrays(
            weights.starts, none, none, none, weights.gate_bias, weights.up_bias, none, self._norms
        )
        return OffloadedExperts(
            arrays=self.arrays,
            own=own,
            outputs=self._outputs,
            bundle_parts=units.parts,
            row_of=row_of,
            bundle_rows=np.repeat(row_of, np.diff(units.firsts)).astype(np.int32),
            slot_rows=units.num_own_rows + np.arange(num_slots) * units.slot_rows,
            misses=np.zeros(row_of.size, np.uint32),
            file=self.located,
            slots=expert_slots(units.firsts, rates, units.stays, num_slots),
            queue=self.queue,
            order=np.zeros(num_blocks, np.int32),
            num_loaded=np.zeros(1, np.int64),
            counters=np.stack(
                [new_block_counters(2, self._num_threads) for _ in range(num_blocks)]
            ),
            places=np.zeros(most_rows(weights.starts), np.int32),
            listed=np.zeros(most_rows(weights.starts), np.int32),
            lock=new_lock(),
            guessed=np.zeros((0, num_blocks), np.float32),
            was_guessed=np.zeros(num_blocks, np.bool_),
            ahead=np.zeros(num_blocks, np.int64),
            ahead_state=np.array([-1, 0]),
            most_ahead=np.full(len(weights.starts), num_blocks, np.int64),
            ahead_counts=np.zeros(4, np.int64),
            waited_ns=np.zeros(self._num_threads, np.int64),
            failed=np.zeros(self._num_threads, np.int64),
        )

    def _row_bytes(self) -> RowBytes:
        gate, up, down = self.arrays[1:4]
        down = gate[:0] if isinstance(down, BlockRows) else down
        first_rows, units = self.stored.bundle_rows, self.units
        places = first_rows, first_rows, units.offsets, units.patterns
        return RowBytes(*bytes_of((gate, up, down)), *places, self._outputs)

    def _fill(self, on_bytes: Callable[[int], None]) -> None:
        """Read what stays, then into slots what is wanted most, if that is known."""
        units, slots = self.units, self.stored.slots
        chosen = units.stays & (units.sizes > 0)
        if slots.weights.any():
            order = np.argsort(-np.where(units.shares, slots.weights, -1), kind="stable")
            wanted = order[: slots.unit_of.size]
            fill_slots(slots, wanted)
            chosen[wanted] = True
        num_blocks = self._weights.starts.shape[1] - 1
        for unit in np.flatnonzero(chosen).tolist():
            place_block(self.stored, *divmod(unit, num_blocks))
        bundles = np.repeat(chosen, np.diff(units.firsts))
        neuron_bytes = self._file.geometry.neuron_bytes
        for layer in range(len(self._weights.starts)):
            rows = np.flatnonzero(bundles & (units.layers == layer)).astype(np.int32)
            slots.requested[rows] = 1
            self.read(rows, units.parts[rows])
            own = slice(layer * num_blocks, (layer + 1) * num_blocks)
            on_bytes(int(units.sizes[own][chosen[own]].sum()) * neuron_bytes)

    def read_ahead(self, buffers: SharedBuffers) -> None:
        """Read by what is guessed in `buffers`; by what routers chose too, if that is known early.

        The attention service is the first one.
        """
        self.stored = self.stored._replace(guessed=buffers.guessed_weights)
        if self._routes_early:
            arguments = self.stored, 0, buffers.cells, buffers.requests, buffers.block_weights
            self._routed = threading.Thread(
                target=serve_routed, args=arguments, name="routed", daemon=True
            )
            self._routed.start()

    def request(self, layer: int, blocks: np.ndarray) -> None:
        """Start to read those of a layer's `blocks`, ascending, that are not in memory."""
        with self._locked():
            begin_experts(self.stored)
            request_experts(self.stored, layer, blocks)

    def request_ahead(self, layer: int, blocks: np.ndarray) -> None:
        """Start to read `blocks` of a layer that will probably be requested next."""
        with self._locked():
            request_ahead(self.stored, layer, blocks)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        take_lock(self.stored.lock)
        try:
            yield
        finally:
            release_lock(self.stored.lock)

    def await_blocks(self, layer: int, blocks: np.ndarray) -> None:
        """Return when `blocks`, which were requested, are in memory. Errors: ServiceError."""
        if not await_blocks(self.stored, layer, blocks):
            raise ServiceError(self.failure())

    def count_misses(self, misses: np.ndarray) -> None:
        """Count misses of each unit here from now on: (L, B) uint32, of `SharedBuffers`."""
        self.stored = self.stored._replace(misses=misses.reshape(-1))

    def block_firsts(self, layer: int) -> np.ndarray:
        """The first row of each block of a layer, as far as it is in memory."""
        num_blocks = self._weights.starts.shape[1] - 1
        rows: np.ndarray = self.stored.row_of[layer * num_blocks : (layer + 1) * num_blocks]
        return rows

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
