"""Quantized rows, step by step, as the description in `numba_kernels.formats` has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf import quants

from hotcold.numba_kernels.formats import HALVES, INT8S, ROW_FORMATS
from tests.kernels.arrays import BITS, random_bits
from tests.kernels.reference import widened

WIDTHS = [32, 96, 512, 704, 2304]  # last chunks of 1, 3, 16, 6 and 8 groups
WIDTHS_IN_BLOCKS = [256, 512, 2304]  # last chunks of 8, 16 and 8 groups
KINDS: dict[str, np.dtype] = {row.name: dtype for dtype, row in ROW_FORMATS.items()}
IN_BLOCKS = [kind for kind, dtype in KINDS.items() if ROW_FORMATS[dtype].factors.block_groups > 1]
# The K, IQ and NF formats differ from others in their factors or tables alone, which products of
# rows show.
IN_LAYERS = [kind for kind in KINDS if not kind.endswith("_k") and not kind.startswith(("iq", "n"))]
# That down rows may be in.
SUMMED = [kind for kind, dtype in KINDS.items() if ROW_FORMATS[dtype].is_summed]
LIMITS = {
    "q8": (-128, 127), "q4": (-8, 7), "q4_1": (0, 15), "q4_k": (0, 15), "q5": (-16, 15),
    "q5_k": (0, 31), "q6": (-32, 31),
}  # fmt: skip


def _with_signs(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([values, np.negative(values)]) + 0.0  # no negative zeros


_IQ1 = [0.125 + digit for digit in quants.IQ1_S.grid_map]
# What nibbles number. OCP Microscaling Formats 1.0, E2M1; gguf-py, quants.py, scaled as our rows.
TABLES: dict[str, np.ndarray] = {
    "q3_k": np.array([*range(-4, 4), *[0] * 8]),
    "mxfp4": _with_signs([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "nvfp4": _with_signs([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "nf4": np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127]),
    "iq4_nl": np.array(quants.IQ4_NL.kvalues),
    "iq4_xs": np.array(quants.IQ4_NL.kvalues),
    "iq3_s": _with_signs(quants.IQ3_S.grid_map),
    "iq3_xxs": _with_signs(quants.IQ3_XXS.grid_map) / 4,
    "iq2": np.array(
        [
            *_with_signs(quants.IQ2_S.grid_map) / 8, *_IQ1, *(value - 0.25 for value in _IQ1),
            0, 0, 0, 0,
        ]
    ),
}  # fmt: skip
LIMITS |= dict.fromkeys(TABLES, (0, 15))
WIDTHS_IN_PAIRS = [64, 192, 512, 704, 2304]  # last chunks of 2, 6, 16, 6 and 8 groups
_WIDTHS = {1: WIDTHS, 2: WIDTHS_IN_PAIRS, 8: WIDTHS_IN_BLOCKS}  # by groups of a block
KINDS_AND_WIDTHS = [
    (kind, width)
    for kind, dtype in KINDS.items()
    for width in _WIDTHS[ROW_FORMATS[dtype].block_groups]
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
    if ROW_FORMATS[KINDS[kind]].factors in (INT8S, HALVES):
        return _random_int8s(kind, rng, values)
    if kind == "nvfp4":
        return _random_nvfp4(rng, values)
    if kind in IN_BLOCKS:
        return _random_k(kind, rng, values)
    if kind == "mxfp4":
        return _random_mxfp4(rng, values)
    scales = rng.uniform(0.001, 0.02, (num_rows, width // 32)).astype(np.float16)
    minima = np.zeros_like(scales)
    if kind == "q4_1":
        minima = (rng.uniform(-12, -2, scales.shape) * scales).astype(np.float16)
    factors = [scales, minima] if kind == "q4_1" else [scales]
    packed = np.hstack([*_pack(kind, values), *map(_bytes, factors)])
    values = TABLES[kind][values] if kind in TABLES else values
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
    values = TABLES["mxfp4"][numbers]
    return Quantized(packed.view(KINDS["mxfp4"]), values, scales, np.full_like(scales, -0.0))


def _random_nvfp4(rng: np.random.Generator, numbers: np.ndarray) -> Quantized:
    """Rows of numbers 0..15 of E2M1 values; E4M3 for each half of a group, a float32 for two."""
    num_rows, groups, _ = numbers.shape
    blocks = rng.uniform(1e-5, 2e-4, (num_rows, groups // 2)).astype(np.float32)
    halves = rng.integers(0, 127, (num_rows, groups, 2), np.uint8)  # not NaN
    as_bytes = [_bytes(chunk.transpose(0, 2, 1)) for chunk in _chunks(halves)]
    packed = np.hstack([*_pack("nvfp4", numbers), *as_bytes, _bytes(blocks)])
    small = torch.from_numpy(halves).view(torch.float8_e4m3fn).float().numpy()
    scales = (blocks.repeat(2, axis=1)[:, :, None] * small).repeat(16, axis=2).astype(np.float64)
    minima = np.full((num_rows, groups, 1), -0.0)
    return Quantized(packed.view(KINDS["nvfp4"]), TABLES["nvfp4"][numbers], scales, minima)


def _random_int8s(kind: str, rng: np.random.Generator, values: np.ndarray) -> Quantized:
    """Rows of these values: an int8 for a group or for each half, a float16 for eight groups."""
    num_rows, groups, _ = values.shape
    blocks = rng.uniform(1e-5, 2e-4, (num_rows, groups // 8)).astype(np.float16)
    count = 2 if ROW_FORMATS[KINDS[kind]].has_halves else 1
    numbers = rng.integers(-128, 127, (num_rows, groups, count), np.int8, endpoint=True)
    if kind == "q6":
        parts = [part for chunk in _chunks(values + 32) for part in _six_bits(chunk)]
    else:
        parts = _pack(kind, values)
        values = TABLES[kind][values]
    packed = np.hstack(
        [*parts, *(_bytes(chunk.transpose(0, 2, 1)) for chunk in _chunks(numbers)), _bytes(blocks)]
    )
    of_groups = blocks.astype(np.float64).repeat(8, axis=1)[:, :, None]
    scales = of_groups * (numbers if count == 1 else numbers.repeat(16, axis=2))
    minima = np.full((num_rows, groups, 1), -0.0)  # which leaves zeros their sign
    return Quantized(packed.view(KINDS[kind]), values, scales, minima)


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
    each, to_high = (4, 16) if ROW_FORMATS[KINDS[kind]].has_halves else (8, 4)
    for chunk in _chunks(values):
        if kind == "q8":
            found.extend(_four(chunk, 4 * step) % 256 for step in range(8))
            continue
        chunk = chunk - LIMITS[kind][0]
        for step in range(4):
            low, high = (_four(chunk, each * step + to_high * half) for half in range(2))
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
