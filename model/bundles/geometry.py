"""Layout of a bundle file, known from the model's config."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import row_bytes
from hotcold.numba_kernels.formats import WeightDtype
from hotcold.numba_kernels.storage.neuron_file import PART_UNIT

VERSION = 2
BLOCK_BYTES = 4096  # alignment of tables and data
_EXPERT_BUNDLE_BYTES = 256 << 10  # about; the size of one read


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class BundleGeometry:
    """Sizes and offsets in a file of bundles: of one neuron each, or of K neurons of an expert.

    The file is: header, order (bundles,) int32, checksums (bundles, 2) uint32, norms (bundles * K)
    float32, done (L,) uint8, then the bundles, layer by layer in that order; each at a multiple of
    BLOCK_BYTES. A bundle is K gate rows, padded, then K up rows and K down rows, padded. Those of a
    mixture go through a layer's blocks, expert after expert; the last one of a block may have rows
    of zeros at its end.
    Units:   bytes
    """

    layer_bundles: tuple[int, ...]  # of each layer
    gate_dtype: WeightDtype
    down_dtype: WeightDtype
    gate_row_bytes: int
    up_row_bytes: int  # 0 in a two-matrix FFN
    down_row_bytes: int
    bundle_neurons: int = 1  # K
    is_mixture: bool = False  # bundles are in the order of their neurons
    version: int = VERSION

    @classmethod
    def of(cls, config: ModelConfig) -> BundleGeometry:
        """Return the layout for a config with the dtypes that matrices are loaded in."""
        gate = row_bytes(config, config.hidden_size, "gate")
        down = row_bytes(config, config.hidden_size, "down")
        rows = gate, gate if config.has_gate else 0, down
        count = _bundle_neurons(config, sum(rows))
        layers = (layer.ffn.block_sizes for layer in config.layers)
        bundles = tuple(sum(-(-size // count) for size in sizes) for sizes in layers)
        dtypes = config.dtype_of("gate"), config.dtype_of("down")
        return cls(bundles, *dtypes, *rows, count, config.experts is not None)

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

    @property
    def gate_bytes(self) -> int:
        """Size of a bundle's gate part."""
        return _padded(self.bundle_neurons * self.gate_row_bytes, PART_UNIT)

    @property
    def up_down_bytes(self) -> int:
        """Size of a bundle's up and down part."""
        return _padded(self.bundle_neurons * self.up_down_row_bytes, PART_UNIT)

    @property
    def bundle_bytes(self) -> int:
        """Size of a bundle."""
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
        begin = self.first_byte + int(self.layer_firsts[layer]) * self.bundle_bytes
        return begin, self.layer_bundles[layer] * self.bundle_bytes

    @property
    def data_bytes(self) -> int:
        """Size of all bundles."""
        return self.num_bundles * self.bundle_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return _padded(self.first_byte + self.data_bytes, BLOCK_BYTES)

    @property
    def file_name(self) -> str:
        """Name of the file among a model's artifacts."""
        return f"bundles-{self.gate_dtype}.bin"


def _bundle_neurons(config: ModelConfig, neuron_bytes: int) -> int:
    """Neurons of a bundle: 1, or of experts, which are read whole, about what one read takes."""
    if config.experts is None:
        return 1
    size = config.experts.size
    num_bundles = -(-size * neuron_bytes // _EXPERT_BUNDLE_BYTES)
    return -(-size // num_bundles)
