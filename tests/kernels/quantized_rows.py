"""Quantized rows, step by step, as the description in `numba_kernels.formats` has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.numba_kernels.formats import ROW_FORMATS
from tests.kernels.arrays import BITS, random_bits
from tests.kernels.reference import widened

WIDTHS = [32, 96, 512, 704, 2304]  # last chunks of 1, 3, 16, 6 and 8 groups
WIDTHS_IN_BLOCKS = [256, 512, 2304]  # last chunks of 8, 16 and 8 groups
KINDS: dict[str, np.dtype] = {row.name: dtype for dtype, row in ROW_FORMATS.items()}
IN_BLOCKS = [kind for kind, dtype in KINDS.items() if ROW_FORMATS[dtype].factors.block_groups > 1]
# The K formats differ from others in their factors alone, which products of rows show.
IN_LAYERS = [kind for kind in KINDS if not kind.endswith("_k")]
# That down rows may be in.
SUMMED = [kind for kind, dtype in KINDS.items() if ROW_FORMATS[dtype].is_summed]
LIMITS = {
    "q8": (-127, 127), "q4": (-8, 7), "q4_1": (0, 15), "q4_k": (0, 15), "q5": (-16, 15),
    "q5_k": (0, 31), "q6": (-32, 31), "mxfp4": (0, 15),
}  # fmt: skip
# OCP Microscaling Formats 1.0, E2M1, by the number of the bits.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
KINDS_AND_WIDTHS = [
    (kind, width) for kind in KINDS for width in (WIDTHS_IN_BLOCKS if kind in IN_BLOCKS else WIDTHS)
]


@dataclass(frozen=True)
class Quantized:
    """N rows of random values, scales and minima: as bytes, and as the numbers they stand for."""

    rows: np.ndarray
    values: np.ndarray  # (N, d / 32, 32) whole numbers
    scales: np.ndarray  # (N, d / 32, 1), or (N, d / 32, 32) where halves have their own
    minima: np.ndarray  # (N, d / 32, 1), zeros where the format has none

    @property
    def weights(self) -> np.ndarray:
        """(N, d) float64."""
        groups = self.values * self.scales + self.minima
        return groups.reshape(len(self.values), -1)

    @property
    def sizes(self) -> np.ndarray:
        """What errors are to be compared with, (N, d): magnitudes of what a weight is a sum of."""
        groups = np.abs(self.values * self.scales) + np.abs(self.minima)
        return groups.reshape(len(self.values), -1)


def random_rows(
    seed: int, kind: str, num_rows: int, width: int, limits: tuple[int, int] | None = None
) -> Quantized:
    """Rows of every value that the format has, or that is within `limits`."""
    rng = np.random.default_rng(seed)
    size = (num_rows, width // 32, 32)
    values = rng.integers(*(limits or LIMITS[kind]), size, endpoint=True)
    if kind in IN_BLOCKS:
        return _random_q6(rng, values) if kind == "q6" else _random_k(kind, rng, values)
    if kind == "mxfp4":
        return _random_mxfp4(rng, values)
    scales = rng.uniform(0.001, 0.02, (num_rows, width // 32)).astype(np.float16)
    minima = np.zeros_like(scales)
    if kind == "q4_1":
        minima = (rng.uniform(-12, -2, scales.shape) * scales).astype(np.float16)
    factors = [scales, minima] if kind == "q4_1" else [scales]
    packed = np.hstack([*_pack(kind, values), *map(_bytes, factors)])
    doubles = (factor.astype(np.float64)[:, :, None] for factor in (scales, minima))
    return Quantized(packed.view(KINDS[kind]), values, *doubles)


def random_matrix(seed: int, kind: str, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in a format, and the float64 numbers that they stand for."""
    if kind in KINDS:
        rows = random_rows(seed, kind, height, width)
        return rows.rows, rows.weights
    bits = random_bits(seed, BITS[kind], height, width)
    return bits, widened(bits)


def _random_mxfp4(rng: np.random.Generator, numbers: np.ndarray) -> Quantized:
    """Rows of numbers 0..15 of E2M1 values; a power of two for each group."""
    num_rows, groups, _ = numbers.shape
    exponents = rng.integers(119, 124, (num_rows, groups), np.uint8)
    packed = np.hstack([*_pack("mxfp4", numbers), exponents])
    scales = np.exp2(exponents.astype(np.float64) - 127)[:, :, None]
    values = np.concatenate([_E2M1, -_E2M1])[numbers] + 0.0  # no negative zeros
    return Quantized(packed.view(KINDS["mxfp4"]), values, scales, np.full_like(scales, -0.0))


def _random_q6(rng: np.random.Generator, values: np.ndarray) -> Quantized:
    """Rows of these values: an int8 for each half of a group, a float16 for eight groups."""
    num_rows, groups, _ = values.shape
    blocks = rng.uniform(1e-5, 2e-4, (num_rows, groups // 8)).astype(np.float16)
    halves = rng.integers(-128, 127, (num_rows, groups, 2), np.int8, endpoint=True)
    parts = [part for chunk in _chunks(values + 32) for part in _six_bits(chunk)]
    packed = np.hstack(
        [*parts, *(_bytes(chunk.transpose(0, 2, 1)) for chunk in _chunks(halves)), _bytes(blocks)]
    )
    scales = blocks.astype(np.float64).repeat(8, axis=1)[:, :, None] * halves.repeat(16, axis=2)
    minima = np.full((num_rows, groups, 1), -0.0)  # which leaves zeros their sign
    return Quantized(packed.view(KINDS["q6"]), values, scales, minima)


def _random_k(kind: str, rng: np.random.Generator, values: np.ndarray) -> Quantized:
    """Rows of these values: 0..63 for each group twice, two float16 for eight groups."""
    num_rows, groups, _ = values.shape
    blocks = rng.uniform(1e-5, 4e-4, (num_rows, groups // 8, 2)).astype(np.float16)
    blocks[..., 1] *= -(LIMITS[kind][1] + 1) / 2
    numbers = rng.integers(0, 63, (num_rows, groups, 2), endpoint=True)
    pairs = [_pairs_of_six_bits(chunk) for chunk in _chunks(numbers)]
    packed = np.hstack([*_pack(kind, values), *pairs, _bytes(blocks)])
    factors = blocks.astype(np.float64).repeat(8, axis=1) * numbers
    scales, minima = (factors[:, :, i, None] for i in range(2))
    return Quantized(packed.view(KINDS[kind]), values, scales, minima)


def _chunks(groups: np.ndarray) -> list[np.ndarray]:
    """(N, groups, ...) by 16 groups."""
    return [groups[:, first : first + 16] for first in range(0, groups.shape[1], 16)]


def _bytes(numbers: np.ndarray) -> np.ndarray:
    """Each row's numbers (N, ...) as bytes (N, ...)."""
    return np.ascontiguousarray(numbers).reshape(len(numbers), -1).view(np.uint8)


def _pairs_of_six_bits(numbers: np.ndarray) -> np.ndarray:
    """Scales and minima (N, g, 2) of a chunk: their low nibbles, then what stands above them."""
    scale, least = numbers[:, :, 0], numbers[:, :, 1]
    low = scale % 16 | least % 16 << 4
    tops = scale // 16 | least // 16 << 2
    half = tops.shape[1] // 2
    return np.hstack([low, tops[:, :half] | tops[:, half:] << 4]).astype(np.uint8)


def _six_bits(chunk: np.ndarray) -> list[np.ndarray]:
    """A chunk of values 0..63 (N, g, 32): steps of nibbles, then steps of two bits above them."""
    found = []
    for step in range(4):
        low, high = (_four(chunk, 16 * half + 4 * step) for half in range(2))
        found.append(low % 16 | high % 16 << 4)
    for step in range(2):
        places = [16 * half + 4 * (step + 2 * k) for k in range(2) for half in (0, 1)]
        tops = (_four(chunk, at) // 16 << 2 * i for i, at in enumerate(places))
        found.append(sum(tops, np.zeros_like(low)))
    return [_bytes(step.astype(np.uint8)) for step in found]


def _pack(kind: str, values: np.ndarray) -> list[np.ndarray]:
    """The bytes of values (N, groups, 32), step by step, each (N, 4 g)."""
    found: list[np.ndarray] = []
    for chunk in _chunks(values):
        if kind == "q8":
            found.extend(_four(chunk, 4 * step) % 256 for step in range(8))
            continue
        chunk = chunk - LIMITS[kind][0]
        for step in range(4):
            low, high = (_four(chunk, 8 * step + 4 * half) for half in range(2))
            found.append(low % 16 | high % 16 << 4)
        if kind in ("q5", "q5_k"):
            tops = (_four(chunk, 4 * i) // 16 << i for i in range(8))
            found.append(sum(tops, np.zeros_like(low)))
    return [_bytes(step.astype(np.uint8)) for step in found]


def _four(chunk: np.ndarray, first: int) -> np.ndarray:
    """Of each group (N, g, 32) the four values from `first` on, one for each byte of a step."""
    return chunk[:, :, first : first + 4]


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
