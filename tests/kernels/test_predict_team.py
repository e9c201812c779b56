"""Predictors scored by a team of threads, compared with one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.predict import pack_weights
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, ring
from hotcold.numba_kernels.loops.mailbox import DONE, SharedBuffers, cell
from hotcold.numba_kernels.loops.predict_team import (
    FFN_INPUT,
    FFN_RESIDUAL,
    HIDDEN,
    INSIDE,
    NUM_TOKENS,
    score_task,
    write_task,
)
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor import NeuronPredictor
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.stacked import AnyLayer
from tests.predictor_layers import scores_of

WIDTH, MAX_TOKENS, SERVICE, MOST = 100, 8, 0, 4500
ARRAYS = {FFN_INPUT: "ffn_input", FFN_RESIDUAL: "ffn_residual", HIDDEN: "hidden"}
KINDS = ["one bit", None, "two bits", "float16", "int8", "one bit"]
SIZES = [200, 0, 37, MOST, 300, 3]  # a layer's neurons; low-rank ones in several blocks, or in one


def make_layer(rng: np.random.Generator, count: int, kind: str | None) -> AnyLayer | None:
    thresholds = rng.standard_normal(count, np.float32)
    if kind in ("one bit", "two bits"):
        return SignLayer(
            pack_weights(
                rng.standard_normal((count, WIDTH), np.float32), KINDS.index(kind) // 2 + 1
            ),
            thresholds,
            rng.standard_normal(WIDTH, np.float32),
            rng.random(WIDTH, np.float32) + np.float32(0.5),
        )
    if kind is None:
        return None
    rank = 50 if kind == "int8" else 131
    down, up, scales = (
        rng.standard_normal(shape, np.float32) for shape in ((rank, WIDTH), (rank, count), rank)
    )
    return LowRankLayer(narrow(down, kind), scales, narrow(up, kind), thresholds)


def narrow(matrix: np.ndarray, kind: str) -> np.ndarray:
    if kind == "int8":
        return np.clip(50 * matrix, -127, 127).astype(np.int8)
    return matrix.astype(np.float16).view(np.uint16)


@pytest.fixture
def layers() -> list[AnyLayer | None]:
    rng = np.random.default_rng(0)
    return [make_layer(rng, size, kind) for size, kind in zip(SIZES, KINDS, strict=True)]


@pytest.fixture
def buffers() -> SharedBuffers:
    layout = ArenaLayout(2, MAX_TOKENS, WIDTH, MOST, 50, MAX_TOKENS, 1, 1)
    buffers = layout.buffers(layout.new_arena())
    rng = np.random.default_rng(1)
    for array in (buffers.ffn_input, buffers.ffn_residual, buffers.hidden):
        array[:] = rng.standard_normal(array.shape)
    return buffers


def predictor_of(layers: list[AnyLayer | None]) -> NeuronPredictor:
    return NeuronPredictor(list(layers), np.array([[size] for size in SIZES]), "ffn_input")


@njit(nogil=True, _nrt=False)
def score(team, buffers):
    score_task(team, buffers)


class Team:
    """A predictor's threads, of which this one is the driver's."""

    def __init__(self, predictor: NeuronPredictor, buffers: SharedBuffers) -> None:
        team = predictor.selector(
            np.zeros((len(SIZES), 2), np.int64), np.zeros(len(SIZES), np.bool_)
        ).team
        assert team is not None
        self.compiled = team
        self.buffers = buffers

    def announce(self, layer: int, num_tokens: int, array: int, number: int) -> None:
        write_task(self.compiled, layer, num_tokens, array, number)

    def score(self) -> np.ndarray:
        score(self.compiled, self.buffers)
        work = self.compiled.work
        return work.scores[: work.task[NUM_TOKENS]]

    def answer(self, number: int) -> None:
        ring(self.buffers.cells, cell(SERVICE, DONE), np.int32(number))


@pytest.fixture(params=[1, 2, 3])
def team(
    request: pytest.FixtureRequest, layers: list[AnyLayer | None], buffers: SharedBuffers
) -> Iterator[Team]:
    predictor = predictor_of(layers)
    predictor.start_helpers(buffers, SERVICE, request.param)
    yield Team(predictor, buffers)
    predictor.close()


def assert_same_scores(found: np.ndarray, layer: AnyLayer, x: np.ndarray) -> None:
    """The same bits; of signs, except for the rounding of a product fused with a sum, or not."""
    found, expected = found[:, : layer.num_neurons], scores_of(layer, x)
    if isinstance(layer, LowRankLayer):
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_scores_are_those_of_one_thread(
    team: Team, layers: list[AnyLayer | None], buffers: SharedBuffers
) -> None:
    number = 0
    for _ in range(20):
        for i, layer in enumerate(layers):
            if layer is None:
                continue
            number += 1
            array, tokens = number % 3, 1 + number % MAX_TOKENS
            team.announce(i, tokens, array, number)
            team.answer(number)
            assert_same_scores(team.score(), layer, getattr(buffers, ARRAYS[array])[:tokens])


@pytest.mark.parametrize("at", [0, 3])
def test_helpers_score_all_where_the_driver_is_late(
    layers: list[AnyLayer | None], buffers: SharedBuffers, at: int
) -> None:
    """They wait for each other between two matrices, and for nobody who has not begun."""
    predictor, layer = predictor_of(layers), layers[at]
    assert layer is not None
    predictor.start_helpers(buffers, SERVICE, 3)
    team = Team(predictor, buffers)
    team.compiled.work.scores[:] = np.nan
    team.announce(at, 2, FFN_INPUT, 1)
    team.answer(1)
    scores, until = team.compiled.work.scores[:2, : layer.num_neurons], threading.Event()
    inside = team.compiled.work.doors[INSIDE * INTS_A_CELL :]
    while np.isnan(scores).any() or inside[0]:  # what is no longer NaN may still be a partial sum
        assert not until.wait(0.001)
    assert_same_scores(scores, layer, buffers.ffn_input[:2])
    predictor.close()


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_helpers_end_that_have_not_woken_for_the_last_answer(
    layers: list[AnyLayer | None], buffers: SharedBuffers, last: int
) -> None:
    """Whatever they saw last: another program may have had their core meanwhile."""
    done = cell(SERVICE, DONE) * INTS_A_CELL
    for before in {*range(last)}:
        buffers.cells[done] = before
        predictor = predictor_of(layers)
        predictor.start_helpers(buffers, SERVICE, 3)
        threading.Event().wait(0.05)  # until they sleep
        buffers.cells[done] = last  # not rung, so they sleep on
        predictor.close()
        assert buffers.cells[done] == last
