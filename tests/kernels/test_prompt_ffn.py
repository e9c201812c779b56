"""Up and down of a prompt's tokens, neuron by neuron, against float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from hotcold.model.config.activations import activated
from hotcold.numba_kernels.checks import ACTIVATION_CODES
from hotcold.numba_kernels.decode.activations import activation
from hotcold.numba_kernels.decode.selection import NO_WEIGHTS
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from hotcold.numba_kernels.formats import is_quantized
from hotcold.numba_kernels.prompt.block_tokens import (
    CLEARS,
    NUM_STEP_NUMBERS,
    ChoiceRows,
    CutRows,
    LaneSums,
    choices,
    every_token,
    one_block,
    whole_rows,
)
from hotcold.numba_kernels.prompt.prompt_ffn import (
    RUN,
    activate_kernel,
    empty_fired,
    list_fired,
    num_parts,
    prompt_down_kernel,
    prompt_up_kernel,
    run_shares,
)
from hotcold.numba_kernels.prompt.quantized_matmul import quantize_kernel
from tests.kernels.arrays import BITS, random_floats
from tests.kernels.quantized_rows import (
    IN_BLOCKS,
    IN_LAYERS,
    KINDS,
    SUMMED,
    quantized_vectors,
    random_matrix,
)

pytestmark = pytest.mark.sweep(kind=["f32", "q4"])

NO_BIAS = np.empty(0, np.float32)


@pytest.mark.parametrize("kind", [*BITS, *IN_LAYERS])
@pytest.mark.parametrize(("height", "width"), [(5, 32), (RUN + 9, 512), (2 * RUN + 3, 1184)])
@pytest.mark.parametrize("gated", [True, False], ids=["three", "two"])
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_fired_neurons(kind: str, height: int, width: int, gated: bool, num_blocks: int) -> None:
    """Of the blocks that each token chose, one of which is empty and one chosen by nobody."""
    num_tokens = 37
    if kind in IN_BLOCKS:
        width = -(-width // 256) * 256  # whole blocks
    up, up_values = random_matrix(1, kind, height, width)
    summed = "q8" if kind in KINDS and kind not in SUMMED else kind
    down, down_values = random_matrix(2, summed, height, width)
    x, bias = random_floats(3, num_tokens, width), random_floats(4, height)
    h = np.maximum(random_floats(5, num_tokens, height) - 1, 0)
    bounds, weights = np.array([0, height]), NO_WEIGHTS
    if num_blocks > 1:
        bounds = np.array([0, height // 3, height // 3, height // 3 * 2, height])
        weights = (random_floats(8, num_tokens, num_blocks) > 0).astype(np.float32)
        weights[:, 2] = 0
        h *= np.repeat(weights, np.diff(bounds), axis=1)
    tokens, _ = choices(np.diff(bounds), num_tokens, weights)
    of_blocks = [
        h[ids, first:last]
        for ids, (first, last) in zip(
            np.split(tokens.ids, tokens.starts[1:-1]), pairwise(bounds), strict=True
        )
    ]
    values = np.concatenate([own.ravel() for own in of_blocks])
    sizes, widths = [own.size for own in of_blocks], np.diff(bounds)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    columns = np.stack([np.zeros_like(widths), widths], axis=1)
    order = np.arange(tokens.ids.size) - np.repeat(tokens.starts[:-1], np.diff(tokens.starts))
    rows = CutRows(values, ends, widths, columns, order)
    steps = np.zeros((num_blocks, NUM_STEP_NUMBERS), np.int64)  # all are added up
    steps[0, CLEARS] = 1
    vectors: np.ndarray | QuantizedVectors = x
    rounded = x.astype(np.float64)
    if is_quantized(up.dtype):
        vectors = QuantizedVectors(*(array[0] for array in empty_vectors(1, num_tokens, width)))
        quantize_kernel(up, x, every_token(num_tokens), vectors, 0, num_tokens)
        rounded = quantized_vectors(x)
    factors = rounded @ up_values.T + bias if gated else np.ones_like(h)
    expected = (h * factors) @ down_values
    most = (h * (np.abs(rounded) @ np.abs(up_values).T + 1)) @ np.abs(down_values)

    fired = empty_fired(tokens, bounds[:-1], np.diff(bounds))
    out = np.full((num_tokens, width), 2, np.float32)
    left = np.zeros((1, NUM_STEP_NUMBERS), np.int64)
    result = LaneSums(out, np.empty((0, *out.shape), np.float32), steps)
    sums = np.full((1, num_tokens, 512), np.nan, np.float32)
    for first, last in pairwise(run_shares(tokens, fired, 3)):
        list_fired(rows, bounds, tokens, first, last, fired)
        if gated:
            prompt_up_kernel(up, bias, vectors, tokens, first, last, fired)
    counts = np.diff(tokens.starts)[fired.runs[:, 0]]
    assert fired.starts[fired.runs[:, 4] + counts].sum() == (h != 0).sum()
    units = num_parts(width) * num_tokens
    for first, last in pairwise([0, 11, 50 % units, units] if units > 50 else [0, 11, units]):
        prompt_down_kernel(down, tokens, fired, steps, left, first, last, sums, result)
    assert (np.abs(out - 2 - expected) <= 4e-6 * most + 1e-5).all()


def test_without_a_bias() -> None:
    up, values = random_matrix(6, "f32", 20, 64)
    x, h = random_floats(7, 3, 64), np.maximum(random_floats(8, 3, 20), 0)
    expected = h * (x @ values.T)
    tokens, bounds = every_token(3), np.array([0, 20])
    fired = empty_fired(tokens, bounds[:-1], np.diff(bounds))
    list_fired(whole_rows(h), bounds, tokens, 0, 1, fired)
    prompt_up_kernel(up, NO_BIAS, x, tokens, 0, 1, fired)
    found = np.zeros_like(h)
    found[h != 0] = fired.values[: np.count_nonzero(h)]
    assert np.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", list(ACTIVATION_CODES))
def test_activations(name: str) -> None:
    """Of numbers of all sizes, in any column: the vectors' and the last ones."""
    values = np.concatenate([np.linspace(-12, 12, 4001), [-1e4, -100, -0.0, 1e-30, 100, 1e4]])
    values = values.astype(np.float32)
    threshold = {"fatrelu": 0.5, "clamped_silu": 7.0}.get(name, 0.0)
    function = activation(name, threshold)
    h, num_fired = np.stack([values, np.roll(values, 7)]), np.empty((1, 2), np.int64)

    def activate(last: int) -> None:
        none, ends = ChoiceRows(NO_BIAS, np.zeros(2, np.int64)), np.array([0, values.size])
        of_rows = none, none, np.array([[0, values.size]]), one_block(h), num_fired
        tokens = every_token(2)
        activate_kernel(function, NO_BIAS, NO_BIAS, NO_BIAS, ends, tokens, *of_rows, 0, last)

    activate(2)
    exact = activated(name, torch.from_numpy(values.astype(np.float64)), threshold).numpy()
    assert (np.abs(h[0] - exact) <= 4e-7 * np.maximum(np.abs(values), np.abs(exact))).all()
    assert h[0].tobytes() == np.roll(h[1], -7).tobytes()
    assert num_fired[0].tolist() == np.count_nonzero(h, axis=1).tolist()
    h[0, :20] = np.nan
    activate(1)
    assert np.isnan(h[0, :20]).all() and np.isfinite(h[0, 20:]).all()
