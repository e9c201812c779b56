"""Random layers of neurons in every form that FFN kernels take, and their outputs in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import BlockRows, block_places
from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.decode.activations import Thresholds, activation
from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS, NO_WEIGHTS, Selection
from hotcold.numba_kernels.ffn.in_memory import FfnScratch, new_scratch
from hotcold.numba_kernels.ffn.layer_ffn import layer_ffn
from hotcold.numba_kernels.ffn.transposed import new_transposed_scratch
from hotcold.numba_kernels.ffn_arrays import FfnArrays, TransposedArrays, most_rows
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import CELLS_A_SERVICE
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.quantized_rows import IN_BLOCKS, KINDS, SUMMED, random_rows
from tests.kernels.reference import activate, activate_up, widened

SELECTIONS = "all", "ids", "masked ids", "blocks", "masked ids of blocks"
OF_BLOCKS = "all", "blocks"  # that a GPU takes
BEFORE = 3  # rows of the layer before
_POISON = 0xFF  # bytes that are NaN in every format: as a number, or as a scale


class Matrix(NamedTuple):
    """Rows in a format, their float64 numbers, and what rounding is relative to."""

    rows: Any  # an array, or a list of rows, of several formats
    weights: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of_blocks(cls, seed: int, kinds: Sequence[str], heights: list[int], width: int) -> Matrix:
        """Random rows of each block, of one kind after the other."""
        turns = itertools.cycle(kinds)
        parts = [cls.random(seed + i, next(turns), n or 1, width) for i, n in enumerate(heights)]
        cut = [[part[:n] for part in each] for each, n in zip(parts, heights, strict=True)]
        rows = [row for each, _, _ in cut for row in each]
        return cls(rows, *(np.concatenate([each[i] for each in cut]) for i in (1, 2)))

    @classmethod
    def random(cls, seed: int, kind: str, height: int, width: int) -> Matrix:
        if kind in KINDS:
            found = random_rows(seed, kind, height, width)
            return cls(found.rows, found.weights, found.sizes)
        bits = random_bits(seed, BITS[kind], height, width)
        return cls(bits, widened(bits), np.abs(widened(bits)))


@dataclass
class Neurons:
    """A layer's neurons; without rows in `down` there is a matrix for each block, transposed."""

    starts: np.ndarray  # (B + 1,)
    gate: Matrix
    up: Matrix | None
    down: Matrix | list[Matrix]
    gate_bias: np.ndarray  # (N,) or (0,), as the next one
    up_bias: np.ndarray
    down_biases: np.ndarray  # (B, d) or (B, 0)
    down_norms: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Down rows' lengths."""
        self.down_norms = np.linalg.norm(self.down_weights, axis=1).astype(np.float32)

    @classmethod
    def random(
        cls, rng: np.random.Generator, kind: str, is_transposed: bool, most: int = 400
    ) -> Neurons:
        """Of a number, a width and blocks, with or without up rows and biases, as drawn.

        With a `kind` such as "q8+q4", where down rows are transposed, blocks are of one and the
        other: gates, ups and downs each in their turn.
        """
        kinds = kind.split("+")
        kind = kinds[0]
        unit = 256 if {*kinds} & {*IN_BLOCKS} else 32 if kind in KINDS else 1
        width = unit * -(-int(rng.integers(1, 600)) // unit)
        size = unit if is_transposed else 1
        number = size * -(-int(rng.integers(1, most)) // size)
        starts = size * starts_of_blocks(rng, number // size, int(rng.choice([1, 3, 8])))
        seed, has_biases = int(rng.integers(1 << 20)), rng.random() < 0.5
        gate, up = (Matrix.random(seed + i, kind, number, width) for i in range(2))
        if len(kinds) > 1:
            sizes = np.diff(starts).tolist()
            gate, up = (
                Matrix.of_blocks(seed + 99 * i, [*kinds[-i:], *kinds[:-i]], sizes, width)
                for i in (1, 2)
            )
        down: Matrix | list[Matrix]
        if is_transposed:
            sizes = np.diff(starts).tolist()
            down = [
                Matrix.random(seed + 9 + i, kinds[i % len(kinds)], width, n or unit)
                for i, n in enumerate(sizes)
            ]
            down = [
                each if n else Matrix(*(part[:0] for part in each))
                for each, n in zip(down, sizes, strict=True)
            ]
        else:
            summed = kind if kind in (*BITS, *SUMMED) else "q8"
            down = Matrix.random(seed + 2, summed, number, width)
        none = np.empty(0, np.float32)
        has_up = rng.random() < 0.7
        return cls(
            starts,
            gate,
            up if has_up else None,
            down,
            random_floats(seed, number) if has_biases else none,
            random_floats(seed + 1, number) if has_biases and has_up else none,
            random_floats(seed, len(starts) - 1, width if has_biases else 0),
        )

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.gate.weights.shape[1]

    @property
    def down_weights(self) -> np.ndarray:
        """(N, d) float64."""
        return self._down("weights")

    @property
    def down_sizes(self) -> np.ndarray:
        """(N, d) float64."""
        return self._down("sizes")

    def _down(self, name: str) -> np.ndarray:
        if isinstance(self.down, Matrix):
            found: np.ndarray = getattr(self.down, name)
            return found
        parts = [getattr(each, name).T for each in self.down if len(each.rows)]
        return np.concatenate(parts)

    def poison(self, unread: np.ndarray, gateless: np.ndarray, silent: np.ndarray) -> Neurons:
        """A copy with NaN in all rows of `unread`, up rows of `gateless`, down rows of `silent`."""
        changed = Neurons(
            **{name: value for name, value in vars(self).items() if name != "down_norms"}
        )
        changed.gate = _spoilt(self.gate, unread)
        if self.up is not None:
            changed.up = _spoilt(self.up, unread | gateless)
        if isinstance(self.down, Matrix):
            changed.down = _spoilt(self.down, unread | silent)
        return changed

    def stacked(self) -> Source:
        """As layer 1 of two."""

        def below(rows: np.ndarray) -> np.ndarray:
            return np.concatenate([rows[:1].repeat(BEFORE, axis=0), rows]) if len(rows) else rows

        first = np.zeros((1, len(self.starts)), np.int64)
        first[0, -1] = BEFORE
        down_bias = np.stack([self.down_biases] * 2)
        fields: dict[str, Any] = {
            "starts": np.concatenate([first, self.starts[None] + BEFORE]),
            "gate_bias": below(self.gate_bias),
            "up_bias": below(self.up_bias),
            "down_bias": down_bias,
            "down_norms": below(self.down_norms),
        }
        if isinstance(self.down, Matrix):
            up = self.gate.rows[:0] if self.up is None else below(self.up.rows)
            fields |= {"gate": below(self.gate.rows), "up": up}
            arrays = FfnArrays(down=below(self.down.rows), **fields)
            return Source(arrays, arrays.starts, self.width)
        blocks = [each.rows for each in self.down]
        down = block_rows([[each[:0] for each in blocks], blocks])
        for name, matrix in (("gate", self.gate), ("up", self.up)):
            fields[name] = self._blocks(matrix)
        return Source(TransposedArrays(down=down, **fields), fields["starts"], self.width)

    def _blocks(self, matrix: Matrix | None) -> BlockRows:
        """Both layers' gate or up rows by block."""
        rows, num_blocks = (matrix or self.gate).rows, len(self.starts) - 1
        none = np.stack(rows[:1])[:0]
        first = [none] * (num_blocks - 1) + [np.stack(rows[:1]).repeat(BEFORE, axis=0)]
        spans = (rows[slice(*span)] for span in pairwise(self.starts.tolist()))
        found = block_rows([first, [np.stack(own) if len(own) else none for own in spans]])
        return found if matrix is not None else found._replace(places=found.places[:, :0])

    def selected(
        self, x: np.ndarray, selection: Selection, name: str, limit: float, thresholds: Thresholds
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """In float64 what is added for each token and neuron, whether its gate counts, and it."""
        chosen = factors(selection, self.starts, len(x))
        gates = x @ self.gate.weights.T + (self.gate_bias if self.gate_bias.size else 0)
        h = activate(gates, name, limit)
        passes = (np.abs(h) > thresholds.gate) & (chosen != 0)
        h, fires = h * chosen, passes
        if self.up is not None:
            ups = x @ self.up.weights.T + (self.up_bias if self.up_bias.size else 0)
            h = h * activate_up(ups, name, limit)
            fires = passes & (np.abs(h) * self.down_norms > thresholds.product)
        return np.where(fires, h, 0), passes, fires

    def limits(self, x: np.ndarray, selection: Selection, name: str) -> np.ndarray:
        """(T, d): sums of magnitudes of all that is added up."""
        sizes = np.abs(x) @ self.gate.sizes.T
        sizes += np.abs(self.gate_bias) if self.gate_bias.size else 0
        sizes = sizes**2 if name == "relu2" else sizes
        if self.up is not None:
            ups = np.abs(x) @ self.up.sizes.T + (np.abs(self.up_bias) if self.up_bias.size else 0)
            sizes = sizes * (ups + (name == "clamped_silu"))
        sizes = sizes * np.abs(factors(selection, self.starts, len(x)))
        found: np.ndarray = sizes @ self.down_sizes + 2 * np.abs(self.down_biases).sum(axis=0).max(
            initial=0
        )
        return found

    def biases(self, selection: Selection, num_tokens: int) -> np.ndarray | int:
        """What is added whatever fires: (T, d) float64."""
        if not self.down_biases.size:
            return 0
        weights = np.ones((num_tokens, len(self.down_biases)))
        if selection.block_weights.size:
            weights = selection.block_weights[:num_tokens].astype(np.float64)
        return weights @ self.down_biases


def _spoilt(matrix: Matrix, which: np.ndarray) -> Matrix:
    rows = np.ascontiguousarray(matrix.rows).copy()
    rows.view(np.uint8)[which] = _POISON
    return matrix._replace(rows=rows)


@dataclass(frozen=True)
class Source:
    """Rows that Numba's `layer_ffn` goes over, and the shapes of what goes through them."""

    rows: Any  # FfnArrays, TransposedArrays, or what is offloaded
    starts: np.ndarray  # (L, B + 1)
    width: int

    def ffn(
        self,
        layer: int,
        x: np.ndarray,
        selection: Selection,
        thresholds: Thresholds,
        name: str,
        num_threads: int = 1,
        kept: FfnScratch | None = None,
        limit: float = 0.0,
    ) -> tuple[np.ndarray, FfnScratch]:
        """The layer's output for x (T, d), and the work space that says what has fired.

        `kept`: that of an earlier request
        """
        scratch = kept or self.scratch(num_threads, len(x))
        out = np.full((len(x), self.width), np.nan, np.float32)
        cells = np.zeros(CELLS_A_SERVICE * INTS_A_CELL, np.int32)
        # Read-only as in services, so that the same specialisations are compiled.
        is_listed, *given = selection
        chosen, function = Selection(is_listed, *map(read_only, given)), activation(name, limit)

        def run(thread: int) -> bool:
            return layer_ffn(
                thread, num_threads, cells, 0, layer, chosen, thresholds, x, self.rows, scratch,
                function, out, out[None][:0],
            )  # fmt: skip

        with ThreadPoolExecutor(num_threads) as pool:
            assert all(pool.map(run, range(num_threads)))
        return out, scratch

    def scratch(self, num_threads: int, num_tokens: int) -> FfnScratch:
        """Work space for `ffn`."""
        new = new_transposed_scratch if isinstance(self.rows, TransposedArrays) else new_scratch
        num_blocks = self.starts.shape[1] - 1
        return new(num_threads, num_tokens, most_rows(self.starts), self.width, num_blocks)


def fired_ids(scratch: FfnScratch) -> np.ndarray:
    """The neurons that fired, thread after thread."""
    spans = zip(scratch.firsts, scratch.counts, strict=True)
    return np.concatenate([scratch.fired_ids[first : first + count] for first, count in spans])


def starts_of_blocks(rng: np.random.Generator, num_rows: int, num_blocks: int) -> np.ndarray:
    """First row of each block, and the end: (B + 1,) int64; some blocks may be empty."""
    cuts = np.sort(rng.integers(0, num_rows + 1, num_blocks - 1))
    return np.concatenate([[0], cuts, [num_rows]]).astype(np.int64)


def random_selection(
    rng: np.random.Generator, kind: str, starts: np.ndarray, num_tokens: int
) -> Selection:
    """One of `SELECTIONS`; a row of `ids` is for some token, a token may have no row at all."""
    num_rows = int(starts[-1])
    ids, masks, weights = NO_IDS, NO_MASKS, NO_WEIGHTS
    if "ids" in kind:
        ids = np.flatnonzero(rng.random(num_rows) < 0.4).astype(np.int32)
    if "masked" in kind and num_tokens > 1:
        masks = rng.integers(1, 2**num_tokens, ids.size, dtype=np.uint64).astype(np.uint32)
    if "blocks" in kind:
        weights = rng.uniform(0.2, 1.5, (num_tokens, starts.size - 1)).astype(np.float32)
        weights *= rng.random(weights.shape) < 0.5
    return Selection("ids" in kind, ids, masks, weights)


def factors(selection: Selection, starts: np.ndarray, num_tokens: int) -> np.ndarray:
    """(T, N) float64: each row's factor for each token; 0 where it is not computed."""
    num_rows = int(starts[-1])
    found = np.ones((num_tokens, num_rows))
    if selection.is_listed:
        found[:] = 0
        bits = np.full(selection.ids.size, 0xFFFFFFFF, np.uint32)
        if selection.token_masks.size:
            bits = selection.token_masks
        for t in range(num_tokens):
            found[t, selection.ids] = (bits >> np.uint32(t)) & 1
    if selection.block_weights.size:
        found *= np.repeat(selection.block_weights[:num_tokens], np.diff(starts), axis=1)
    return found


def block_rows(matrices: Sequence[Sequence[np.ndarray]]) -> BlockRows:
    """The matrices of each layer's blocks; one without weights is none."""
    dtypes = list(dict.fromkeys(matrix.dtype for layer in matrices for matrix in layer))
    widths = np.array([[row_width(m.dtype, m.shape[1]) for m in layer] for layer in matrices])
    formats = np.array([[dtypes.index(m.dtype) for m in layer] for layer in matrices])
    heights = np.array([[len(m) for m in layer] for layer in matrices])
    places, counts = block_places(heights, widths, dtypes, formats)
    arrays = (np.zeros(count, dtype) for count, dtype in zip(counts, dtypes, strict=True))
    rows = BlockRows(tuple(arrays), places)
    for layer, block in zip(*np.nonzero(heights * widths), strict=True):
        rows.matrix(layer, block)[:] = matrices[layer][block]
    return rows


def alone(selection: Selection, token: int) -> Selection:
    """What a token of several chooses, as its own request."""
    is_listed, ids, masks, weights = selection
    if masks.size:
        ids = ids[(masks >> np.uint32(token)) & np.uint32(1) != 0]
    if weights.size:
        weights = weights[token : token + 1]
    return Selection(is_listed, ids if is_listed else NO_IDS, NO_MASKS, weights)
