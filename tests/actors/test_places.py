"""Services of several hosts that fail, without Ray: which failure is raised, what is sent again."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from hotcold.actors.exchange.call_exchange import ServiceReply
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.exchange.hosts_exchange import HostsExchange
from hotcold.actors.exchange.replacement import OwnPlace
from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.actors.processes.relay_actor import RelayActor
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import AnswerFailed, RequestError, ServiceLost
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import (
    DONE,
    NUM_REPLY_WORDS,
    OPERATION,
    PING,
    REQUEST,
    SharedBuffers,
    cell,
)

LAYOUT = ArenaLayout(4, 8, 16, 32, 50, 8, 1, 1)


def new_buffers() -> SharedBuffers:
    return LAYOUT.buffers(LAYOUT.new_arena())


class Local:
    """Stands in for the arena's exchange."""

    def __init__(self, failure: HotcoldError | None) -> None:
        self.buffers, self.next_number = new_buffers(), 1
        self.failure = failure
        self.requested: list[int] = []

    def request(self, services: Sequence[int]) -> int:
        self.requested += services
        if self.failure is not None:
            raise self.failure
        return 1


@dataclass
class Far:
    """Stands in for a relay: replies BUSY_NS 7, or fails, when its result is fetched."""

    services: tuple[int, ...]
    failure: HotcoldError | None = None
    fetched: list[Any] = field(default_factory=list)

    def begin(self, method: str, requests: dict[int, Any]) -> dict[int, Any]:
        return requests

    def result(self, requests: dict[int, Any]) -> dict[int, ServiceReply]:
        self.fetched += requests
        if self.failure is not None:
            raise pickle.loads(pickle.dumps(self.failure))  # as it comes from another process
        return {service: ServiceReply(np.full(NUM_REPLY_WORDS, 7), {}) for service in requests}


def request_all(local: Local, *relays: Far) -> HostsExchange:
    exchange = HostsExchange(local, relays)  # type: ignore[arg-type]
    exchange.buffers.requests[:, OPERATION] = PING
    exchange.request([1, 2, 3])
    return exchange


LOST = ServiceLost(2, "the cpu1 service died; start again")
FAILED = AnswerFailed(3, "the cpu2 service failed: MemoryError: no room")


@pytest.mark.parametrize(
    ("near", "far", "farthest", "raised"),
    [
        (ServiceLost(1, "x"), None, None, (ServiceLost, 1)),
        (None, LOST, None, (ServiceLost, 2)),
        (None, LOST, FAILED, (ServiceLost, 2)),
        (None, FAILED, LOST, (ServiceLost, 2)),
        (ServiceLost(1, "x"), LOST, None, (ServiceLost, 1)),
        (AnswerFailed(1, "x"), LOST, None, (ServiceLost, 2)),
        (AnswerFailed(1, "x"), None, FAILED, (AnswerFailed, 1)),
        (None, None, FAILED, (AnswerFailed, 3)),
    ],
)
def test_the_lost_service_is_raised_when_no_service_works_any_more(
    near: HotcoldError | None,
    far: HotcoldError | None,
    farthest: HotcoldError | None,
    raised: tuple[type[Any], int],
) -> None:
    relays = Far((2,), far), Far((3,), farthest)
    with pytest.raises((RequestError, ServiceLost)) as caught:
        request_all(Local(near), *relays)
    error: Any = caught.value
    assert (type(error), error.service) == raised
    lost = [each for each in (near, far, farthest) if isinstance(each, ServiceLost)]
    assert list(error.causes) == [each.service for each in lost] or not lost
    assert [relay.fetched for relay in relays] == [[2], [3]]


def test_a_lost_relay_names_no_service() -> None:
    """Nobody could be put in its place: what is raised is not a ServiceLost."""
    with pytest.raises(ServiceError, match="the relay on x died") as caught:
        request_all(Local(None), Far((2, 3), ServiceError("the relay on x died")))
    assert not isinstance(caught.value, ServiceLost)


def request_and_done(buffers: SharedBuffers, service: int) -> list[int]:
    cells = cell(service, REQUEST), cell(service, DONE)
    return [int(buffers.cells[index * INTS_A_CELL]) for index in cells]


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that was stopped by a signal."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("is_far", [False, True])
def test_a_place_ends_the_old_process_and_withdraws_its_request(
    is_far: bool, stopped: subprocess.Popen[bytes]
) -> None:
    buffers = new_buffers()
    for service in (1, 2):
        buffers.cells[cell(service, REQUEST) * INTS_A_CELL] = 5
        buffers.cells[cell(service, DONE) * INTS_A_CELL] = 4
    if is_far:
        handle = SimpleNamespace(ping=SimpleNamespace(remote=lambda: None))
        relay = RelayActor(["gpu", "cpu0", "cpu1", "cpu2"], [handle] * 4)
        relay._exchange = ArenaExchange(buffers, relay._watch)
        relay.expect(2, stopped.pid)
        relay.end(2)
        with pytest.raises(ServiceLost, match="the cpu1 service died") as caught:
            relay._watch.check([2], 0)
        assert caught.value.service == 2
    else:
        place, process = OwnPlace([], buffers), ServiceProcess(stopped.pid, is_local=True)
        assert place.end(2, process)
        place.expect(2, process)
    assert not psutil.pid_exists(stopped.pid)
    assert request_and_done(buffers, 2) == [0, 0]
    assert request_and_done(buffers, 1) == [5, 4]


def test_a_process_of_another_host_is_not_ended_from_here(
    stopped: subprocess.Popen[bytes],
) -> None:
    """Its number may be that of some other process here."""
    place = OwnPlace([], None)
    assert not place.end(1, ServiceProcess(stopped.pid, is_local=False))
    assert stopped.poll() is None
