"""What a bundle file holds and where: known from the model before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass

from hotcold.model.config.model_config import ModelConfig, WeightDtype
from hotcold.model.config.weight_formats import row_bytes
from hotcold.numba_kernels.storage.neuron_file import PART_UNIT

VERSION = 2
BLOCK_BYTES = 4096  # what tables and data begin at multiples of


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class BundleGeometry:
    """Sizes of a file: L layers of N neurons, rows of so many bytes in such formats.

    header, order (L, N) int32, sums (L, N, 2) uint32, norms (L, N) float32, done (L,) uint8, then
    the bundles, layer by layer in that order. Each begins at a multiple of BLOCK_BYTES. A bundle is
    the gate row, padded, then the up and down rows, padded.
    """

    num_layers: int
    num_neurons: int
    gate_dtype: WeightDtype
    down_dtype: WeightDtype
    gate_row_bytes: int
    up_row_bytes: int  # 0 in a two-matrix FFN
    down_row_bytes: int
    version: int = VERSION

    @classmethod
    def of(cls, config: ModelConfig) -> BundleGeometry:
        """For a model whose config has the dtypes that matrices are loaded in."""
        gate = row_bytes(config, config.hidden_size, "gate")
        return cls(
            config.num_layers,
            config.ffn_size,
            config.dtype_of("gate"),
            config.dtype_of("down"),
            gate,
            gate if config.has_gate else 0,
            row_bytes(config, config.hidden_size, "down"),
        )

    @property
    def gate_bytes(self) -> int:
        """Of a bundle's first part."""
        return _padded(self.gate_row_bytes, PART_UNIT)

    @property
    def up_down_bytes(self) -> int:
        """Of its second part."""
        return _padded(self.up_row_bytes + self.down_row_bytes, PART_UNIT)

    @property
    def bundle_bytes(self) -> int:
        """Of both."""
        return self.gate_bytes + self.up_down_bytes

    @property
    def up_down_row_bytes(self) -> int:
        """Of a neuron's up and down rows in memory."""
        return self.up_row_bytes + self.down_row_bytes

    @property
    def neuron_bytes(self) -> int:
        """Of all its rows in memory."""
        return self.gate_row_bytes + self.up_down_row_bytes

    @property
    def order_start(self) -> int:
        """Where the order of neurons stands."""
        return BLOCK_BYTES

    @property
    def sums_start(self) -> int:
        """Where the sums stand."""
        return self.order_start + _padded(4 * self.num_layers * self.num_neurons, BLOCK_BYTES)

    @property
    def norms_start(self) -> int:
        """Where the lengths of down rows stand."""
        return self.sums_start + _padded(8 * self.num_layers * self.num_neurons, BLOCK_BYTES)

    @property
    def done_start(self) -> int:
        """Where it stands which layers are whole."""
        return self.norms_start + _padded(4 * self.num_layers * self.num_neurons, BLOCK_BYTES)

    @property
    def first_byte(self) -> int:
        """Of the first bundle."""
        return self.done_start + _padded(self.num_layers, BLOCK_BYTES)

    @property
    def layer_bytes(self) -> int:
        """Of a layer's bundles."""
        return self.num_neurons * self.bundle_bytes

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return _padded(self.first_byte + self.num_layers * self.layer_bytes, BLOCK_BYTES)

    @property
    def file_name(self) -> str:
        """What the file is called among a model's other files."""
        return f"bundles-{self.gate_dtype}.bin"
