"""A running system over its server's Unix socket: answers, cancelled ones, systems that end."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import hotcold
from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Generation,
    Grammar,
    TokenEvent,
    TokenLogprob,
)
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.protocol.wire import as_line, event_of, event_values
from hotcold.jobs.chat.conversation import Conversation, Facts
from hotcold.jobs.running.client import Client, GoneError
from hotcold.jobs.running.registry import Record
from hotcold.model.errors import HotcoldError, PromptError, ServiceError, UsageError
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.connections import ConnectionLimits
from hotcold.ui.server_thread import LoadingGate, ServerThread
from hotcold.ui.system_routes import SystemRoutes
from tests.unit.test_served_models import House, house

_TIMEOUT_S = 30.0
ASKED = GenerateRequest(SamplingParams(), prompt="p", request_id="one")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the socket of the system "model" is, or is to be."""
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        Path(folder, "hotcold").mkdir(mode=0o700)
        yield Path(folder, "hotcold", "model.sock")


def client() -> Client:
    return Client(Record("model", 1, socket="model.sock", model="a"))


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        yield listener


@contextmanager
def accepting(
    path: Path, answer: bytes, stays: bool = True
) -> Iterator[tuple[Client, threading.Event]]:
    """A system that takes a request, and answers only so much; the event says it has."""
    with listening(path) as listener:
        has_answered = threading.Event()

        def take() -> None:
            with listener.accept()[0] as one:
                take_request(one)
                one.sendall(answer)
                has_answered.set()
                while stays and one.recv(1 << 16):
                    pass

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield client(), has_answered
        thread.join(_TIMEOUT_S)
        assert not thread.is_alive()


def take_request(client: socket.socket) -> None:
    """Read one to its end: the body comes behind the head."""
    with client.makefile("rb") as file:
        head = list(iter(file.readline, b"\r\n"))
        (length,) = (line.split()[1] for line in head if line.startswith(b"Content-Length"))
        file.read(int(length))


_HEAD = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
    b"Hotcold-Version: " + hotcold.__version__.encode() + b"\r\n\r\n"
)
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
def test_a_cancelled_request_is_no_lost_system(path: Path, answer: bytes, texts: list[str]) -> None:
    """However far its answer is; where the system ends, the same is an error."""
    with accepting(path, answer) as (system, has_answered):

        def cancel() -> None:
            has_answered.wait(_TIMEOUT_S)
            system.cancel("one")

        threading.Thread(target=cancel).start()
        assert [event.text for event in system.generate(ASKED)] == texts


def test_an_event_keeps_every_bit() -> None:
    scored = TokenLogprob(5, -0.1, ((5, -0.1), (7, -float("inf"))), 3)
    drawn = Generation("a", [5, 6], "stop", 3, 0.1, 1 / 3, embedding=[1 / 3], reads={"a": 0.1})
    first = (TokenLogprob(3, None),)
    for event in (
        TokenEvent(
            "\u2028a\ud800", None, 2, (scored,), first, (5, 6), 11, (("mark", 1), ("said", 1)), ""
        ),
        TokenEvent("", drawn),
    ):
        assert event_of(json.loads(as_line(event_values(event)))) == event


def test_a_request_is_cancelled_before_it_begins(path: Path) -> None:
    """The thread that is to send it may come later than what cancels it."""
    with accepting(path, _HEAD + _FIRST) as (system, has_answered):
        first, later = system.generate(ASKED), system.generate(replace(ASKED, request_id="two"))
        system.cancel("one")
        assert list(first) == [] and not has_answered.is_set()
        assert next(later).text == "a"
        system.cancel("two")
        assert list(later) == []


def test_a_conversation_stays_where_its_first_token_was_not_waited_for(path: Path) -> None:
    """Ctrl-C, while the system computes the prompt."""
    with accepting(path, b"") as (system, has_asked):
        talk = Conversation(system, Facts("m", "exact", "cpu", 128), SamplingParams())
        name = talk.begin()

        def stop() -> None:
            has_asked.wait(_TIMEOUT_S)
            system.cancel(name)

        threading.Thread(target=stop).start()
        talk.ask("why?", lambda event: None)
    assert [one["content"] for one in talk.messages] == ["why?", ""]


@pytest.mark.parametrize(("answer", "kind"), [(b"", GoneError), (_HEAD + _FIRST, ServiceError)])
def test_a_system_that_ends_is_told_of(path: Path, answer: bytes, kind: type[ServiceError]) -> None:
    """Before its first event another may answer."""
    with (
        accepting(path, answer, stays=False) as (system, _),
        pytest.raises(ServiceError, match="the system 'model' has ended") as raised,
    ):
        list(system.generate(ASKED))
    assert type(raised.value) is kind


_ANSWER = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s"
_NOT_FOUND = b'{"error": {"message": "Not Found", "type": "invalid_request_error", "code": null}}'


@pytest.mark.parametrize(
    "answer",
    [
        _ANSWER % (b"404 Not Found", len(_NOT_FOUND), b"", _NOT_FOUND),
        _ANSWER % (b"404 Not Found", 22, b"", b'{"detail":"Not Found"}'),
        _ANSWER % (b"200 OK", 3, b"Hotcold-Version: 0.0.1\r\n", b"{}\n"),
    ],
)
def test_another_version_is_told_in_a_line(path: Path, answer: bytes) -> None:
    with (
        accepting(path, answer, stays=False) as (system, _),
        pytest.raises(ServiceError, match=r"'model' is of another version.*`hotcold stop model`"),
    ):
        list(system.generate(ASKED))


class Server:
    """One of a model "a" that is loaded and answers at once, at a port and at the socket."""

    def __init__(self, path: Path, keep_s: float | None = 60.0) -> None:
        self.house = House(1, names="a")
        self.backend = self.house.of["a"]
        self.system: Any = self.house.start(self.backend)
        storage = NeuronStorage("bundles é", 1 << 40, True, "signs", 7, 1 << 41)
        self.backend.config = config = replace(
            self.backend.config, storage=storage, hosts=("10.0.0.1", "10.0.0.2")
        )
        load = self.system.begin
        self.changed: list[Any] = []
        self.calls: dict[str, Any] = {"describe": config, "processes": {}}
        self.system.call = lambda method, *given: self.calls[method]
        self.system.begin = load
        self.routes = SystemRoutes(
            ServedModels([self.backend]), keep_s, lambda *change: self.changed.append(change)
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        own = socket.socket(socket.AF_UNIX)
        own.bind(str(path))
        own.listen()
        gate = LoadingGate("a")
        self.thread = ServerThread(
            self.listener, gate, (), True, 1 << 20, ConnectionLimits(), own=own
        )
        self.backend.attach(self.system)
        self.thread.use(create_app(ServedModels([self.backend]), None, self.routes))


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    made = Server(path)
    yield made
    made.thread.stop()


def test_an_answer_over_the_socket(server: Server) -> None:
    system = Client(client().record, keep_s=5.0)
    events = list(system.generate(replace(ASKED, prompt=None, prompt_ids=[1, 2])))
    assert [event.text for event in events] == ["a"] and events[0].result is not None
    assert (events[0].result.ids, server.routes.keep_s) == ([7], 5.0)
    with pytest.raises(PromptError, match="99999 is not in the vocabulary"):
        list(system.generate(replace(ASKED, prompt=None, prompt_ids=[99999])))
    with pytest.raises(PromptError, match="no valid Unicode"):
        list(system.generate(replace(ASKED, prompt="\ud800")))
    for wrong, told in (
        (replace(ASKED, prompt_ids=[1]), "give one of prompt, messages and prompt_ids"),
        (replace(ASKED, prompt=None), "give one of prompt, messages and prompt_ids"),
        (replace(ASKED, prompt=7), "prompt"),  # type: ignore[arg-type]
    ):
        with pytest.raises(HotcoldError, match=told):
            list(system.generate(wrong))


def test_a_field_that_is_not_known_is_refused(server: Server, path: Path) -> None:
    """One that a later version has changes the answer."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
        for where in ((), ("sampling",), ("grammar",)):
            asked = asdict(replace(ASKED, grammar=Grammar("regex", "a")))
            place: Any = asked
            for name in where:
                place = place[name]
            place["later"] = 1
            url = "http://localhost/v1/hotcold/generate"
            answer = http.post(url, json={"request": asked})
            assert answer.status_code == 400 and "'later' is no field" in answer.text


def test_who_comes_by_the_port_finds_no_such_route(server: Server) -> None:
    url = f"http://127.0.0.1:{server.listener.getsockname()[1]}"
    for path in ("generate", "scale"):
        assert httpx.post(f"{url}/v1/hotcold/{path}", json={}).status_code == 404
    for path in ("state", "telemetry"):
        assert httpx.get(f"{url}/v1/hotcold/{path}").status_code == 404
    assert httpx.get(f"{url}/v1/models").status_code == 200


@house(1, names="a")
async def test_who_has_left_finds_no_such_route_at_a_port(house: House) -> None:
    """Its address is not known any more."""
    left: Any = None
    app = create_app(house.models, None, SystemRoutes(house.models))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app, client=left)) as http:
        for place, status in (("localhost:8000", 404), ("localhost", 200)):
            assert (await http.get(f"http://{place}/v1/hotcold/state")).status_code == status


def test_state_and_scale(server: Server) -> None:
    system = client()
    found = system.state(memory="true")
    assert (found["status"], found["mode"]) == ("ready", server.backend.config.mode)
    assert found["memory_bytes"] > 1 << 20 and 0 < found["left_s"] <= 60
    assert system.config == server.backend.config and not system.is_compiling()
    after = replace(server.backend.config, num_cpu_actors=2)
    server.calls["scale"] = after
    assert system.scale(2)["num_cpu_actors"] == 2
    assert server.changed == [(server.backend, after)]
    with pytest.raises(UsageError, match="num_cpu_actors"):
        system.scale(0)
    server.backend.detach()
    assert system.state()["status"] == "not loaded"
    with pytest.raises(ServiceError, match="not loaded now"):
        system.telemetry()


def test_who_attends_holds_it(server: Server) -> None:
    """Also for longer than any client may keep a server waiting."""
    server.backend.used_at = time.monotonic() - 100
    assert server.routes.left_s == 0.0
    with closing(client().attend()) as system:
        assert system.facts["status"] == "ready" and server.backend.num_attending == 1
        assert server.routes.left_s == 60.0
    end = time.monotonic() + _TIMEOUT_S
    while server.backend.num_attending:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert 50.0 < (server.routes.left_s or 0.0) <= 60.0
