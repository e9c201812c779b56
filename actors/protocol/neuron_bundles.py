"""Cold neurons on their way to a GPU, in rounds.

A CPU service copies some of its neurons into the arena, into one of two places in turn; the GPU
service uploads them from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.numba_kernels.formats import is_quantized

_ALIGNMENT, _PAGE_BYTES = 256, 4096
_HEADER_BYTES = _ALIGNMENT  # an int64: how many neurons follow
# Of all services together, in one round: large enough that the exchange takes little of its time.
ROUND_BYTES = 32 << 20


def bundle_bytes(num_services: int) -> int:
    """Bytes of one place, where there are `num_services` CPU services."""
    return ROUND_BYTES // num_services // _PAGE_BYTES * _PAGE_BYTES


@dataclass(frozen=True)
class Part:
    """A kind of rows within a bundle: from byte `first` on, `items` of `dtype` each."""

    first: int
    items: int
    dtype: np.dtype


@dataclass(frozen=True)
class BundleLayout:
    """Where everything is within one place: up to `num_rows` neurons.

    parts: gate, up, down (N, items), gate_bias, up_bias (N, 1); None where the model has none.
    Quantized rows are bytes.
    """

    num_rows: int
    parts: tuple[Part | None, ...]

    @classmethod
    def of(
        cls,
        gate: np.ndarray,
        up: np.ndarray,
        down: np.ndarray,
        has_bias: bool,
        bundle_bytes: int,
        has_up: bool,
    ) -> BundleLayout:
        """A layout of `bundle_bytes` for rows like those of `gate`, `up`, `down`, of any number."""
        matrices = [gate, up if has_up else None, down]
        biases = [has_bias, has_bias and has_up]
        row_bytes = [0 if m is None else m.shape[1] * m.dtype.itemsize for m in matrices]
        bytes_a_row = sum(row_bytes) + 4 * sum(biases)
        spare = _HEADER_BYTES + 5 * _ALIGNMENT
        num_rows = max(0, (bundle_bytes - spare) // bytes_a_row)
        parts: list[Part | None] = []
        at = _HEADER_BYTES
        for matrix, size in zip(matrices, row_bytes, strict=True):
            if matrix is None:
                parts.append(None)
                continue
            kind = np.dtype(np.uint8) if is_quantized(matrix.dtype) else matrix.dtype
            parts.append(Part(at, matrix.shape[1], kind))
            at += -(-num_rows * size // _ALIGNMENT) * _ALIGNMENT
        for has in biases:
            parts.append(Part(at, 1, np.dtype(np.float32)) if has else None)
            at += -(-4 * num_rows // _ALIGNMENT) * _ALIGNMENT if has else 0
        return cls(num_rows, tuple(parts))

    def rounds(self, num_neurons: int) -> int:
        """Rounds for `num_neurons`."""
        return -(-num_neurons // self.num_rows)

    def span(self, num_neurons: int, number: int) -> tuple[int, int]:
        """The first and last (exclusive) neuron of a round; empty after the end."""
        first = min(number * self.num_rows, num_neurons)
        return first, min(first + self.num_rows, num_neurons)

    def rows(self, place: np.ndarray, index: int, num_rows: int) -> np.ndarray | None:
        """Part `index` of a place (bytes,), of the host or a device: (num_rows, items)."""
        part = self.parts[index]
        if part is None:
            return None
        num_bytes = num_rows * part.items * part.dtype.itemsize
        flat = place[part.first : part.first + num_bytes].view(part.dtype)
        return flat.reshape(num_rows, part.items)

    def end(self, num_rows: int) -> int:
        """Bytes of a place up to the end of the last part of `num_rows` neurons."""
        last = [part for part in self.parts if part is not None][-1]
        return last.first + num_rows * last.items * last.dtype.itemsize


def write_count(place: np.ndarray, num_rows: int) -> None:
    """Write into a place's header how many neurons it holds."""
    place[:8].view(np.int64)[0] = num_rows


def read_count(place: np.ndarray) -> int:
    """How many neurons a place of the host holds."""
    return int(place[:8].view(np.int64)[0])
