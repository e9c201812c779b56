"""Selections drawn at random, and the float64 FFN of one, for tests of every source of rows."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS, NO_WEIGHTS, Selection
from tests.kernels.reference import activate, gemv, widened

KINDS = "all", "ids", "masked ids", "blocks", "masked ids of blocks"


def starts_of_blocks(rng: np.random.Generator, num_rows: int, num_blocks: int) -> np.ndarray:
    """First row of each block, and the end: (B + 1,) int64; some blocks may be empty."""
    cuts = np.sort(rng.integers(0, num_rows + 1, num_blocks - 1))
    return np.concatenate([[0], cuts, [num_rows]]).astype(np.int64)


def random_selection(
    rng: np.random.Generator, kind: str, starts: np.ndarray, num_tokens: int
) -> Selection:
    """One of `KINDS`; a row of `ids` is for some token, a token may have no row at all."""
    num_rows = int(starts[-1])
    ids, masks, weights = NO_IDS, NO_MASKS, NO_WEIGHTS
    if "ids" in kind:
        ids = np.flatnonzero(rng.random(num_rows) < 0.4).astype(np.int32)
    if "masked" in kind and num_tokens > 1:
        masks = rng.integers(1, 2**num_tokens, ids.size, dtype=np.uint64).astype(np.uint32)
    if "blocks" in kind:
        weights = rng.uniform(0.2, 1.5, (num_tokens, starts.size - 1)).astype(np.float32)
        weights *= rng.random(weights.shape) < 0.5
    return Selection("ids" in kind, ids, masks, weights)


def factors(selection: Selection, starts: np.ndarray, num_tokens: int) -> np.ndarray:
    """(T, N) float64: each row's factor for each token; 0 where it is not computed."""
    num_rows = int(starts[-1])
    found = np.ones((num_tokens, num_rows))
    if selection.is_listed:
        found[:] = 0
        bits = np.full(selection.ids.size, 0xFFFFFFFF, np.uint32)
        if selection.token_masks.size:
            bits = selection.token_masks
        for t in range(num_tokens):
            found[t, selection.ids] = (bits >> np.uint32(t)) & 1
    if selection.block_weights.size:
        found *= np.repeat(selection.block_weights[:num_tokens], np.diff(starts), axis=1)
    return found


def selected_ffn(
    x: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray | None,
    down: np.ndarray,
    selection: Selection,
    starts: np.ndarray,
    activation_fn: str = "relu",
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    down_biases: np.ndarray | None = None,
    thresholds: tuple[float, float] = (-1, -1),
    down_norms: np.ndarray | None = None,
) -> np.ndarray:
    """(T, d) float64: sum over rows n of factor[t, n] fn(gate[n] . x[t]) (up[n] . x[t]) down[n].

    gate, up, down: (N, d) bits of floats; down_biases (B, d): of each block, with its factor.
    `thresholds`: of gates, and, where there is up, of |factor gate up| times the down row's norm.
    """
    h = activate(gemv(gate, x, gate_bias), activation_fn)
    h = np.where(np.abs(h) > thresholds[0], h, 0) * factors(selection, starts, x.shape[0])
    if up is not None:
        second = gemv(up, x, up_bias)
        h = h * (np.maximum(second, 0) if activation_fn == "drelu" else second)
        norms = 1 if down_norms is None else down_norms
        h = np.where(np.abs(h) * norms > thresholds[1], h, 0)
    out: np.ndarray = h @ widened(down)
    if down_biases is not None:
        weights = np.ones((x.shape[0], down_biases.shape[0]))
        if selection.block_weights.size:
            weights = selection.block_weights[: x.shape[0]].astype(np.float64)
        out += weights @ down_biases
    return out
