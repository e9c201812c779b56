"""The layer loop with predictors and a router: what each service is asked for, in compiled code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.numba_kernels.decode.predict import pack_weights
from hotcold.numba_kernels.serve import layer_loop
from hotcold.numba_kernels.serve.layer_loop import AT_LAYER
from hotcold.numba_kernels.serve.mailbox import (
    ATTENTION,
    FAILED,
    FFN,
    NO_DOORBELLS,
    OPERATION,
    STATUS,
    new_request_state,
    read_selection,
    send_requests,
    threshold_words,
)
from hotcold.numba_kernels.serve.selector import Selector
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor import NeuronPredictor, PredictorInput
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.stacked import AnyLayer
from tests.kernels.test_layer_loop import (
    CPUS,
    FFN_OF,
    LAYERS,
    LONG,
    SERVICES,
    THRESHOLDS,
    TOKENS,
    WIDTH,
    Model,
    serving,
)
from tests.predictor_layers import scores_of

NUM_ASKED = sum(map(len, FFN_OF))
NEURONS, BOUNDS, BLOCKS = 30, np.array([0, 14, 30]), 4
Listed = dict[tuple[int, int], list[list[int]] | None]  # by layer and service: each token's neurons


def random_layers(kind: str) -> list[AnyLayer | None]:
    """Layer 1 has no predictor; "mixed" layers are of two kinds."""
    random = np.random.default_rng(5)
    thresholds = random.standard_normal((2, NEURONS)).astype(np.float32)

    def sign(at: int) -> SignLayer:
        bits = pack_weights(random.standard_normal((NEURONS, WIDTH), np.float32), 1)
        zeros, ones = np.zeros(WIDTH, np.float32), np.ones(WIDTH, np.float32)
        return SignLayer(bits, thresholds[at], zeros, ones)

    def lowrank(at: int) -> LowRankLayer:
        down, up = random.standard_normal((7, WIDTH)), random.standard_normal((7, NEURONS))
        narrow = [each.astype(np.float16).view(np.uint16) for each in (down, up)]
        return LowRankLayer(narrow[0], np.ones(7, np.float32), narrow[1], thresholds[at])

    if kind == "mixed":
        return [sign(0), None, lowrank(1)]
    return [sign(0), None, sign(1)] if kind == "sign" else [lowrank(0), None, lowrank(1)]


class Listing:
    """A model whose services record what they are asked for, beside what is expected."""

    def __init__(
        self, kind: str, input_name: PredictorInput = "ffn_input", routed: tuple[int, ...] = ()
    ) -> None:
        layout = ArenaLayout(
            SERVICES, TOKENS, WIDTH, NEURONS, 4, 1, 1, 1, num_blocks=BLOCKS if routed else 0
        )
        self.model = Model(buffers=layout.buffers(layout.new_arena()))
        self.layers: list[AnyLayer | None] = random_layers(kind) if kind else [None] * LAYERS
        sizes = np.array([np.diff(BOUNDS)] * LAYERS)
        self.predictor = NeuronPredictor(list(self.layers), sizes, input_name)
        self.found: Listed = {}
        self.expected: Listed = {}
        self.weights: dict[tuple[int, int], np.ndarray] = {}  # of blocks
        self.routed = routed
        self.fails = False  # the next answer
        self._input, self._lock = input_name, threading.Lock()

    @property
    def selector(self) -> Selector:
        is_routed = np.isin(np.arange(LAYERS), self.routed)
        return self.predictor.selector(threshold_words(THRESHOLDS), is_routed)

    def answer(self, service: int) -> None:
        buffers, at = self.model.buffers, int(self.model.layer_state[AT_LAYER])
        with self._lock:
            self.model.answer(service)
            if self.fails:
                buffers.replies[service, STATUS], self.fails = FAILED, False
            if buffers.requests[service, OPERATION] == ATTENTION and at in self.routed:
                buffers.block_weights[:] = routing(at)
            if buffers.requests[service, OPERATION] != FFN:
                return
            found = read_selection.py_func(buffers, service)
            self.weights[at, service] = found.block_weights.copy()
            self.found[at, service] = self._requested(service)
            self.expected[at, service] = self._chosen(at, service)

    def _requested(self, service: int) -> list[list[int]] | None:
        selection = read_selection.py_func(self.model.buffers, service)
        if not selection.is_listed:
            return None
        listed = [*zip(selection.ids.tolist(), selection.token_masks.tolist(), strict=True)]
        return [[i for i, mask in listed if mask >> t & 1] for t in range(TOKENS)]

    def _chosen(self, at: int, service: int) -> list[list[int]] | None:
        layer, buffers = self.layers[at], self.model.buffers
        if layer is None or service not in CPUS:
            return None
        x = buffers.ffn_input if self._input == "ffn_input" else buffers.mixed
        first = CPUS.index(service)
        begin, end = BOUNDS[first : first + 2]
        return [np.flatnonzero(row > 0).tolist() for row in scores_of(layer, x)[:, begin:end]]


def routing(layer: int) -> np.ndarray:
    """Two of the blocks for each token, with weights: (T, B) float32."""
    random = np.random.default_rng(layer)
    weights = random.random((TOKENS, BLOCKS)).astype(np.float32)
    weights[np.argsort(weights, axis=1).argsort(axis=1) < BLOCKS - 2] = 0
    return weights


@contextmanager
def predicting(listing: Listing, num_threads: int) -> Iterator[None]:
    """Services that reply, and helpers that hear them."""
    listing.predictor.start_helpers(listing.model.buffers, 0, num_threads)
    with serving(listing.model, listing.answer):
        listing.model.begin()
        yield
    listing.predictor.close()


def assert_all_was_listed(listing: Listing) -> None:
    assert listing.found == listing.expected
    assert len(listing.found) == NUM_ASKED
    listed = [len(ids) for rows in listing.found.values() if rows is not None for ids in rows]
    assert 0 < sum(listed) < 4 * TOKENS * NEURONS
    np.testing.assert_array_equal(listing.model.buffers.hidden, listing.model.expected())


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("input_name", ["ffn_input", "residual"])
@pytest.mark.parametrize("kind", ["sign", "lowrank", "mixed"])
def test_neurons_are_listed_without_python(
    num_threads: int, input_name: PredictorInput, kind: str
) -> None:
    listing = Listing(kind, input_name)
    request_state = new_request_state(2**31 - 4, LONG)  # sequence numbers wrap around meanwhile
    with predicting(listing, num_threads):
        assert listing.model.run(request_state, listing.selector) == layer_loop.DONE
        assert listing.model.layer_state[layer_loop.PREDICTOR_NS] > 0
    assert_all_was_listed(listing)


@pytest.mark.parametrize("kind", ["sign", "lowrank"])
def test_a_request_that_was_sent_again_is_scored_by_the_driver(kind: str) -> None:
    """Its reply has another sequence number than announced: helpers may have read half an input."""
    listing, request_state = Listing(kind), new_request_state(1, LONG)
    reasons, model = [], listing.model
    listing.fails = True
    with predicting(listing, 2):
        while reason := model.run(request_state, listing.selector):
            reasons.append((int(model.layer_state[AT_LAYER]), reason))
            assert send_requests(
                request_state,
                model.buffers.cells,
                model.buffers.requests,
                model.buffers.replies,
                model.requested(),
            )
    assert reasons == [(0, layer_loop.RESUME)]
    assert_all_was_listed(listing)


@pytest.mark.parametrize("kind", ["sign", "lowrank"])
def test_where_python_sends_requests_the_same_is_listed(kind: str) -> None:
    listing, reasons = Listing(kind), []
    model = listing.model
    model.begin()
    while reason := model.run(NO_DOORBELLS, listing.selector):
        reasons.append(reason)
        for service in model.requested().tolist():
            listing.answer(service)
    assert reasons == [layer_loop.SEND_REQUESTS] * 2 * LAYERS
    assert_all_was_listed(listing)


@pytest.mark.parametrize("kind", ["", "sign", "lowrank"])
def test_a_router_weighs_blocks_with_and_without_a_predictor(kind: str) -> None:
    """Attention writes the weights of layers 0 and 1; predicted ids stay what they are."""
    listing = Listing(kind, routed=(0, 1))
    with predicting(listing, 2):
        assert listing.model.run(new_request_state(1, LONG), listing.selector) == layer_loop.DONE
    assert listing.found == listing.expected and len(listing.found) == NUM_ASKED
    for (layer, _), weights in listing.weights.items():
        if layer in listing.routed:
            np.testing.assert_array_equal(weights, routing(layer))
        else:
            assert weights.size == 0
    has_ids = {layer for (layer, _), rows in listing.found.items() if rows is not None}
    assert has_ids == ({0, 2} if kind else set())


def test_gates_of_chosen_blocks_are_counted() -> None:
    listing = Listing("", routed=(0, 1))
    sizes = np.random.default_rng(6).integers(0, 9, (LAYERS, SERVICES, BLOCKS))
    listing.model.facts = listing.model.facts._replace(num_neurons=sizes)
    with predicting(listing, 1):
        assert listing.model.run(new_request_state(1, LONG), listing.selector) == layer_loop.DONE
    expected = 0
    for layer, services in enumerate(FFN_OF):
        is_chosen = routing(layer).any(axis=0) if layer in listing.routed else np.ones(BLOCKS, bool)
        expected += sizes[layer, services][:, is_chosen].sum()
    assert not routing(0).any(axis=0).all()
    assert listing.model.layer_state[layer_loop.SUM_GATES] == expected
