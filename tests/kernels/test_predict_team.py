"""Sign predictors scored by a team of threads, compared with one thread."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.numba_kernels.decode.predict import pack_weights
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL, ring
from hotcold.numba_kernels.serve.mailbox import DONE, SharedBuffers, cell
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.sign_team import SignTeam

WIDTH, MAX_TOKENS, SERVICE = 100, 8, 0
NO_BOUNDS = np.zeros((0, 0), np.int64)
SIZES = [200, None, 37, 3]  # a layer's neurons; None: no predictor


def make_layer(rng: np.random.Generator, count: int, planes: int) -> SignLayer:
    weights = rng.standard_normal((count, WIDTH), np.float32)
    return SignLayer(
        pack_weights(weights, planes),
        rng.standard_normal(count, np.float32),
        rng.standard_normal(WIDTH, np.float32),
        rng.random(WIDTH, np.float32) + np.float32(0.5),
    )


@pytest.fixture
def layers() -> list[SignLayer | None]:
    rng = np.random.default_rng(0)
    return [
        None if size is None else make_layer(rng, size, 1 + i % 2) for i, size in enumerate(SIZES)
    ]


@pytest.fixture
def buffers() -> SharedBuffers:
    layout = ArenaLayout(2, MAX_TOKENS, WIDTH, 200, 50, MAX_TOKENS, 1, 1)
    buffers = layout.buffers(layout.new_arena())
    rng = np.random.default_rng(1)
    for array in (buffers.ffn_input, buffers.mixed, buffers.hidden):
        array[:] = rng.standard_normal(array.shape)
    return buffers


@pytest.fixture(params=[1, 2, 3])
def team(
    request: pytest.FixtureRequest, layers: list[SignLayer | None], buffers: SharedBuffers
) -> Iterator[SignTeam]:
    team = SignTeam(layers, buffers, SERVICE, request.param, MAX_TOKENS, NO_BOUNDS)
    yield team
    team.close()


def answer(buffers: SharedBuffers, number: int) -> None:
    ring(buffers.cells, cell(SERVICE, DONE), np.int32(number))


def alone(layer: SignLayer, x: np.ndarray) -> np.ndarray:
    scores = np.empty((x.shape[0], layer.num_neurons), np.float32)
    layer.score(x, scores)
    return scores


def assert_same_scores(found: np.ndarray | None, expected: np.ndarray) -> None:
    """The same except for the rounding of a product that is fused with a sum, or is not."""
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_scores_are_those_of_one_thread(
    team: SignTeam, layers: list[SignLayer | None], buffers: SharedBuffers
) -> None:
    number = 0
    for _ in range(20):
        for i, layer in enumerate(layers):
            if layer is None:
                continue
            number += 1
            name, tokens = ("ffn_input", "mixed", "hidden")[number % 3], 1 + number % MAX_TOKENS
            team.announce(i, tokens, name, number)
            answer(buffers, number)
            found = team.score(i, tokens)
            assert_same_scores(found, alone(layer, getattr(buffers, name)[:tokens]))


def test_what_was_not_announced_is_not_scored(
    team: SignTeam, layers: list[SignLayer | None], buffers: SharedBuffers
) -> None:
    answer(buffers, 1)
    assert team.score(0, 1) is None
    team.announce(0, 1, "ffn_input", 2)
    assert team.score(0, 1) is None  # no reply yet
    answer(buffers, 3)  # the request was sent again
    assert team.score(0, 1) is None
    team.announce(0, 1, "ffn_input", 4)
    answer(buffers, 4)  # but the request failed, so it is never scored
    team.announce(2, 2, "ffn_input", 5)
    answer(buffers, 5)
    for layer, num_tokens in ((0, 1), (0, 2), (2, 1)):
        assert team.score(layer, num_tokens) is None
    announced = layers[2]
    assert announced is not None
    assert_same_scores(team.score(2, 2), alone(announced, buffers.ffn_input[:2]))


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_helpers_end_that_have_not_woken_for_the_last_answer(
    layers: list[SignLayer | None], buffers: SharedBuffers, last: int
) -> None:
    """Whatever they saw last: another program may have had their core meanwhile."""
    done = cell(SERVICE, DONE) * INTS_A_CELL
    for before in {*range(last)}:
        buffers.cells[done] = before
        team = SignTeam(layers, buffers, SERVICE, 3, MAX_TOKENS, NO_BOUNDS)
        threading.Event().wait(0.05)  # until they sleep
        buffers.cells[done] = last  # not rung, so they sleep on
        team.close()
        assert buffers.cells[done] == last


def test_its_layers_are_the_given_ones(team: SignTeam, layers: list[SignLayer | None]) -> None:
    for found, given in zip(team.layers, layers, strict=True):
        assert (found is None) == (given is None)
        if found is not None and given is not None:
            for name, array in vars(given).items():
                np.testing.assert_array_equal(getattr(found, name), array)
