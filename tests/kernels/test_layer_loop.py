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
    requested_services,
    run_layers,
)
from hotcold.numba_kernels.serve.mailbox import (
    ATTENTION,
    BUSY_NS,
    DONE,
    FAILED,
    FFN,
    FIRST_LOGIT,
    HEAD,
    LAYER,
    NO_COUNTERS,
    NO_DOORBELLS,
    NUM_COMPUTED,
    NUM_DONE,
    NUM_TOKENS,
    NUM_UP,
    NUMBER,
    OPERATION,
    STATUS,
    STOP,
    TARGET,
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
from hotcold.numba_kernels.serve.predict_team import MIXED
from hotcold.numba_kernels.serve.selector import Selector, all_neurons

LAYERS, WIDTH, TOKENS, SERVICES = 3, 20, 2, 4
LONG = 120_000_000_000
# Services 0 and 3 have attention, 3 of the last layer alone; 3 and, of layer 1, 0 have hot neurons.
ATTENTION_OF, CPUS = (0, 0, 3), [1, 2]
NUM_NEURONS = np.array([[0, 14, 16, 0], [4, 12, 14, 0], [0, 11, 13, 6]])[..., None]  # one block
FFN_OF = ([1, 2], [0, 1, 2], [3, 1, 2])
HEAD_OF, VOCAB = 3, 4
THRESHOLDS = [Thresholds(np.float32(0.1 * layer), np.float32(-1)) for layer in range(LAYERS)]
EVERYTHING = all_neurons(threshold_words(THRESHOLDS), np.zeros(LAYERS, np.bool_))


def new_buffers() -> SharedBuffers:
    layout = ArenaLayout(SERVICES, TOKENS, WIDTH, 30, VOCAB, TOKENS, 1, 1)
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
        pairs = list(zip(FFN_OF, ATTENTION_OF, strict=True))
        ffn_of = np.array([[*row, a, *[0] * (SERVICES - len(row))] for row, a in pairs])
        is_chained = np.array([a not in row for row, a in pairs])
        self.facts = LayerFacts(
            np.array(ATTENTION_OF), ffn_of, np.array([len(row) for row in FFN_OF]), is_chained,
            NUM_NEURONS, np.array(CPUS), self.norm_weight, np.int32(0), np.float32(1e-5),
            np.float32(0.5 if self.norm else 1), MIXED, head=np.array([HEAD_OF]),
        )  # fmt: skip

    def begin(self, own_ffn: bool = False, num_logits: int = 0) -> None:
        self.buffers.hidden[:] = self.first
        begin_layers(
            self.layer_state, range(LAYERS), TOKENS, own_ffn, TARGET, num_logits=num_logits
        )

    def run(self, request_state: np.ndarray, selector: Selector = EVERYTHING) -> int:
        return int(run_layers(self.layer_state, request_state, self.buffers, self.facts, selector))

    def answer(self, service: int) -> None:
        """Reply as a service does, by its request words."""
        buffers = self.buffers
        request, reply = buffers.requests[service], buffers.replies[service]
        operation, layer = int(request[OPERATION]), int(request[LAYER])
        self.sent.append((service, operation, layer))
        assert request[NUM_TOKENS] == TOKENS
        if operation == HEAD:
            first = int(request[FIRST_LOGIT])
            buffers.logits[: TOKENS - first] = buffers.hidden[first:, :VOCAB] * 3
            reply[BUSY_NS] = 7000
            return
        assert decode_thresholds.py_func(request) == THRESHOLDS[layer]
        if operation == ATTENTION:
            buffers.mixed[:] = buffers.hidden * self.attention[layer]
            buffers.ffn_input[:] = buffers.mixed + 1
        else:
            buffers.partials[service] = buffers.ffn_input * self.ffn[service, layer]
            reply[NUM_COMPUTED], reply[NUM_UP] = 10 + service, 20 + service
        reply[BUSY_NS] = (1000, 3000, 2000, 1000)[service]

    def requested(self) -> np.ndarray:
        found: np.ndarray = requested_services.py_func(self.layer_state, self.facts)
        return found

    def answer_all(self) -> None:
        for service in self.requested().tolist():
            self.answer(service)
        self.layer_state[layer_loop.REQUEST_WAITED_NS] += 5000

    def expected(self) -> np.ndarray:
        """The hidden states after all layers, in plain NumPy."""
        hidden = self.first
        for layer in range(LAYERS):
            mixed = hidden * self.attention[layer]
            ffn_input = mixed + np.float32(1)
            partials = [ffn_input * self.ffn[s, layer] for s in FFN_OF[layer]]
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
            finish_request(
                buffers.cells, buffers.requests, buffers.replies, NO_COUNTERS, service, seen, 1, 0
            )
            if is_last:
                return

    running = [threading.Thread(target=serve, args=(s,), daemon=True) for s in range(SERVICES)]
    for thread in running:
        thread.start()
    yield
    buffers.requests[:, OPERATION] = STOP
    assert send_requests(
        new_request_state(2**30, LONG),
        buffers.cells,
        buffers.requests,
        buffers.replies,
        np.arange(SERVICES),
    )
    for thread in running:
        thread.join(60)
    assert not any(thread.is_alive() for thread in running)


SENT = [
    (service, operation, layer)
    for layer in range(LAYERS)
    for operation, services in ((ATTENTION, [ATTENTION_OF[layer]]), (FFN, FFN_OF[layer]))
    for service in services
]
NUM_COMPUTED_IN_ALL = LAYERS * (11 + 12) + 10 + 13


@pytest.mark.parametrize("norm", [False, True])
def test_python_sends_the_requests(norm: bool) -> None:
    model = Model(norm)
    model.begin()
    while reason := model.run(NO_DOORBELLS):
        assert reason == layer_loop.SEND_REQUESTS
        model.answer_all()
    rtol = 1e-5 if norm else 0
    np.testing.assert_allclose(model.buffers.hidden, model.expected(), rtol)
    assert model.sent == SENT
    layer_state = model.layer_state
    assert layer_state[layer_loop.ATTENTION_BUSY_NS] == LAYERS * 1000
    assert layer_state[layer_loop.FFN_BUSY_NS] == LAYERS * 3000
    assert (
        layer_state[layer_loop.ATTENTION_WAITED_NS]
        == layer_state[layer_loop.FFN_WAITED_NS]
        == 15000
    )
    assert layer_state[layer_loop.SUM_COMPUTED] == NUM_COMPUTED_IN_ALL
    assert layer_state[layer_loop.SUM_UPS] == LAYERS * (21 + 22) + 20 + 23
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
            services = model.requested()
            assert request_state[NUM_DONE] < services.size
            await_all(cells, services, request_state[NUM_DONE], request_state[NUMBER], LONG)
    np.testing.assert_array_equal(model.buffers.hidden, model.expected())
    assert model.layer_state[layer_loop.SUM_COMPUTED] == NUM_COMPUTED_IN_ALL
    assert sorted(model.sent[-4:]) == sorted(SENT[-4:])
    assert cells[cell(2, DONE) * INTS_A_CELL] == 2**30


@pytest.mark.parametrize("by_doorbell", [False, True])
@pytest.mark.parametrize("num_logits", [1, TOKENS])
def test_the_head_follows_the_last_layer(by_doorbell: bool, num_logits: int) -> None:
    model, lock = Model(), threading.Lock()

    def answer(service: int) -> None:
        with lock:
            model.answer(service)

    model.begin(num_logits=num_logits)
    if by_doorbell:
        with serving(model, answer):
            assert model.run(new_request_state(2, LONG)) == layer_loop.DONE
    else:
        while reason := model.run(NO_DOORBELLS):
            assert reason == layer_loop.SEND_REQUESTS
            model.answer_all()
        times = model.layer_state[[layer_loop.HEAD_WAITED_NS, layer_loop.HEAD_BUSY_NS]]
        assert times.tolist() == [5000, 7000]
    assert model.sent[-1] == (HEAD_OF, HEAD, LAYERS - 1)  # the layer's word is not written
    expected = model.expected()
    np.testing.assert_array_equal(model.buffers.hidden, expected)
    logits = expected[TOKENS - num_logits :, :VOCAB] * np.float32(3)
    np.testing.assert_array_equal(model.buffers.logits[:num_logits], logits)


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
        assert request_state[NUM_DONE] == len(FFN_OF[1])
        assert model.layer_state[layer_loop.AT_LAYER] == 1
        model.buffers.replies[:, STATUS] = 0
        assert model.run(request_state) == layer_loop.DONE
    np.testing.assert_array_equal(model.buffers.hidden, model.expected())


def test_python_may_compute_the_ffn() -> None:
    """It also says whose partial outputs are added, and counts by itself."""
    model, num_layers = Model(), 0
    model.begin(own_ffn=True)
    while reason := model.run(NO_DOORBELLS):
        if reason == layer_loop.SEND_REQUESTS:
            assert model.requested().tolist() == [ATTENTION_OF[num_layers]]
            model.answer_all()
            continue
        assert reason == layer_loop.COMPUTE
        model.layer_state[layer_loop.REQUESTED] = ATTENTION
        model.buffers.partials[:] = np.nan
        model.buffers.partials[ATTENTION_OF[num_layers]] = 2
        num_layers += 1
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


def test_logits_that_are_not_finite_stop_it_behind_the_last_layer() -> None:
    model = Model()
    model.begin(num_logits=1)
    while (reason := model.run(NO_DOORBELLS)) == layer_loop.SEND_REQUESTS:
        model.answer_all()
        if model.sent[-1][1] == HEAD:
            model.buffers.logits[0, 2] = np.inf
    assert reason == layer_loop.NOT_FINITE
    assert model.layer_state[layer_loop.AT_LAYER] == LAYERS
