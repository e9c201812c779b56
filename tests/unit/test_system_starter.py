"""Systems of a server: where commands find them, and what is left of a start that fails."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.protocol.messages import LoadProgress, SystemConfig
from actors.protocol.options import SystemOptions
from actors.system import System
from jobs.kept import records
from jobs.kept.folder import own_folder
from jobs.serve.plans import ModelPlan
from jobs.serve.starter import SystemStarter
from model.errors import ServiceError
from model.files.locate import DEMO_DIRECTORY
from ui.api.backend import Backend, ServerSettings
from ui.serving import LoadingGate


class Server:
    """As `ServerThread`, without a thread."""

    def __init__(self) -> None:
        self.loading_gate = LoadingGate("demo")
        self.open: list[Any] = []

    def open_own(self, listener: Any, app: Any) -> Any:
        self.open.append(listener)
        return listener

    def close_own(self, listener: Any) -> None:
        self.open.remove(listener)
        listener.close()


class StandIn:
    """A system that has started; it has no processes."""

    def __init__(self) -> None:
        self.has_started = self.has_ended = False
        self.answers: dict[str, Any] = {"describe": CONFIG, "processes": {}}

    def call(self, method: str) -> Any:
        if isinstance(found := self.answers[method], Exception):
            raise found
        return found

    def begin(self, method: str) -> Any:
        raise AssertionError(method)

    def end(self) -> None:
        self.has_ended = True


CONFIG = SystemConfig(str(DEMO_DIRECTORY), context_length=128)
Made = tuple[SystemStarter, Backend, Server, StandIn]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """A starter whose systems start at once, and tell of it; the user's folder is its own."""
    server, system = Server(), StandIn()
    given: Any = server
    plan = ModelPlan("demo", str(DEMO_DIRECTORY), CONFIG, 1)
    starter = SystemStarter(given, "http://here", [plan], SystemOptions())

    def start(config: SystemConfig, on_progress: Callable[[LoadProgress], None]) -> StandIn:
        assert found() == ["demo"]  # commands may wait for it
        system.has_started = True
        on_progress(LoadProgress(0, 0, "loading"))
        return system

    monkeypatch.setattr(System, "start", start)
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        loader: Any = SimpleNamespace()
        yield starter, Backend(None, CONFIG, ServerSettings("demo"), loader), server, system
        for listener in server.open:
            listener.close()


def found() -> list[str]:
    return [one.name for one in records.running(own_folder())]


def test_a_system_is_found_until_it_ends(made: Made) -> None:
    starter, backend, server, system = made
    started = starter.start(backend)
    assert vars(started) is vars(system)
    (record,) = records.running(own_folder())
    assert (record.name, record.url, record.is_kept) == ("demo", "http://here", False)
    assert record.resolved["context_length"] == 128 and len(server.open) == 1
    starter.end(backend, started)
    assert system.has_ended and found() == [] and server.open == []
    assert list(Path(own_folder()).iterdir()) == []


def test_a_server_that_ends_is_found_no_more(made: Made) -> None:
    starter, backend, _, system = made
    starter.start(backend)
    starter.leave()
    starter.leave()
    assert found() == [] and not system.has_ended


def test_nothing_is_left_of_a_start_that_fails(made: Made) -> None:
    starter, backend, server, system = made
    system.answers["describe"] = OSError("the disk is full")
    with pytest.raises(OSError, match="the disk is full"):
        starter.start(backend)
    assert system.has_ended and found() == [] and server.open == []


def test_nothing_starts_any_more_once_it_is_closed(made: Made) -> None:
    starter, backend, server, system = made
    starter.close()
    with pytest.raises(ServiceError, match="the server is being stopped"):
        starter.start(backend)
    assert not system.has_started and found() == [] and server.open == []
