"""Neurons that experts' predictors let count: float64, batch-mates, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.selection import Selection
from hotcold.numba_kernels.ffn.expert_predictors import counting_neurons, new_predictor_scratch
from hotcold.numba_kernels.ffn_arrays import ExpertPredictors, most_rows, starts_of
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import CELLS_A_SERVICE
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.quantized_rows import random_rows
from tests.kernels.selections import KINDS, factors, random_selection
from tests.kernels.sources import alone, block_rows

WIDTH, RANKS = 96, (64, 32, 0, 96)  # the third block, as a shared expert, has no predictor
SIZES = np.array([[40, 133, 24, 0], [70, 8, 33, 300]])
STARTS = starts_of(SIZES)


def predictors_of(kind: str) -> ExpertPredictors:
    def rows(seed: int, height: int, width: int) -> np.ndarray:
        if kind in BITS:
            return random_bits(seed, BITS[kind], height, width)
        return random_rows(seed, kind, height, width).rows

    ranks = np.where(SIZES > 0, RANKS, 0)
    matrices = [
        [
            rows(10 * layer + block, size, rank) if rank else rows(0, 1, 32)[:0]
            for block, (size, rank) in enumerate(zip(SIZES[layer], ranks[layer], strict=True))
        ]
        for layer in range(len(SIZES))
    ]
    return ExpertPredictors(
        rows(3, int(ranks.sum()), WIDTH), starts_of(ranks), block_rows(matrices)
    )


@njit(nogil=True, _nrt=False)
def count_neurons(thread, num_threads, cells, layer, chosen, x, predictors, scratch):
    found = counting_neurons(
        thread, num_threads, cells, 0, layer, chosen, STARTS, x, predictors, scratch
    )
    return found.is_listed, found.ids.shape[0], found.token_masks.shape[0]


def counting(
    predictors: ExpertPredictors,
    layer: int,
    x: np.ndarray,
    selection: Selection,
    num_threads: int = 1,
) -> Selection:
    scratch = new_predictor_scratch(predictors, num_threads, len(x), most_rows(STARTS), WIDTH)
    cells = np.zeros(CELLS_A_SERVICE * INTS_A_CELL, np.int32)
    is_listed, *arrays = selection
    chosen = Selection(is_listed, *(read_only(each) for each in arrays))

    def run(thread: int) -> Selection:
        is_listed, num_ids, num_masks = count_neurons(
            thread, num_threads, cells, layer, chosen, x, predictors, scratch
        )
        ids, masks = scratch.ids[:num_ids], scratch.masks[:num_masks]
        return Selection(is_listed, ids, masks, chosen.block_weights)

    with ThreadPoolExecutor(num_threads) as pool:
        found = list(pool.map(run, range(num_threads)))
    for other in found:
        assert other.is_listed
        assert np.array_equal(other.ids, found[0].ids)
        assert np.array_equal(other.token_masks, found[0].token_masks)
    return found[0]


def sums(predictors: ExpertPredictors, layer: int, x: np.ndarray) -> np.ndarray:
    """outer . relu(inner . x) in float64, (T, N); where there is no predictor infinite."""
    found = []
    for block, size in enumerate(SIZES[layer]):
        first, last = predictors.inner_starts[layer, block : block + 2]
        if first == last:
            found.append(np.full((len(x), size), np.inf))
            continue
        inner = to_float32(predictors.inner[first:last]).astype(np.float64)
        outer = to_float32(predictors.outer.matrix(layer, block)).astype(np.float64)
        found.append(np.maximum(x @ inner.T, 0) @ outer.T)
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("format_of_rows", ["f32", "bf16", "q8"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_counts_is_what_float64_lets_count(format_of_rows: str, kind: str) -> None:
    predictors = predictors_of(format_of_rows)
    for layer, num_tokens in ((0, 1), (1, 1), (0, 7), (1, 32)):
        starts = STARTS[layer] - STARTS[layer, 0]
        rng = np.random.default_rng(layer + num_tokens)
        x = random_floats(layer, num_tokens, WIDTH)
        selection = random_selection(rng, kind, starts, num_tokens)
        expected = sums(predictors, layer, x)
        chosen = factors(selection, starts, num_tokens) != 0
        sure = np.abs(expected) > (0.05 if format_of_rows == "q8" else 1e-4) * np.abs(
            expected[np.isfinite(expected)]
        ).max(initial=0)
        for num_threads in (1, 2, 5):
            found = counting(predictors, layer, x, selection, num_threads)
            assert (np.diff(found.ids) > 0).all()
            counts = factors(found, starts, num_tokens) != 0
            assert np.array_equal(counts & sure, chosen & sure & (expected > 0))
            assert not (counts & ~chosen).any()
            assert found.token_masks.size == (found.ids.size if num_tokens > 1 else 0)
        assert sure.mean() > 0.5 and 0 < (chosen & (expected > 0)).mean() < chosen.mean()


@pytest.mark.parametrize("format_of_rows", ["f32", "q8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_alone_has_the_neurons_of_its_batch(format_of_rows: str, kind: str) -> None:
    predictors = predictors_of(format_of_rows)
    starts = STARTS[1] - STARTS[1, 0]
    x = random_floats(4, 9, WIDTH)
    selection = random_selection(np.random.default_rng(8), kind, starts, len(x))
    together = counting(predictors, 1, x, selection, 3)
    for t in range(len(x)):
        own = counting(predictors, 1, x[t : t + 1], alone(selection, t), 2)
        wanted = np.flatnonzero(factors(together, starts, len(x))[t])
        held = np.flatnonzero(factors(own, starts, 1)[0])
        assert np.array_equal(held, wanted)


def test_blocks_that_are_not_chosen_are_not_read() -> None:
    predictors = predictors_of("f32")
    starts = STARTS[1] - STARTS[1, 0]
    x = random_floats(4, 5, WIDTH)
    selection = random_selection(np.random.default_rng(2), "blocks", starts, len(x))
    selection.block_weights[:, 3] = 0
    expected = counting(predictors, 1, x, selection, 2)
    first, last = predictors.inner_starts[1, 3:5]
    predictors.inner[first:last] = np.nan
    predictors.outer.matrix(1, 3)[:] = np.nan
    found = counting(predictors, 1, x, selection, 2)
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.token_masks, expected.token_masks)


def test_a_nan_counts() -> None:
    """So that it reaches the output, and is told of."""
    predictors = predictors_of("f32")
    x = np.full((1, WIDTH), np.nan, np.float32)
    selection = random_selection(np.random.default_rng(2), "all", STARTS[0], 1)
    found = counting(predictors, 0, x, selection)
    assert found.ids.size == SIZES[0].sum()
