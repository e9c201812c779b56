"""Layout of a bundle file, known from the model's config."""

from __future__ import annotations

from dataclasses import dataclass

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import row_bytes
from hotcold.numba_kernels.formats import WeightDtype
from hotcold.numba_kernels.storage.neuron_file import PART_UNIT

VERSION = 2
BLOCK_BYTES = 4096  # alignment of tables and data


def _padded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class BundleGeometry:
    """Sizes and offsets in a file of L layers of N neurons.

    The file is: header, order (L, N) int32, checksums (L, N, 2) uint32, norms (L, N) float32, done
    (L,) uint8, then the bundles, layer by layer in that order; each at a multiple of BLOCK_BYTES. A
    bundle is the gate row, padded, then the up and down rows, padded.
    Units:   bytes
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
        """Return the layout for a config with the dtypes that matrices are loaded in."""
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
        """Size of a bundle's gate part."""
        return _padded(self.gate_row_bytes, PART_UNIT)

    @property
    def up_down_bytes(self) -> int:
        """Size of a bundle's up and down part."""
        return _padded(self.up_row_bytes + self.down_row_bytes, PART_UNIT)

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
        return self.order_start + _padded(4 * self.num_layers * self.num_neurons, BLOCK_BYTES)

    @property
    def norms_start(self) -> int:
        """Offset of the norms of down rows."""
        return self.checksums_start + _padded(8 * self.num_layers * self.num_neurons, BLOCK_BYTES)

    @property
    def done_start(self) -> int:
        """Offset of the flags of complete layers."""
        return self.norms_start + _padded(4 * self.num_layers * self.num_neurons, BLOCK_BYTES)

    @property
    def first_byte(self) -> int:
        """Offset of the first bundle."""
        return self.done_start + _padded(self.num_layers, BLOCK_BYTES)

    @property
    def layer_bytes(self) -> int:
        """Size of a layer's bundles."""
        return self.num_neurons * self.bundle_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return _padded(self.first_byte + self.num_layers * self.layer_bytes, BLOCK_BYTES)

    @property
    def file_name(self) -> str:
        """Name of the file among a model's artifacts."""
        return f"bundles-{self.gate_dtype}.bin"
