"""What asks a kept system over its socket: answers, cancelled ones, systems that end meanwhile."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.actors.protocol.messages import GenerateRequest, TokenEvent, TokenLogprob
from hotcold.jobs.chat.conversation import Conversation, Facts
from hotcold.jobs.kept import client as client_module
from hotcold.jobs.kept.client import GoneError, KeptSystem
from hotcold.jobs.kept.registry import socket_path
from hotcold.model.errors import ServiceError
from hotcold.model.sampling import SamplingParams
from hotcold.ui import control_api
from hotcold.ui.api import sse
from hotcold.ui.control_api import create_control_app
from tests.unit.half_a_request import answer_to_half
from tests.unit.test_kept_systems import record

_TIMEOUT_S = 30.0


def take_request(client: socket.socket) -> None:
    """Read one to its end: the body comes behind the head."""
    with client.makefile("rb") as file:
        head = list(iter(file.readline, b"\r\n"))
        (length,) = (line.split()[1] for line in head if line.startswith(b"Content-Length"))
        file.read(int(length))


@contextmanager
def accepting(folder: Path, answer: bytes) -> Iterator[tuple[KeptSystem, threading.Event]]:
    """A system that takes requests, and answers only so much; the event says it has."""
    path = Path(os.path.relpath(socket_path(folder, "model")))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        has_answered = threading.Event()

        def take() -> None:
            with listener.accept()[0] as client:
                take_request(client)
                client.sendall(answer)
                has_answered.set()
                while client.recv(1 << 16):
                    pass

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield KeptSystem(path.parent, record("model")), has_answered
        thread.join(_TIMEOUT_S)
        assert not thread.is_alive()


_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_PIECE = b'{"text": "a", "num_tokens": 1, "token_ids": [5]}\n'
_FIRST = b"%x\r\n%s\r\n" % (len(_PIECE), _PIECE)


def _closing(head: bytes) -> bytes:
    return head.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (b"", []),
        (b"HTTP/1.1 2", []),
        (_HEAD, []),
        (_HEAD + _FIRST, ["a"]),
        (_closing(_HEAD) + _FIRST, ["a"]),
        (_HEAD + _FIRST + _FIRST[:9], ["a"]),
    ],
)
def test_a_cancelled_request_is_no_lost_system(
    tmp_path: Path, answer: bytes, texts: list[str]
) -> None:
    """However far its answer is; where the system ends, the same is an error."""
    request = GenerateRequest(SamplingParams(), prompt="p", request_id="one")
    with accepting(tmp_path, answer) as (system, has_answered):

        def cancel() -> None:
            has_answered.wait(_TIMEOUT_S)
            system.cancel("one")

        threading.Thread(target=cancel).start()
        assert [event.text for event in system.generate(request)] == texts


def test_an_event_comes_whole_over_the_socket() -> None:
    scored = TokenLogprob(5, -0.5, ((5, -0.5), (7, -1.5)))
    event = TokenEvent("\u2028a", None, 2, (scored,), (TokenLogprob(3, None),), (5, 6), 11)
    assert client_module._event(json.loads(sse.line(control_api._line(event)))) == event


def test_a_request_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    """The thread that is to send it may come later than what cancels it."""
    request = GenerateRequest(SamplingParams(), prompt="p", request_id="one")
    with accepting(tmp_path, _HEAD + _FIRST) as (system, has_answered):
        system.cancel("one")
        assert list(system.generate(request)) == []
        assert not has_answered.is_set()
        later = system.generate(replace(request, request_id="two"))
        assert next(later).text == "a"
        system.cancel("two")
        assert list(later) == []


def test_a_request_is_cancelled_while_it_waits_for_its_connection(tmp_path: Path) -> None:
    """A system that is stopped, or too busy, accepts nobody."""
    request = GenerateRequest(SamplingParams(), prompt="p", request_id="one")
    path = Path(os.path.relpath(socket_path(tmp_path, "model")))
    system = KeptSystem(path.parent, record("model"))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        found: list[Any] = []
        reading = threading.Thread(target=lambda: found.append(list(system.generate(request))))
        reading.start()
        end = time.monotonic() + _TIMEOUT_S
        while not (connection := system._running.get("one")) or connection.sock is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        system.cancel("one")
        reading.join(_TIMEOUT_S)
        assert not reading.is_alive() and found == [[]]


def test_a_conversation_stays_where_its_first_token_was_not_waited_for(tmp_path: Path) -> None:
    """Ctrl-C, while the system computes the prompt."""
    with accepting(tmp_path, b"") as (system, has_asked):
        talk = Conversation(system, Facts("m", "exact", "cpu", 128), SamplingParams())
        name = talk.begin()

        def stop() -> None:
            has_asked.wait(_TIMEOUT_S)
            system.cancel(name)

        threading.Thread(target=stop).start()
        talk.ask("why?", lambda event: None)
    assert [one["content"] for one in talk.messages] == ["why?", ""]


@pytest.mark.parametrize(("answer", "kind"), [(b"", GoneError), (_HEAD + _FIRST, ServiceError)])
def test_a_system_that_ends_is_told_of(
    tmp_path: Path, answer: bytes, kind: type[ServiceError]
) -> None:
    """Before its first event another may answer."""
    path = Path(os.path.relpath(socket_path(tmp_path, "model")))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def end() -> None:
            with listener.accept()[0] as client:
                take_request(client)
                client.sendall(answer)

        thread = threading.Thread(target=end)
        thread.start()
        system = KeptSystem(path.parent, record("model"))
        with pytest.raises(ServiceError, match="the system 'model' has ended") as raised:
            list(system.generate(GenerateRequest(SamplingParams(), prompt="p", request_id="one")))
        assert type(raised.value) is kind
        thread.join()


def test_who_cancels_while_a_request_is_sent_breaks_nothing() -> None:
    """Half of its body has come; no error is logged."""
    app = create_control_app(SimpleNamespace(), SimpleNamespace(), {})  # type: ignore[arg-type]
    assert answer_to_half(app, "/own/generate", b'{"req') == 499
