"""Quantized rows, byte by byte, as the description in `numba_kernels.formats` has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_kernels.formats import Q4, Q8

WIDTHS = [32, 96, 512, 544, 1056]
KINDS = {"q8": Q8, "q4": Q4}


@dataclass(frozen=True)
class Quantized:
    """N rows of random values and scales: as bytes, and as the numbers they stand for."""

    rows: np.ndarray
    values: np.ndarray  # (N, d / 32, 32) whole numbers
    scales: np.ndarray  # (N, d / 32)

    @property
    def weights(self) -> np.ndarray:
        """(N, d) float64."""
        return (self.values * self.scales[:, :, None]).reshape(len(self.values), -1)


def random_rows(seed: int, kind: str, num_rows: int, width: int) -> Quantized:
    """Rows of every value that the format has."""
    rng = np.random.default_rng(seed)
    low, high = (-127, 127) if kind == "q8" else (-8, 7)
    values = rng.integers(low, high, (num_rows, width // 32, 32), endpoint=True)
    scales = rng.uniform(0.001, 0.02, (num_rows, width // 32)).astype(np.float16)
    packed = np.stack([_pack(kind, *row) for row in zip(values, scales, strict=True)])
    return Quantized(packed.view(KINDS[kind]), values, scales.astype(np.float64))


def _pack(kind: str, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    found = bytearray()
    for first in range(0, len(values), 16):
        chunk = values[first : first + 16]
        for step in range(8 if kind == "q8" else 4):
            for group in chunk:
                for byte in range(4):
                    if kind == "q8":
                        found.append(int(group[4 * step + byte]) % 256)
                    else:
                        low, high = group[8 * step + byte] + 8, group[8 * step + 4 + byte] + 8
                        found.append(int(low) | int(high) << 4)
    return np.frombuffer(bytes(found) + scales.tobytes(), np.uint8)


def quantized_vectors(x: np.ndarray) -> np.ndarray:
    """x (T, d) as groups of 32 values of 8 bits stand for it, float64."""
    groups = x.reshape(len(x), -1, 32)
    scales = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(
            scales > 0, np.float32(127) / (np.abs(groups).max(axis=2, keepdims=True)), 0
        )
    values = np.rint(groups * inverse.astype(np.float32))
    return (values.astype(np.float64) * scales).reshape(x.shape)
