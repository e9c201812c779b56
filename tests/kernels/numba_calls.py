"""Numba's kernels as functions of NumPy arrays, with the names and arguments of `reference`.

Nothing is checked: arrays have the shapes and dtypes that services give kernels.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds, activation, not_zero
from hotcold.numba_kernels.decode.attention import (
    SEGMENT_POSITIONS,
    attend_segment,
    first_seen,
    merge_segments,
    num_segments,
    rope_kernel,
)
from hotcold.numba_kernels.decode.norm import layer_norm_kernel, rms_norm_kernel
from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS, NO_WEIGHTS, Selection
from hotcold.numba_kernels.decode.vectors import NO_BIAS
from hotcold.numba_kernels.ffn.in_memory import FfnScratch, new_scratch
from hotcold.numba_kernels.ffn.layer_ffn import layer_ffn
from hotcold.numba_kernels.ffn_arrays import FfnArrays
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import CELLS_A_SERVICE
from tests.kernels.layer_numbers import layer_numbers


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    out = np.empty_like(x)
    rms_norm_kernel(x, weight, np.float32(epsilon), out)
    return out


def layer_norm(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, epsilon: float
) -> np.ndarray:
    out = np.empty_like(x)
    layer_norm_kernel(x, weight, floats(bias), np.float32(epsilon), out)
    return out


def rope(heads: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    out = heads.copy()
    for head in out:
        rope_kernel(head, cos_sin)
    return out


def decode_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: int,
    pages: np.ndarray | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Without `pages`, keys and values (G, P, hd) are one page."""
    if pages is None:
        short = -keys.shape[1] % 4
        keys, values = (np.pad(each, ((0, 0), (0, short), (0, 0)))[None] for each in (keys, values))
        pages = np.zeros(1, np.int32)
    num_heads, num_groups, dim = len(queries), keys.shape[1], queries.shape[1]
    factor = dim**-0.5 if scale is None else scale
    facts = {"scale": factor, "window": window, "softcap": softcap, "head_dim": dim}
    numbers = layer_numbers(**facts, num_heads=num_heads, num_kv_heads=num_groups)
    heads, positions = num_heads // num_groups, np.array([length - 1], np.int32)
    first = first_seen(window, length - 1) // SEGMENT_POSITIONS
    count = num_segments(window, length - 1)
    qkv, out = queries.reshape(1, -1), np.empty(queries.size, np.float32)
    part_sums = np.empty((count, num_heads * dim), np.float32)
    part_totals = np.empty((count, num_heads, 2), np.float32)
    scores, sums = (np.empty((heads, size), np.float32) for size in (SEGMENT_POSITIONS, dim))
    totals = np.empty((heads, 2), np.float32)
    for part, group in itertools.product(range(count), range(num_groups)):
        attend_segment(
            numbers, keys, values, group, pages, first + part, positions, 0, 1, qkv, scores, sums,
            totals,
        )  # fmt: skip
        own = slice(group * heads, (group + 1) * heads)
        part_sums[part].reshape(num_heads, dim)[own], part_totals[part, own] = sums, totals
    for head in range(num_heads):
        merge_segments(count, part_sums, part_totals, floats(sinks), head, dim, out)
    return out.reshape(queries.shape)


def sparse_ffn(
    gate: np.ndarray,
    up: np.ndarray | None,
    down: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray | None = None,
    token_masks: np.ndarray | None = None,
    *,
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    activation_fn: str = "relu",
    threshold: float = 0.0,
    skip_silent: bool = True,
    thresholds: Thresholds | None = None,
    down_norms: np.ndarray | None = None,
    num_threads: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """`layer_ffn` of one layer by `num_threads` threads: the output, and the ids that fired."""
    num_neurons, width = gate.shape[0], row_width(gate.dtype, gate.shape[1])
    arrays = FfnArrays(
        np.array([[0, num_neurons]]), gate, gate[:0] if up is None else up, down, floats(gate_bias),
        floats(up_bias), np.empty((1, 1, 0), np.float32), floats(down_norms),
    )  # fmt: skip
    function = activation(activation_fn, threshold)
    if thresholds is None:
        thresholds = not_zero(activation_fn) if skip_silent else ALL_FIRE
    # Read-only as in services, so that the same specialisations are compiled.
    candidates = read_only(NO_IDS if ids is None else ids)
    masks = read_only(NO_MASKS if token_masks is None else token_masks)
    selection = Selection(ids is not None, candidates, masks, NO_WEIGHTS)
    out = np.zeros((len(x), width), np.float32)
    scratch = new_scratch(num_threads, len(x), max(num_neurons, candidates.size), width)
    cells = np.zeros(CELLS_A_SERVICE * INTS_A_CELL, np.int32)

    def run(thread: int) -> None:
        layer_ffn(
            thread, num_threads, cells, 0, 0, selection, thresholds, x, arrays, scratch, function,
            out, out[None][:0],
        )  # fmt: skip

    if num_threads == 1:
        run(0)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(run, range(num_threads)))
    return out, fired_ids(scratch)


def fired_ids(scratch: FfnScratch) -> np.ndarray:
    """The neurons that fired, thread after thread."""
    spans = zip(scratch.firsts, scratch.counts, strict=True)
    return np.concatenate([scratch.fired_ids[first : first + count] for first, count in spans])


def floats(array: np.ndarray | None) -> np.ndarray:
    """The array, or an empty one for None."""
    return NO_BIAS if array is None else array
