"""The units of a shard in a bundle file: neurons, or what it has of each block of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.model.bundles.bundle_file import BundleFile
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.model.weights.ffn import FfnWeights
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.block_rows import (
    END,
    FORMAT,
    NUM_PLACE_NUMBERS,
    ROW_ITEMS,
)
from hotcold.numba_kernels.formats import row_items
from hotcold.numba_kernels.storage.neuron_file import GATE, UP_DOWN
from hotcold.numba_kernels.storage.output_rows import (
    NUM_CUT_NUMBERS,
    OutputRows,
    aligned_bytes,
    new_cut,
    place_unit,
)


@dataclass(frozen=True, eq=False)
class Units:
    """E units of all layers, and their N bundles; of a mixture unit l * B + b is layer l's block b.

    noun: what a unit is called where a user reads of it
    Shapes:  sizes (E,), neurons of each; stays (E,), whether every token uses it; firsts (E + 1,),
             its first bundle, and the end, or (0,) where each has its own; runs (E, n, 2), where
             down is a row an output what each stripe has of the block: first neuron and end
             numbers (N,): the neuron or expert whose bundle it is; layers, places, parts (N,) as in
             `NeuronFile`; units, patterns (N,), offsets (patterns, K) as in `RowBytes`; turns (N,)
             as in `OutputRows`
    """

    noun: str
    sizes: np.ndarray
    stays: np.ndarray
    firsts: np.ndarray
    runs: np.ndarray
    numbers: np.ndarray
    layers: np.ndarray
    places: np.ndarray
    parts: np.ndarray
    units: np.ndarray
    patterns: np.ndarray
    offsets: np.ndarray
    turns: np.ndarray

    @classmethod
    def of_neurons(cls, file: BundleFile, weights: FfnWeights) -> Units:
        """A unit, and a bundle, for each neuron of the shard."""
        starts, ids = weights.starts, weights.neuron_ids
        in_layers = np.split(ids, starts[1:, 0])
        places = [layer[own] for layer, own in zip(file.places(), in_layers, strict=True)]
        layers = np.arange(len(starts), dtype=np.int32)
        none = np.zeros(0, np.int32)
        return cls(
            noun="neuron",
            sizes=np.broadcast_to(np.int64(1), ids.shape),  # which takes no memory
            stays=np.broadcast_to(False, ids.shape),
            firsts=none,
            runs=none,
            numbers=ids,
            layers=np.repeat(layers, starts[:, -1] - starts[:, 0]),
            places=np.concatenate(places),
            parts=np.full(ids.size, GATE | UP_DOWN, np.uint8),
            units=none,
            patterns=np.zeros(ids.size, np.int32),
            offsets=np.zeros((1, 1), np.int32),
            turns=none,
        )

    @classmethod
    def of_experts(
        cls,
        geometry: BundleGeometry,
        layers: Sequence[FfnSpec],
        weights: FfnWeights,
        runs: np.ndarray | None = None,
    ) -> Units:
        """A unit for each block of each layer.

        runs (L, B, n, 2) int64: of the shard's stripes; without them its neurons of each block are
        a run.
        """
        starts, ids = weights.starts, weights.neuron_ids
        num_blocks, found = starts.shape[1] - 1, _Patterns(geometry)
        own_bundles: list[tuple[np.ndarray, ...]] = []
        stays = np.zeros((len(layers), num_blocks), bool)
        own_runs = np.zeros((len(layers), num_blocks, 1, 2), np.int64)
        for layer, ffn in enumerate(layers):
            first = bundle = 0
            stays[layer, ffn.router.num_experts if ffn.router else 0 :] = True
            counts = [one.num_bundles for one in geometry.blocks[layer]]
            for block in range(num_blocks):
                own = ids[starts[layer, block] : starts[layer, block + 1]] - first
                own_bundles.append(found.bundles(layer, block, bundle, own))
                if own.size:
                    own_runs[layer, block] = own[0], own[-1] + 1
                if block < len(counts):
                    first, bundle = first + ffn.block_sizes[block], bundle + counts[block]
        if runs is not None:
            own_runs = runs
        sizes = [each[0].size for each in own_bundles]
        units = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        every = [np.concatenate(arrays) for arrays in zip(*own_bundles, strict=True)]
        of_bundles = dict(zip(_OF_BUNDLES, every, strict=True))
        return cls(
            noun="expert",
            sizes=np.diff(starts, axis=1).ravel(),
            stays=stays.ravel(),
            firsts=np.concatenate([[0], np.cumsum(sizes)]),
            runs=own_runs.reshape(-1, *own_runs.shape[2:]),
            numbers=units % num_blocks,
            units=units,
            **of_bundles,
            offsets=np.array(found.offsets, np.int32).reshape(-1, geometry.bundle_neurons),
        )

    @property
    def shares(self) -> np.ndarray:
        """Which units have neurons and share slots."""
        found: np.ndarray = ~self.stays & (self.sizes > 0)
        return found

    def by_bundle(self, of_units: np.ndarray) -> np.ndarray:
        """What bundles have of their units: of (E,), (N,)."""
        found: np.ndarray = of_units[self.units] if self.firsts.size else of_units
        return found

    def norms(self, file: BundleFile) -> np.ndarray:
        """Norms of down rows, in the order of the shard's neurons: (neurons,) float32."""
        norms = file.norms[file.geometry.layer_firsts[self.layers] + self.places]
        offsets = self.offsets[self.patterns]
        rows = self.by_bundle(np.cumsum(self.sizes) - self.sizes)[:, None] + offsets
        found = np.zeros(int(self.sizes.sum()), np.float32)
        found[rows[offsets >= 0]] = norms[offsets >= 0]
        return found

    def new_outputs(
        self, geometry: BundleGeometry, layers: Sequence[FfnSpec], num_slots: int
    ) -> OutputRows:
        """Memory for matrices of blocks whose down is a row an output; units that stay have some.

        A slot has place for the largest matrices of a unit that shares it.
        """
        num_blocks, height = self.sizes.size // len(layers), geometry.num_outputs
        num_units, num_stripes = self.runs.shape[:2]
        gates, ups = np.zeros((2, num_units, NUM_PLACE_NUMBERS), np.int64)
        places = np.zeros((num_units, num_stripes, NUM_PLACE_NUMBERS), np.int64)
        cuts = np.zeros((num_units, num_stripes, NUM_CUT_NUMBERS), np.int64)
        item_bytes, formats = np.ones(num_units, np.int64), [*map(geometry.formats, range(3))]
        for unit in np.flatnonzero(self.sizes).tolist():
            layer, number = divmod(unit, num_blocks)
            block, width = geometry.blocks[layer][number], layers[layer].block_sizes[number]
            gate, up, down = map(numpy_dtype, block.formats)
            item_bytes[unit] = gate.itemsize
            for role, (own, dtype) in enumerate(((gates[unit], gate), (ups[unit], up))):
                own[FORMAT] = formats[role].index(block.formats[role])
                own[ROW_ITEMS] = block.row_bytes[role] // dtype.itemsize
                own[END] = self.sizes[unit] * own[ROW_ITEMS]
            places[unit, :, FORMAT] = formats[2].index(block.formats[2])
            for stripe, (first, end) in enumerate(self.runs[unit].tolist()):
                place, count = places[unit, stripe], end - first
                place[ROW_ITEMS] = row_items(down, count)
                place[END] = height * place[ROW_ITEMS]
                cuts[unit, stripe] = new_cut(down, width, first, count, block.outputs, height)
        align = aligned_bytes.py_func
        sizes = align(gates[:, END] * item_bytes) + align(ups[:, END] * item_bytes)
        sizes += align(places[:, :, END]).sum(axis=1)
        ends = np.cumsum(sizes * self.stays)
        slot_bytes, first = int(sizes[~self.stays].max(initial=0)), int(ends[-1])
        found = OutputRows(
            rows=aligned_empty((first + num_slots * slot_bytes,), np.uint8),
            gates=gates,
            ups=ups if ups[:, END].any() else ups[:0],
            item_bytes=item_bytes,
            places=places,
            begins=first + np.arange(num_slots) * slot_bytes,
            cuts=cuts,
            turns=self.turns,
        )
        for unit in np.flatnonzero(self.stays & (self.sizes > 0)).tolist():
            place_unit(found, unit, ends[unit] - sizes[unit])
        return found


_OF_BUNDLES = "layers", "places", "parts", "patterns", "turns"


class _Patterns:
    """Which rows of a unit's bundles are whose: mostly the same in all units."""

    def __init__(self, geometry: BundleGeometry) -> None:
        self.offsets: list[tuple[int, ...]] = []
        self._geometry, self._size = geometry, geometry.bundle_neurons
        self._known: dict[tuple[bytes, int], tuple[np.ndarray, np.ndarray]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}

    def bundles(
        self, layer: int, block: int, first: int, neurons: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """_OF_BUNDLES of a unit: these neurons of a block with bundles from the layer's `first` on.

        Of down rows that are an output each all bundles are read.
        """
        geometry, num_outputs = self._geometry, 0
        if geometry.has_outputs and neurons.size:
            num_outputs = geometry.blocks[layer][block].num_with_rows(geometry.num_outputs)
        key = neurons.tobytes(), num_outputs
        if key not in self._known:
            self._known[key] = self._find(neurons, num_outputs)
        turns, patterns = self._known[key]
        layers = np.full(turns.size, layer, np.int32)
        has_neurons = np.isin(turns, neurons // self._size)
        has_down = turns < num_outputs if geometry.has_outputs else True
        parts = (GATE * has_neurons | UP_DOWN * has_down).astype(np.uint8)
        return layers, (turns + first).astype(np.int32), parts, patterns, turns

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
