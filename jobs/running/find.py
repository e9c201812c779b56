"""Finds the running system that a command may use, or starts a server with one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import click

from hotcold.actors.protocol.options import OPTIONS, SystemOptions
from hotcold.jobs.running.client import SILENT, Client, GoneError
from hotcold.jobs.running.identity import (
    EMBEDDED,
    Identity,
    absolute,
    identity_of,
    is_same,
    model_text,
    plain_options,
)
from hotcold.jobs.running.registry import Record, may_be_running, own_folder, running
from hotcold.model import secret_variable
from hotcold.model.current_folder import environment_of_python
from hotcold.model.errors import ServiceError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY

_POLL_S = 0.05
_MAX_SILENT = 12  # times ten seconds: a server imports much before it answers
_LONGEST_S = 1e8
_ERROR = "hotcold: error: "
Say = Callable[[str], object]
say_on_stderr: Say = partial(click.echo, err=True)  # to the command's user


def find_system(
    model: str | None,
    options: SystemOptions,
    keep_s: float,
    is_own: bool,
    say: Say = say_on_stderr,
    attends: bool = False,
) -> Client | None:
    """The running system of this model and these options, ready; None: the command starts its own.

    With a `keep_s` other than 0 a server is started, whose system stays so long after its last
    request. A line on standard error says which system is used. `is_own`: always None. A `model`
    that is none, but the name of a running system, is that system. `attends`: it does not end for
    want of requests until the client's `close`.
    Errors:  HotcoldError
    """
    if is_own or not (keep_s or may_be_running()):
        return None
    try:
        model = model_text(model)
    except UsageError:
        found = _named(model, options)
        if found is not None:
            with contextlib.suppress(GoneError):
                return _ready(found, keep_s, None, say, attends)
        raise
    asked = identity_of(model, options)
    while True:
        same = (one for one in running() if is_same(asked, one.identity, one.resolved))
        found = next(same, None)
        if found is None and keep_s:
            with _Server.start(model, options, keep_s) as server:
                return _ready(server.record(asked), keep_s, server, say, attends)
        if found is None:
            return None
        with contextlib.suppress(GoneError):
            return _ready(found, keep_s, None, say, attends)


def _named(name: str | None, options: SystemOptions) -> Record | None:
    """The running system of that name; options that are left open, or the default, are its own.

    Errors:  UsageError where it is another one than the options ask for
    """
    for record in running():
        if record.name != name:
            continue
        found = record.identity
        model = str(DEMO_DIRECTORY) if found["model"] == EMBEDDED else found["model"]
        asked, left_open = identity_of(model, options), plain_options(SystemOptions())
        given = {key: value for key, value in asked["options"].items() if value != left_open[key]}
        asked["options"] = {**found["options"], **given}
        if not is_same(asked, found, record.resolved):
            raise UsageError(
                f"the system {name!r} runs with other options, cores or variables, or files were "
                f"changed since; leave the options out, or give its model, {model}"
            )
        return record
    return None


def _ready(
    record: Record, keep_s: float, server: _Server | None, say: Say, attends: bool
) -> Client:
    """The system, once it has loaded. Errors: GoneError; ServiceError of the server."""
    system = Client(record, keep_s if keep_s and record.is_kept else None)
    state = _state(system, server)
    if state["status"] != "ready":
        _await(system, server)
    # Complete since it has loaded.
    system.record = next(one for one in [*running(), record] if one.name == record.name)
    if attends:
        system.attend()
    if server is not None and server.pid == record.pid:
        stay = "until `hotcold stop`" if keep_s < 0 else f"for {keep_s:g} s after its last answer"
        say(f"the system {record.name!r} stays {stay}")
    else:
        whose = f"of hotcold serve at {record.url}" if record.url else "that is kept"
        say(f"using the system {record.name!r} {whose}")
    return system


def _state(system: Client, server: _Server | None) -> dict[str, Any]:
    """Its state. Errors: GoneError, also of a model that was given up; those of the server."""
    try:
        state = system.state()
        if state["status"] == "not loaded":
            raise GoneError(f"the system {system.record.name!r} was given up")
        return state
    except GoneError:
        if server is not None:
            raise server.failure() from None
        raise


def _await(system: Client, server: _Server | None) -> None:
    """Wait until it has loaded, with a progress bar. Errors: those of `_ready`."""
    from hotcold.actors.protocol.messages import LoadProgress
    from hotcold.jobs.support.console import loading_bar

    with loading_bar() as show:
        num_silent = 0
        while (state := _state(system, server))["status"] != "ready":
            num_silent += state["status"] == SILENT
            if num_silent == _MAX_SILENT:
                raise ServiceError(f"{system.silent()}, or give --own")
            if state.get("progress"):
                show(LoadProgress(**state["progress"]))
            time.sleep(_POLL_S)


class _Server:
    """A `hotcold serve` that this command has started for its user's commands alone."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log

    @staticmethod
    @contextmanager
    def start(model: str, options: SystemOptions, keep_s: float) -> Iterator[_Server]:
        """A new one, detached from this terminal. Errors: UsageError, OSError."""
        own_folder()  # for its errors
        given = [
            f"{OPTIONS[name].flag}={_text(value)}"
            for name, value in vars(absolute(options)).items()
            if value != OPTIONS[name].default
        ]
        given.append(f"--stay={min(keep_s, _LONGEST_S):f}")
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hotcold.jobs.cli", "serve", model, *given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env=_environment(),
                start_new_session=True,
            )
            yield _Server(process, log)

    def record(self, asked: Identity) -> Record:
        """Its system, or that of another server that was faster. Errors: ServiceError."""
        while True:
            has_ended = self._process.poll() is not None
            for record in running():
                is_own = record.pid == self.pid
                if is_own or is_same(asked, record.identity, record.resolved):
                    return record
            if has_ended:
                raise self.failure()
            time.sleep(_POLL_S)

    def failure(self) -> ServiceError:
        """The last error that the process printed, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
        return ServiceError(errors[-1] if errors else f"the system ended ({' '.join(lines[-1:])})")


def _text(value: Any) -> str:
    """An option's value on a command line."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _environment() -> dict[str, str]:
    """This process's, without keys and without settings, which its options hold already."""
    from hotcold.jobs.support.settings import OTHER_VARIABLES

    shown = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("HOTCOLD_") or name in OTHER_VARIABLES
    }
    for name in secret_variable.NAMES:
        shown.pop(name, None)
    return {**shown, **environment_of_python(), "HOTCOLD_CONFIG": ""}
