"""The layer loop, with services that compute plain arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.serve import layer_loop
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.layer_loop import (
    LayerFacts,
    begin_layers,
    new_layer_state,
    run_layers,
)
from hotcold.numba_kernels.serve.mailbox import (
    ALL_NEURONS,
    ATTENTION,
    BUSY_NS,
    DONE,
    FAILED,
    FFN,
    LAYER,
    NO_COUNTERS,
    NO_DOORBELLS,
    NUM_COMPUTED,
    NUM_DONE,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    NUMBER,
    OPERATION,
    STATUS,
    STOP,
    SharedBuffers,
    await_all,
    cell,
    decode_thresholds,
    finish_request,
    new_request_state,
    next_request,
    send_requests,
    threshold_words,
)
from hotcold.numba_kernels.serve.predict_team import NO_TEAM, PredictTeam

LAYERS, WIDTH, TOKENS, SERVICES = 3, 20, 2, 3
LONG = 120_000_000_000
NUM_HOT = np.array([0, 4, 0])  # the attention service holds neurons of layer 1
THRESHOLDS = [Thresholds(np.float32(0.1 * layer), np.float32(-1)) for layer in range(LAYERS)]


def new_buffers() -> SharedBuffers:
    layout = ArenaLayout(SERVICES, TOKENS, WIDTH, 30, 4, 1, 1, 1)
    return layout.buffers(layout.new_arena())


@dataclass
class Model:
    """Services that scale: layer l's attention by attention[l], service s's FFN by ffn[s, l]."""

    norm: bool = False
    buffers: SharedBuffers = field(default_factory=new_buffers)
    sent: list[tuple[int, int, int]] = field(default_factory=list)  # service, operation, layer

    def __post_init__(self) -> None:
        random = np.random.default_rng(3)
        self.attention = random.standard_normal(LAYERS).astype(np.float32)
        self.ffn = random.standard_normal((SERVICES, LAYERS)).astype(np.float32)
        shape = (LAYERS, WIDTH if self.norm else 0)
        self.norm_weight = random.standard_normal(shape).astype(np.float32)
        self.first = random.standard_normal((TOKENS, WIDTH)).astype(np.float32)
        self.layer_state = new_layer_state()
        self.facts = LayerFacts(
            threshold_words(THRESHOLDS), NUM_HOT, 30, self.norm_weight, np.int32(0),
            np.float32(1e-5), np.float32(0.5 if self.norm else 1), np.arange(SERVICES),
        )  # fmt: skip

    def begin(self, predicts: int = layer_loop.NOBODY, own_ffn: bool = False) -> None:
        self.buffers.hidden[:] = self.first
        begin_layers(self.layer_state, range(LAYERS), TOKENS, predicts, own_ffn)

    def run(self, request_state: np.ndarray, team: PredictTeam = NO_TEAM) -> int:
        return int(run_layers(self.layer_state, request_state, self.buffers, self.facts, team))

    def answer(self, service: int) -> None:
        """Reply as a service does, by its request words."""
        buffers = self.buffers
        request, reply = buffers.requests[service], buffers.replies[service]
        operation, layer = int(request[OPERATION]), int(request[LAYER])
        self.sent.append((service, operation, layer))
        assert request[NUM_TOKENS] == TOKENS
        assert decode_thresholds(request) == THRESHOLDS[layer]
        if operation == ATTENTION:
            buffers.mixed[:] = buffers.hidden * self.attention[layer]
            buffers.ffn_input[:] = buffers.mixed + 1
        else:
            buffers.partials[service] = buffers.ffn_input * self.ffn[service, layer]
            reply[NUM_COMPUTED], reply[NUM_UP] = 10 + service, 20 + service
        reply[BUSY_NS] = (1000, 3000, 2000)[service]

    def answer_all(self) -> None:
        services = range(self.layer_state[layer_loop.FIRST], self.layer_state[layer_loop.END])
        for service in services:
            self.answer(service)
        self.layer_state[layer_loop.REQUEST_WAITED_NS] += 5000

    def expected(self) -> np.ndarray:
        """The hidden states after all layers, in plain NumPy."""
        hidden = self.first
        for layer in range(LAYERS):
            mixed = hidden * self.attention[layer]
            ffn_input = mixed + np.float32(1)
            first = 0 if NUM_HOT[layer] else 1
            partials = [ffn_input * self.ffn[s, layer] for s in range(first, SERVICES)]
            if self.norm:
                total = sum(partials[1:], start=partials[0]).astype(np.float64)
                scale = 1 / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-5)
                normed = 0.5 * total * scale * self.norm_weight[layer]
                hidden = (mixed + normed).astype(np.float32)
            else:
                hidden = sum(partials, start=mixed)
        return hidden


@contextmanager
def serving(model: Model, answer: Callable[[int], None]) -> Iterator[None]:
    """Threads that serve requests by doorbells."""
    buffers = model.buffers

    def serve(service: int) -> None:
        seen = np.int32(0)
        while True:
            seen = np.int32(next_request(buffers.cells, service, seen))
            is_last = buffers.requests[service, OPERATION] == STOP
            if not is_last:
                answer(service)
            finish_request(buffers.cells, buffers.replies, NO_COUNTERS, service, seen, 1, 0)
            if is_last:
                return

    running = [threading.Thread(target=serve, args=(s,), daemon=True) for s in range(SERVICES)]
    for thread in running:
        thread.start()
    yield
    buffers.requests[:, OPERATION] = STOP
    assert send_requests(
        new_request_state(2**30, LONG), buffers.cells, buffers.replies, np.arange(SERVICES)
    )
    for thread in running:
        thread.join(60)
    assert not any(thread.is_alive() for thread in running)


LAYER_1 = [(0, ATTENTION, 1), (0, FFN, 1), (1, FFN, 1), (2, FFN, 1)]  # which has hot neurons


@pytest.mark.parametrize("norm", [False, True])
def test_python_sends_the_requests(norm: bool) -> None:
    model = Model(norm)
    model.begin()
    while reason := model.run(NO_DOORBELLS):
        assert reason == layer_loop.SEND_REQUESTS
        model.answer_all()
    rtol = 1e-5 if norm else 0
    np.testing.assert_allclose(model.buffers.hidden, model.expected(), rtol)
    plain = [[(0, ATTENTION, at), (1, FFN, at), (2, FFN, at)] for at in (0, 2)]
    assert model.sent == [*plain[0], *LAYER_1, *plain[1]]
    layer_state = model.layer_state
    assert layer_state[layer_loop.ATTENTION_BUSY_NS] == LAYERS * 1000
    assert layer_state[layer_loop.FFN_BUSY_NS] == LAYERS * 3000
    assert (
        layer_state[layer_loop.ATTENTION_WAITED_NS]
        == layer_state[layer_loop.FFN_WAITED_NS]
        == 15000
    )
    assert layer_state[layer_loop.SUM_COMPUTED] == LAYERS * (11 + 12) + 10
    assert layer_state[layer_loop.SUM_UPS] == LAYERS * (21 + 22) + 20
    assert layer_state[layer_loop.SUM_GATES] == LAYERS * 30


@pytest.mark.parametrize("timeout_ns", [LONG, 0])
def test_by_doorbells_the_same(timeout_ns: int) -> None:
    """With a timeout of 0 the loop yields to Python while services still work, and resumes."""
    model, lock = Model(), threading.Lock()
    cells, request_state = model.buffers.cells, new_request_state(2**31 - 4, timeout_ns)

    def answer(service: int) -> None:
        with lock:
            model.answer(service)

    with serving(model, answer):
        model.begin()
        while reason := model.run(request_state):
            assert reason == layer_loop.RESUME and not timeout_ns
            services = np.arange(
                model.layer_state[layer_loop.FIRST], model.layer_state[layer_loop.END]
            )
            assert request_state[NUM_DONE] < services.size
            await_all(cells, services, request_state[NUM_DONE], request_state[NUMBER], LONG)
    np.testing.assert_array_equal(model.buffers.hidden, model.expected())
    assert model.layer_state[layer_loop.SUM_COMPUTED] == LAYERS * (11 + 12) + 10
    assert sorted(model.sent[-3:]) == [(0, ATTENTION, 2), (1, FFN, 2), (2, FFN, 2)]
    assert cells[cell(2, DONE) * INTS_A_CELL] == 2**30


def test_a_failed_service_is_reported_at_once() -> None:
    model = Model()

    def answer(service: int) -> None:
        model.answer(service)
        if model.sent[-1] == (2, FFN, 1):
            model.buffers.replies[service, STATUS] = FAILED

    with serving(model, answer):
        model.begin()
        request_state = new_request_state(2, LONG)
        assert model.run(request_state) == layer_loop.RESUME
        assert request_state[NUM_DONE] == SERVICES
        assert model.layer_state[layer_loop.AT_LAYER] == 1
        model.buffers.replies[:, STATUS] = 0
        assert model.run(request_state) == layer_loop.DONE
    np.testing.assert_array_equal(model.buffers.hidden, model.expected())


def test_the_loop_yields_to_a_predictor_before_and_after_attention() -> None:
    model, reasons = Model(), []
    model.begin(predicts=layer_loop.IN_PYTHON)
    while reason := model.run(NO_DOORBELLS):
        reasons.append(reason)
        if reason == layer_loop.SEND_REQUESTS:
            model.answer_all()
        elif reason == layer_loop.CHOOSE:
            requests = model.buffers.requests[1:]
            assert (requests[:, NUM_IDS] == ALL_NEURONS).all()
            if model.layer_state[layer_loop.AT_LAYER]:
                requests[:, NUM_IDS] = 5, 6
    layer = [
        layer_loop.ANNOUNCE,
        layer_loop.SEND_REQUESTS,
        layer_loop.CHOOSE,
        layer_loop.SEND_REQUESTS,
    ]
    assert reasons == layer * LAYERS
    assert model.layer_state[layer_loop.SUM_GATES] == 30 + (4 + 11) + 11


def test_python_may_compute_the_ffn() -> None:
    """It also sets the services whose partial outputs are added, and counts by itself."""
    model, num_layers = Model(), 0
    model.begin(own_ffn=True)
    while reason := model.run(NO_DOORBELLS):
        if reason == layer_loop.SEND_REQUESTS:
            assert model.layer_state[layer_loop.END] == 1
            model.answer_all()
            continue
        assert reason == layer_loop.COMPUTE
        num_layers += 1
        model.layer_state[layer_loop.FIRST], model.layer_state[layer_loop.END] = 0, 1
        model.buffers.partials[0], model.buffers.partials[1:] = 2, np.nan
        before = model.buffers.mixed + np.float32(2)
    assert num_layers == LAYERS
    np.testing.assert_array_equal(model.buffers.hidden, before)
    assert (
        not model.layer_state[layer_loop.FFN_WAITED_NS]
        and not model.layer_state[layer_loop.SUM_GATES]
    )


@pytest.mark.parametrize("name", ["ffn_input", "partials"])
def test_what_is_not_finite_stops_the_loop(name: str) -> None:
    model = Model()
    model.begin()
    while (reason := model.run(NO_DOORBELLS)) == layer_loop.SEND_REQUESTS:
        model.answer_all()
        if model.sent[-1] == ((2, FFN, 1) if name == "partials" else (0, ATTENTION, 1)):
            getattr(model.buffers, name)[..., 1, 7] = np.nan
        if name == "ffn_input":  # a NaN gate does not fire, so it shows nowhere else
            np.nan_to_num(model.buffers.partials, copy=False)
    assert reason == layer_loop.NOT_FINITE
    assert model.layer_state[layer_loop.AT_LAYER] == 1
