"""Layout of a bundle file, known from the model's config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, starmap
from typing import NamedTuple

import numpy as np

from hotcold.model.config.model_config import BlockFormats, ModelConfig
from hotcold.model.config.weight_formats import numpy_dtype, row_bytes
from hotcold.numba_kernels.formats import DTYPES, WeightDtype, row_items
from hotcold.numba_kernels.storage.neuron_file import PART_UNIT

VERSION = 2
BLOCK_BYTES = 4096  # alignment of tables and data
_EXPERT_BUNDLE_BYTES = 256 << 10  # about; the size of one read


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class BlockBundles(NamedTuple):
    """The bundles of a block of neurons: how many, and what is in each.

    Gate, up and down have a format each, and bytes of a row. Down rows are a neuron each, K of
    them in a bundle, or an output each: bundle i has rows i * outputs to (i + 1) * outputs - 1,
    as far as there are such.
    """

    num_bundles: int
    formats: BlockFormats
    row_bytes: tuple[int, int, int]  # 0 of up in a two-matrix FFN
    outputs: int = 0

    def num_with_rows(self, num_outputs: int) -> int:
        """How many of the bundles have down rows that are an output each: the first ones."""
        return -(-num_outputs // self.outputs)


@dataclass(frozen=True)
class BundleGeometry:
    """Sizes and offsets in a file of bundles: of one neuron each, or of K neurons of an expert.

    The file is: header, order (bundles,) int32, checksums (bundles, 2) uint32, norms (bundles * K)
    float32, done (L,) uint8, then the bundles, layer by layer in that order; each at a multiple of
    BLOCK_BYTES. A bundle is K gate rows, padded, then K up rows and K down rows, padded. Those of a
    mixture go through a layer's blocks, expert after expert; the last one of a block may have rows
    of zeros at its end.

    Where a mixture's down is a row an output a bundle is K gate rows and K up rows, padded, then
    some rows of its block's down matrix, padded. Each block then has formats of its own.
    Units:   bytes
    """

    layer_bundles: tuple[int, ...]  # of each layer
    gate_dtype: WeightDtype
    down_dtype: WeightDtype
    gate_row_bytes: int  # of rows that are a neuron each; else 0, as those of up and down
    up_row_bytes: int  # 0 in a two-matrix FFN
    down_row_bytes: int
    bundle_neurons: int = 1  # K
    is_mixture: bool = False  # bundles are in the order of their neurons
    version: int = VERSION
    blocks: tuple[tuple[BlockBundles, ...], ...] = ()  # of each layer
    # Where down is a row an output: the rows of a matrix, what a neuron of an expert takes in a
    # slot, and what blocks that share no slots take beyond that.
    num_outputs: int = 0
    slot_neuron_bytes: int = 0
    more_bytes: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> BundleGeometry:
        """Return the layout for a config with the dtypes that matrices are loaded in."""
        if config.experts is not None and config.block_formats:
            return _with_outputs(config)
        gate = row_bytes(config, config.hidden_size, "gate")
        down = row_bytes(config, config.hidden_size, "down")
        rows = gate, gate if config.has_gate else 0, down
        count = _bundle_neurons(config, sum(rows))
        dtypes = config.dtype_of("gate"), config.dtype_of("down")
        formats = dtypes[0], *dtypes
        blocks = tuple(
            tuple(BlockBundles(-(-size // count), formats, rows) for size in layer.ffn.block_sizes)
            for layer in config.layers
        )
        is_mixture = config.experts is not None
        return cls(_counts(blocks), *dtypes, *rows, count, is_mixture, blocks=blocks)

    @property
    def has_outputs(self) -> bool:
        """Whether down is a row an output."""
        return self.num_outputs > 0

    def formats(self, role: int) -> tuple[WeightDtype, ...]:
        """The formats of all blocks' gates, ups or downs: role 0, 1 or 2."""
        found = {block.formats[role] for layer in self.blocks for block in layer}
        return tuple(name for name in DTYPES if name in found)

    @property
    def noun(self) -> str:
        """What a bundle is called where a user reads of it."""
        return "neuron" if self.bundle_neurons == 1 else "bundle"

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layer_bundles)

    @property
    def num_bundles(self) -> int:
        """The bundles of all layers."""
        return sum(self.layer_bundles)

    @property
    def layer_firsts(self) -> np.ndarray:
        """The first bundle of each layer, and the number of all: (L + 1,) int64."""
        return np.concatenate([[0], np.cumsum(self.layer_bundles, dtype=np.int64)])

    def part_bytes(self, layer: int, block: int = 0) -> tuple[int, int]:
        """Sizes of both parts of a block's bundles."""
        own, count = self.blocks[layer][block], self.bundle_neurons
        gate, up, down = own.row_bytes
        if self.has_outputs:
            parts = count * (gate + up), own.outputs * down
        else:
            parts = count * gate, count * (up + down)
        return _padded(parts[0], PART_UNIT), _padded(parts[1], PART_UNIT)

    def block_spans(self, layer: int) -> list[tuple[int, int]]:
        """Of each of a layer's blocks the first byte of its bundles, and their size."""
        spans, begin = [], self.span(layer)[0]
        for number, block in enumerate(self.blocks[layer]):
            spans.append((begin, block.num_bundles * sum(self.part_bytes(layer, number))))
            begin += spans[-1][1]
        return spans

    @cached_property
    def largest_parts(self) -> tuple[int, int]:
        """The sizes of the parts of the largest bundle."""
        every = (
            self.part_bytes(layer, block)
            for layer, blocks in enumerate(self.blocks)
            for block in range(len(blocks))
        )
        return max(every, key=sum)

    @property
    def gate_bytes(self) -> int:
        """Size of a bundle's first part; of blocks that differ that of the largest."""
        return self.largest_parts[0]

    @property
    def up_down_bytes(self) -> int:
        """Size of a bundle's second part; of blocks that differ that of the largest."""
        return self.largest_parts[1]

    @property
    def bundle_bytes(self) -> int:
        """Size of a bundle; of blocks that differ the largest."""
        return sum(self.largest_parts)

    @property
    def up_down_row_bytes(self) -> int:
        """Size of a neuron's rows in memory but for its gate's, if that has one of its own."""
        return self.neuron_bytes - self.gate_row_bytes

    @property
    def neuron_bytes(self) -> int:
        """Size of a neuron's rows in memory; where down is a row an output of an expert's."""
        own = self.gate_row_bytes + self.up_row_bytes + self.down_row_bytes
        return own or self.slot_neuron_bytes

    @property
    def order_start(self) -> int:
        """Offset of the order of neurons."""
        return BLOCK_BYTES

    @property
    def checksums_start(self) -> int:
        """Offset of the checksums."""
        return self.order_start + _padded(4 * self.num_bundles, BLOCK_BYTES)

    @property
    def norms_start(self) -> int:
        """Offset of the norms of down rows."""
        return self.checksums_start + _padded(8 * self.num_bundles, BLOCK_BYTES)

    @property
    def done_start(self) -> int:
        """Offset of the flags of complete layers."""
        return self.norms_start + _padded(4 * self.num_bundles * self.bundle_neurons, BLOCK_BYTES)

    @property
    def first_byte(self) -> int:
        """Offset of the first bundle."""
        return self.done_start + _padded(self.num_layers, BLOCK_BYTES)

    def span(self, layer: int) -> tuple[int, int]:
        """First byte of a layer's bundles, and their size."""
        return self.first_byte + sum(self._layer_bytes[:layer]), self._layer_bytes[layer]

    @cached_property
    def _layer_bytes(self) -> list[int]:
        return [
            sum(
                block.num_bundles * sum(self.part_bytes(layer, number))
                for number, block in enumerate(blocks)
            )
            for layer, blocks in enumerate(self.blocks)
        ]

    @property
    def data_bytes(self) -> int:
        """Size of all bundles."""
        return sum(self._layer_bytes)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return _padded(self.first_byte + self.data_bytes, BLOCK_BYTES)

    @property
    def file_name(self) -> str:
        """Name of the file among a model's artifacts."""
        return f"bundles-{self.gate_dtype}{'-outputs' if self.has_outputs else ''}.bin"


def _bundle_neurons(config: ModelConfig, neuron_bytes: int) -> int:
    """Neurons of a bundle: 1, or of experts, which are read whole, about what one read takes."""
    if config.experts is None:
        return 1
    size = config.experts.size
    num_bundles = -(-size * neuron_bytes // _EXPERT_BUNDLE_BYTES)
    return -(-size // num_bundles)


def _counts(blocks: Sequence[Sequence[BlockBundles]]) -> tuple[int, ...]:
    return tuple(sum(block.num_bundles for block in layer) for layer in blocks)


def _with_outputs(config: ModelConfig) -> BundleGeometry:
    """The layout of a mixture whose down matrices are a row an output.

    A block has as many bundles as its neurons make, and of its down matrix as many rows in each.
    """
    hidden, most, alone = config.hidden_size, 0, []
    every = [
        [*zip(layer.ffn.block_sizes, formats, strict=True)]
        for layer, formats in zip(config.layers, config.block_formats, strict=True)
    ]
    rows = {(size, names): _row_bytes(config, size, names) for size, names in chain(*every)}
    for layer, blocks in zip(config.layers, every, strict=True):
        num_shared = 0 if layer.ffn.router is None else layer.ffn.router.num_experts
        for number, (size, names) in enumerate(blocks):
            gate, up, down = rows[size, names]
            total = size * (gate + up) + hidden * down
            if number < num_shared:
                most = max(most, -(-total // size))
            else:
                alone.append((size, total))
    count = _bundle_neurons(config, most)

    def bundles(size: int, names: BlockFormats) -> BlockBundles:
        number = -(-size // count)
        return BlockBundles(number, names, rows[size, names], -(-hidden // max(1, number)))

    found = tuple(tuple(starmap(bundles, blocks)) for blocks in every)
    return BundleGeometry(
        _counts(found), config.dtype_of("gate"), config.dtype_of("down"), 0, 0, 0, count, True,
        blocks=found,
        num_outputs=hidden,
        slot_neuron_bytes=most,
        more_bytes=sum(max(0, total - size * most) for size, total in alone),
    )  # fmt: skip


def _row_bytes(config: ModelConfig, size: int, formats: BlockFormats) -> tuple[int, int, int]:
    """Bytes of a block's gate and up rows, and of down rows that are an output each."""
    widths = config.hidden_size, config.hidden_size * config.has_gate, size
    dtypes = map(numpy_dtype, formats)
    gate, up, down = (
        row_items(d, width) * d.itemsize for d, width in zip(dtypes, widths, strict=True)
    )
    return gate, up, down
