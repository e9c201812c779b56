"""Requests that follow another service's: that one rings them, or the driver where it is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import ServiceLost
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import (
    ATTENTION,
    DONE,
    FFN,
    NO_COUNTERS,
    OPERATION,
    REQUEST,
    THEN,
    SharedBuffers,
    cell,
    finish_request,
    next_request,
)

ATTENTION_SERVICE, FIRST, SECOND = 1, 0, 2
ALL = [FIRST, SECOND, ATTENTION_SERVICE]


def new_buffers(operation: int) -> SharedBuffers:
    layout = ArenaLayout(3, 1, 16, 30, 4, 1, 1, 1)
    buffers = layout.buffers(layout.new_arena())
    buffers.requests[:, OPERATION] = FFN
    buffers.requests[ATTENTION_SERVICE, OPERATION] = operation
    buffers.requests[ATTENTION_SERVICE, THEN] = 1 << FIRST | 1 << SECOND
    return buffers


def word(buffers: SharedBuffers, service: int, kind: int) -> int:
    return int(buffers.cells[cell(service, kind) * INTS_A_CELL])


@contextmanager
def serving_once(
    buffers: SharedBuffers, services: Sequence[int], look: Callable[[int, int], None]
) -> Iterator[None]:
    """Each service answers one request, after `look(service, number)`."""

    def serve(service: int) -> None:
        number = next_request(buffers.cells, service, np.int32(0))
        look(service, int(number))
        finish_request(
            buffers.cells, buffers.requests, buffers.replies, NO_COUNTERS, service,
            np.int32(number), 1, 0,
        )  # fmt: skip

    running = [threading.Thread(target=serve, args=(s,), daemon=True) for s in services]
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join(60)
    assert not any(thread.is_alive() for thread in running)


@dataclass
class Watch:
    """Says that `lost` are lost, one at a poll."""

    lost: tuple[int, ...] = ()
    asked: list[list[int]] = field(default_factory=list)
    has_told: threading.Event = field(default_factory=threading.Event)

    def check(self, services: Sequence[int], num_polls: int) -> None:
        self.asked.append(list(services))
        assert num_polls < 600, "nobody answers"
        for service in self.lost:
            if service in services:
                self.has_told.set()
                raise ServiceLost(service, "it died")

    def explain(self, service: int) -> str:
        return "unknown"


def test_the_driver_rings_those_that_follow_a_lost_service() -> None:
    """Else they would wait for ever, and those that were not rung would miss a number."""
    buffers, seen, watch = new_buffers(ATTENTION), [], Watch(lost=(ATTENTION_SERVICE,))
    with (
        serving_once(buffers, [FIRST, SECOND], lambda service, number: seen.append(number)),
        pytest.raises(ServiceLost) as caught,
    ):
        ArenaExchange(buffers, watch, 7).request(ALL)
    assert caught.value.service == ATTENTION_SERVICE
    assert seen == [7, 7] and watch.asked[0] == ALL
    assert [word(buffers, service, DONE) for service in ALL] == [7, 7, 0]


@pytest.mark.parametrize("lost", [(ATTENTION_SERVICE, SECOND), (SECOND, ATTENTION_SERVICE)])
def test_all_that_are_lost_in_one_wait_are_told(
    lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotcold.actors.exchange.doorbell_exchange.POLL_NS", 1_000_000)
    buffers, seen = new_buffers(ATTENTION), []
    with (
        serving_once(buffers, [FIRST], lambda service, number: seen.append(number)),
        pytest.raises(ServiceLost) as caught,
    ):
        ArenaExchange(buffers, Watch(lost), 7).request(ALL)
    assert caught.value.causes == dict.fromkeys(lost, "it died")
    assert seen == [7]
    assert [word(buffers, service, DONE) for service in ALL] == [7, 0, 0]


def test_one_that_is_lost_before_it_is_rung_is_rung_before_the_request_ends() -> None:
    """Afterwards its bell is reset, for the process that takes its place."""
    buffers, watch = new_buffers(ATTENTION), Watch(lost=(SECOND,))

    def look(service: int, number: int) -> None:
        if service == ATTENTION_SERVICE:
            assert watch.has_told.wait(60)

    with (
        serving_once(buffers, [FIRST, ATTENTION_SERVICE], look),
        pytest.raises(ServiceLost) as caught,
    ):
        ArenaExchange(buffers, watch, 7).request(ALL)
    assert caught.value.service == SECOND
    assert [word(buffers, service, REQUEST) for service in ALL] == [7, 7, 7]
    assert [word(buffers, service, DONE) for service in ALL] == [7, 0, 7]
