"""Systems of a server: where commands find them, and what is left of a start that fails."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.actors.protocol.messages import (
    LoadProgress,
    SystemConfig,
)
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.system import System
from hotcold.jobs.running import registry
from hotcold.jobs.running.identity import identity_of
from hotcold.jobs.running.registry import Registration
from hotcold.jobs.running.served import ModelPlan, SystemStarter
from hotcold.model.errors import ServiceError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.model_loading import Need


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
Made = tuple[SystemStarter, Backend, StandIn]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """A starter whose systems start at once, and tell of it; the user's folder is its own."""
    system = StandIn()
    plan = ModelPlan("demo", str(DEMO_DIRECTORY), CONFIG, Need(1))

    def start(config: SystemConfig, on_progress: Callable[[LoadProgress], None]) -> StandIn:
        assert found() == ["demo"]  # commands may wait for it
        system.has_started = True
        on_progress(LoadProgress(0, 0, "loading"))
        return system

    monkeypatch.setattr(System, "start", start)
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        loader: Any = SimpleNamespace()
        registration = Registration("demo", "http://here")
        starter = SystemStarter(registration, [plan], SystemOptions())
        yield starter, Backend(CONFIG, ServerSettings("demo"), loader), system
        registration.listener.close()


def found() -> list[str]:
    return [one.name for one in registry.running()]


def test_nothing_is_left_of_a_start_that_fails(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has started; while its neurons are packed; once the server is to end."""
    starter, backend, system = made
    system.answers["describe"] = OSError("the disk is full")
    with pytest.raises(OSError, match="the disk is full"):
        starter.start(backend)
    assert system.has_ended and found() == []
    system.has_started = False

    def fail(config: SystemConfig) -> None:
        assert config is CONFIG
        raise ServiceError("no room for the bundles")

    monkeypatch.setattr("hotcold.jobs.running.served.require_bundles", fail)
    with pytest.raises(ServiceError, match="no room for the bundles"):
        starter.start(backend)
    starter.close()
    with pytest.raises(ServiceError, match="the server is being stopped"):
        starter.start(backend)
    assert not system.has_started and found() == []


def test_what_loading_writes_beside_a_model_is_part_of_what_it_is(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that looks at the files then finds the system that has written them."""
    starter, backend, _ = made
    start: Any = System.start

    def writing(config: SystemConfig, on_progress: Callable[[LoadProgress], None]) -> Any:
        (tmp_path / "written").touch()
        return start(config, on_progress)

    monkeypatch.setattr(System, "start", writing)
    starter._plans["demo"] = replace(starter._plans["demo"], model=str(tmp_path))
    starter.start(backend)
    (record,) = registry.running()
    asked = identity_of(str(tmp_path), SystemOptions())
    assert record.identity == json.loads(json.dumps(asked))
    assert [name for name, *_ in record.identity["files"]] == ["written"]
