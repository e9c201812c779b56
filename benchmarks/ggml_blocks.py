"""Rows of numbers as ggml's blocks, in formats that the gguf package writes and three that it only
reads: Q4_K, Q5_K and Q6_K.

Those get one scale for all blocks of a matrix. llama.cpp's quantizer chooses one for each; for rows
of random numbers it matters little.
"""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

_K_BITS = {
    GGMLQuantizationType.Q4_K: 4,
    GGMLQuantizationType.Q5_K: 5,
    GGMLQuantizationType.Q6_K: 6,
}
# Of normal numbers of deviation 1, the step between levels with the least squared error.
_STEPS = {4: 0.335, 5: 0.188, 6: 0.104}
_MIN_SCALES, _SIX_BIT_SCALE, _EIGHT_BIT_SCALE = 12, 32, 16


def blocks_of(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return rows (N, width) float32 as blocks, (N, bytes) uint8.

    Errors:  ValueError for widths that are no whole blocks
    """
    items, _ = GGML_QUANT_SIZES[kind]
    if rows.shape[-1] % items:
        raise ValueError(f"rows of {rows.shape[-1]} numbers are no whole blocks of {items}")
    if kind not in _K_BITS:
        return quantize(rows, kind).view(np.uint8)
    bits = _K_BITS[kind]
    step = _STEPS[bits] * float(rows.std())
    middle = 2 ** (bits - 1) + (0.5 if bits == 6 else 0)  # Q6_K's weights are multiples of a step
    levels = np.floor(rows / step + middle).clip(0, 2**bits - 1).astype(np.uint8)
    blocks = levels.reshape(*rows.shape[:-1], -1, items)
    parts = _q6_k(blocks, step) if bits == 6 else _q4_or_q5_k(blocks, step, bits)
    shape = (*blocks.shape[:-1], -1)
    return np.concatenate(
        [np.broadcast_to(part, (*shape[:-1], part.shape[-1])) for part in parts], axis=-1
    ).reshape(*rows.shape[:-1], -1)


def _q4_or_q5_k(blocks: np.ndarray, step: float, bits: int) -> list[np.ndarray]:
    """d, dmin; six bits of eight scales and minima; with 5 bits the high ones; low nibbles.

    A weight is d * scale * level - dmin * min. Eight groups of 32, two to 32 bytes of nibbles.
    """
    middle = (2**bits - 1) / 2
    unit = np.array([step / _SIX_BIT_SCALE, step * middle / _SIX_BIT_SCALE], np.float16)
    # Bytes 0-3, 4-7 hold scales and minima of groups 0-3; 8-11 low bits of those of groups 4-7,
    # whose two high bits stand above the others.
    scales = np.full(_MIN_SCALES, _SIX_BIT_SCALE | (_SIX_BIT_SCALE >> 4) << 6, np.uint8)
    scales[8:] = (_SIX_BIT_SCALE & 15) * 17
    groups = blocks.reshape(*blocks.shape[:-1], 4, 2, 32)
    nibbles = (groups[..., 0, :] & 15) | (groups[..., 1, :] & 15) << 4
    parts = [unit.view(np.uint8), scales]
    if bits == 5:
        by_group = blocks.reshape(*blocks.shape[:-1], 8, 32) >> 4
        parts.append((by_group << np.arange(8, dtype=np.uint8)[:, None]).sum(-2, dtype=np.uint8))
    return [*parts, nibbles.reshape(*blocks.shape[:-1], 128)]


def _q6_k(blocks: np.ndarray, step: float) -> list[np.ndarray]:
    """Low nibbles, two high bits, 16 scales of eight bits, d; a weight is d * scale * (level - 32).

    Of each half of 128: byte i of 64 has weights i and i + 64, byte i of 32 has i, i + 32, ...
    """
    halves = blocks.reshape(*blocks.shape[:-1], 2, 4, 32)
    low = (halves[..., :2, :] & 15) | (halves[..., 2:, :] & 15) << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((halves >> 4) << shifts).sum(-2, dtype=np.uint8)
    shape = blocks.shape[:-1]
    scales = np.full(16, _EIGHT_BIT_SCALE, np.uint8)
    unit = np.array([step / _EIGHT_BIT_SCALE], np.float16).view(np.uint8)
    return [low.reshape(*shape, 128), high.reshape(*shape, 64), scales, unit]
