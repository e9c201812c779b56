"""The layer loop with a predictor team: it lists neurons in compiled code, as Python would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hotcold.numba_kernels.decode.predict import pack_weights
from hotcold.numba_kernels.serve import layer_loop
from hotcold.numba_kernels.serve.layer_loop import AT_LAYER, begin_layers
from hotcold.numba_kernels.serve.mailbox import (
    ALL_NEURONS,
    FAILED,
    FFN,
    NO_DOORBELLS,
    NUM_IDS,
    STATUS,
    new_request_state,
    send_requests,
)
from hotcold.numba_kernels.serve.predict_team import FFN_INPUT, MIXED
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.sign_team import SignTeam
from tests.kernels.test_layer_loop import CPUS, LAYERS, LONG, TOKENS, WIDTH, Model, serving

NEURONS, BOUNDS = 30, np.array([[0, 14, 30]] * LAYERS)
Listed = dict[tuple[int, int], list[list[int]]]  # by layer and service: each token's neurons


def sign_layers() -> list[SignLayer | None]:
    """Layer 1 has no predictor."""
    random = np.random.default_rng(5)

    def layer() -> SignLayer:
        bits = pack_weights(random.standard_normal((NEURONS, WIDTH), np.float32), 1)
        zeros, ones = np.zeros(WIDTH, np.float32), np.ones(WIDTH, np.float32)
        return SignLayer(bits, random.standard_normal(NEURONS).astype(np.float32), zeros, ones)

    return [layer(), None, layer()]


class Listing:
    """A model whose services record the requested neurons, beside the expected ones."""

    def __init__(self, read: int) -> None:
        self.model, self.layers = Model(), sign_layers()
        self.found: Listed = {}
        self.expected: Listed = {}
        self.fails = False  # the next answer
        self._read, self._lock = read, threading.Lock()

    def answer(self, service: int) -> None:
        buffers, at = self.model.buffers, int(self.model.layer_state[AT_LAYER])
        with self._lock:
            self.model.answer(service)
            if self.fails:
                buffers.replies[service, STATUS], self.fails = FAILED, False
            if self.model.sent[-1][1] != FFN or service not in CPUS:
                return
            self.found[at, service] = self._requested(service)
            self.expected[at, service] = self._chosen(buffers.ffn_input, buffers.mixed, at, service)

    def _requested(self, service: int) -> list[list[int]]:
        buffers = self.model.buffers
        count = int(buffers.requests[service, NUM_IDS])
        if count == ALL_NEURONS:
            return []
        pairs = zip(
            buffers.active_ids[service, :count], buffers.active_masks[service], strict=False
        )
        listed = [(int(i), int(mask)) for i, mask in pairs]
        return [[i for i, mask in listed if mask >> t & 1] for t in range(TOKENS)]

    def _chosen(
        self, ffn_input: np.ndarray, mixed: np.ndarray, at: int, service: int
    ) -> list[list[int]]:
        layer = self.layers[at]
        if layer is None:
            return []
        scores = np.empty((TOKENS, NEURONS), np.float32)
        layer.score(ffn_input if self._read == FFN_INPUT else mixed, scores)
        first = CPUS.index(service)
        begin, end = BOUNDS[at, first : first + 2]
        return [np.flatnonzero(row > 0).tolist() for row in scores[:, begin:end]]


@contextmanager
def predicting(listing: Listing, num_threads: int) -> Iterator[SignTeam]:
    """A team for the model's buffers, and services that reply."""
    buffers = listing.model.buffers
    team = SignTeam(listing.layers, buffers, 0, num_threads, TOKENS, BOUNDS)
    with serving(listing.model, listing.answer):
        buffers.hidden[:] = listing.model.first
        yield team
    team.close()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("read", [FFN_INPUT, MIXED])
def test_neurons_are_listed_without_python(num_threads: int, read: int) -> None:
    listing = Listing(read)
    request_state = new_request_state(2**31 - 4, LONG)  # sequence numbers wrap around meanwhile
    with predicting(listing, num_threads) as team:
        layer_state = listing.model.layer_state
        begin_layers(layer_state, range(LAYERS), TOKENS, layer_loop.IN_TEAM, predictor_input=read)
        assert listing.model.run(request_state, team.compiled) == layer_loop.DONE
        assert layer_state[layer_loop.PREDICTOR_NS] > 0
    assert listing.found == listing.expected
    listed = [len(ids) for key in listing.found for ids in listing.found[key]]
    assert len(listing.found) == 2 * LAYERS and 0 < sum(listed) < 4 * TOKENS * NEURONS
    np.testing.assert_array_equal(listing.model.buffers.hidden, listing.model.expected())


def test_python_chooses_for_a_reply_with_another_sequence_number() -> None:
    """The request was sent again: the task written for the first one is not scored."""
    listing, request_state = Listing(FFN_INPUT), new_request_state(1, LONG)
    reasons, model = [], listing.model
    listing.fails = True
    with predicting(listing, 2) as team:
        begin_layers(model.layer_state, range(LAYERS), TOKENS, layer_loop.IN_TEAM)
        while reason := model.run(request_state, team.compiled):
            reasons.append((int(model.layer_state[AT_LAYER]), reason))
            if reason == layer_loop.CHOOSE:
                model.buffers.requests[CPUS, NUM_IDS] = 0
            else:
                assert send_requests(
                    request_state, model.buffers.cells, model.buffers.replies, model.requested()
                )
    assert reasons == [(0, layer_loop.RESUME), (0, layer_loop.CHOOSE)]
    assert listing.found[0, 1] == [[], []]
    assert {key: listing.found[key] for key in listing.found if key[0]} == {
        key: listing.expected[key] for key in listing.expected if key[0]
    }


def test_where_python_sends_requests_it_also_announces_and_chooses() -> None:
    listing = Listing(FFN_INPUT)
    model = listing.model
    with predicting(listing, 1) as team:
        begin_layers(model.layer_state, range(1), TOKENS, layer_loop.IN_TEAM)
        reasons = [model.run(NO_DOORBELLS, team.compiled) for _ in range(3)]
    assert reasons == [layer_loop.ANNOUNCE, layer_loop.SEND_REQUESTS, layer_loop.CHOOSE]
