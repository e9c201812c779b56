"""Layout of a bundle file, known from the model's config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import numpy_dtype, row_bytes
from hotcold.numba_kernels.formats import WeightDtype, row_items
from hotcold.numba_kernels.storage.neuron_file import PART_UNIT

VERSION = 2
BLOCK_BYTES = 4096  # alignment of tables and data
_EXPERT_BUNDLE_BYTES = 256 << 10  # about; the size of one read


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class DownBlock(NamedTuple):
    """The bundles of a block whose down matrix is a row an output: how it is cut.

    Bundle i of the block has rows i * rows to (i + 1) * rows - 1, as far as there are such.
    """

    num_bundles: int
    rows: int
    row_bytes: int
    dtype: WeightDtype

    def num_with_rows(self, num_outputs: int) -> int:
        """How many of the bundles have such rows: the first ones."""
        return -(-num_outputs // self.rows)


@dataclass(frozen=True)
class BundleGeometry:
    """Sizes and offsets in a file of bundles: of one neuron each, or of K neurons of an expert.

    The file is: header, order (bundles,) int32, checksums (bundles, 2) uint32, norms (bundles * K)
    float32, done (L,) uint8, then the bundles, layer by layer in that order; each at a multiple of
    BLOCK_BYTES. A bundle is K gate rows, padded, then K up rows and K down rows, padded. Those of a
    mixture go through a layer's blocks, expert after expert; the last one of a block may have rows
    of zeros at its end.

    Where a mixture's down is a row an output a bundle is K gate rows and K up rows, padded, then
    some rows of its block's down matrix, padded.
    Units:   bytes
    """

    layer_bundles: tuple[int, ...]  # of each layer
    gate_dtype: WeightDtype
    down_dtype: WeightDtype
    gate_row_bytes: int
    up_row_bytes: int  # 0 in a two-matrix FFN
    down_row_bytes: int  # of rows that are an output: what a neuron of an expert takes in a slot
    bundle_neurons: int = 1  # K
    is_mixture: bool = False  # bundles are in the order of their neurons
    version: int = VERSION
    # Where down is a row an output, of each layer: its blocks, and the bytes of down of a bundle.
    down_blocks: tuple[tuple[DownBlock, ...], ...] = ()
    layer_down_bytes: tuple[int, ...] = ()
    num_outputs: int = 0
    more_down_bytes: int = 0  # that blocks which share no slots take beyond `down_row_bytes`

    @classmethod
    def of(cls, config: ModelConfig) -> BundleGeometry:
        """Return the layout for a config with the dtypes that matrices are loaded in."""
        if config.experts is not None and config.down_formats:
            return _with_outputs(config)
        gate = row_bytes(config, config.hidden_size, "gate")
        down = row_bytes(config, config.hidden_size, "down")
        rows = gate, gate if config.has_gate else 0, down
        count = _bundle_neurons(config, sum(rows))
        layers = (layer.ffn.block_sizes for layer in config.layers)
        bundles = tuple(sum(-(-size // count) for size in sizes) for sizes in layers)
        dtypes = config.dtype_of("gate"), config.dtype_of("down")
        return cls(bundles, *dtypes, *rows, count, config.experts is not None)

    @property
    def has_outputs(self) -> bool:
        """Whether down is a row an output."""
        return bool(self.down_blocks)

    @property
    def down_dtypes(self) -> tuple[WeightDtype, WeightDtype]:
        """Both formats of down rows that are an output each, or the one twice."""
        found = {block.dtype for layer in self.down_blocks for block in layer}
        (second,) = found - {self.down_dtype} or {self.down_dtype}
        return self.down_dtype, second

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

    def block_bundles(self, layer: int, block_sizes: Sequence[int]) -> list[int]:
        """The bundles of each of a layer's blocks."""
        if self.has_outputs:
            return [block.num_bundles for block in self.down_blocks[layer]]
        return [-(-size // self.bundle_neurons) for size in block_sizes]

    @property
    def gate_bytes(self) -> int:
        """Size of a bundle's first part."""
        rows = self.gate_row_bytes + (self.up_row_bytes if self.has_outputs else 0)
        return _padded(self.bundle_neurons * rows, PART_UNIT)

    def part_bytes(self, layer: int) -> tuple[int, int]:
        """Sizes of both parts of a layer's bundles."""
        if self.has_outputs:
            return self.gate_bytes, self.layer_down_bytes[layer]
        return self.gate_bytes, _padded(self.bundle_neurons * self.up_down_row_bytes, PART_UNIT)

    @property
    def up_down_bytes(self) -> int:
        """Size of a bundle's second part; of all layers the largest."""
        return max(self.part_bytes(layer)[1] for layer in range(self.num_layers))

    @property
    def bundle_bytes(self) -> int:
        """Size of a bundle; of all layers the largest."""
        return self.gate_bytes + self.up_down_bytes

    @property
    def up_down_row_bytes(self) -> int:
        """Size of a neuron's up and down rows in memory."""
        return self.up_row_bytes + self.down_row_bytes

    @property
    def neuron_bytes(self) -> int:
        """Size of a neuron's rows in memory."""
        return self.gate_row_bytes + self.up_down_row_bytes

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
        sizes = [self._layer_bytes(before) for before in range(layer + 1)]
        return self.first_byte + sum(sizes[:-1]), sizes[-1]

    def _layer_bytes(self, layer: int) -> int:
        return self.layer_bundles[layer] * sum(self.part_bytes(layer))

    @property
    def data_bytes(self) -> int:
        """Size of all bundles."""
        return sum(map(self._layer_bytes, range(self.num_layers)))

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


def _with_outputs(config: ModelConfig) -> BundleGeometry:
    """The layout of a mixture whose down matrices are a row an output.

    A layer's bundles have as much of down as makes its first expert as many of them as its neurons
    do; a block with longer rows has more of them.
    """
    assert config.experts is not None
    hidden = config.hidden_size
    gate = row_bytes(config, hidden, "gate")
    sizes = [layer.ffn.block_sizes for layer in config.layers]
    routers = [layer.ffn.router for layer in config.layers]
    num_experts = [0 if router is None else router.num_experts for router in routers]
    rows = [
        [row_items(numpy_dtype(name), size) for name, size in zip(names, own, strict=True)]
        for names, own in zip(config.down_formats, sizes, strict=True)
    ]
    most = max(
        -(-hidden * length // size)
        for of_layer, own, count in zip(rows, sizes, num_experts, strict=True)
        for length, size in zip(of_layer[:count], own[:count], strict=True)
    )
    of_gates = gate, gate if config.has_gate else 0
    count = _bundle_neurons(config, sum(of_gates) + most)
    blocks: list[tuple[DownBlock, ...]] = []
    down_bytes, more = [], 0
    for names, of_layer, own, shared in zip(
        config.down_formats, rows, sizes, num_experts, strict=True
    ):
        at_once = -(-hidden // -(-own[0] // count)) * of_layer[0]
        down_bytes.append(_padded(max(at_once, *of_layer), PART_UNIT))
        found = []
        for name, length, size in zip(names, of_layer, own, strict=True):
            height = min(hidden, down_bytes[-1] // length)
            num_bundles = max(-(-size // count), -(-hidden // height))
            found.append(DownBlock(num_bundles, height, length, name))
        blocks.append(tuple(found))
        of_own = zip(of_layer[shared:], own[shared:], strict=True)
        more += sum(max(0, hidden * length - size * most) for length, size in of_own)
    bundles = tuple(sum(block.num_bundles for block in found) for found in blocks)
    dtypes = config.dtype_of("gate"), config.dtype_of("down")
    plain = BundleGeometry(bundles, *dtypes, *of_gates, most, count, True)
    return replace(
        plain,
        down_blocks=tuple(blocks),
        layer_down_bytes=tuple(down_bytes),
        num_outputs=hidden,
        more_down_bytes=more,
    )
