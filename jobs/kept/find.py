"""Finds the running system that a command may use, or starts a daemon with one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click

from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.kept import registry
from hotcold.jobs.kept.client import GoneError, KeptSystem
from hotcold.jobs.kept.folder import found_folder, may_be_running, own_folder
from hotcold.jobs.kept.identity import (
    EMBEDDED,
    Identity,
    absolute,
    identity_of,
    is_same,
    model_text,
    plain_options,
)
from hotcold.jobs.kept.registry import Record
from hotcold.model import secret_variable
from hotcold.model.current_folder import environment_of_python
from hotcold.model.errors import ServiceError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY

_POLL_S = 0.05
_MAX_SILENT = 12  # times ten seconds: a daemon imports much before it answers
_ERROR = "hotcold: error: "


def say_on_stderr(line: str) -> None:
    """Say a line to the command's user."""
    click.echo(line, err=True)


def find_system(
    model: str | None,
    options: SystemOptions,
    keep_s: float,
    is_own: bool,
    say: Callable[[str], object] = say_on_stderr,
) -> KeptSystem | None:
    """The running system of this model and these options, ready; None: the command starts its own.

    With a `keep_s` other than 0 a daemon is started, whose system stays so long after its last
    request. A line on standard error says which system is used. `is_own`: always None. A `model`
    that is none, but the name of a running system, is that system.
    Errors:  HotcoldError
    """
    if is_own or not (keep_s or may_be_running()):
        return None
    try:
        model = model_text(model)
    except UsageError:
        named = _named(model, options)
        if named is not None:
            with contextlib.suppress(GoneError):
                return _ready(named, keep_s, None, say)
        raise
    asked = identity_of(model, options)
    while True:
        found = _found(asked)
        if found is None and keep_s:
            with _Daemon.start(model, options, asked, keep_s) as daemon:
                if daemon is not None:
                    return _ready(daemon.system, keep_s, daemon, say)
                found = _found(asked)  # another command was faster
        if found is None:
            return None
        with contextlib.suppress(GoneError):
            return _ready(found, keep_s, None, say)


def _named(name: str | None, options: SystemOptions) -> tuple[Path, Record] | None:
    """The running system of that name; options that are left open, or the default, are its own.

    Errors:  UsageError where it is another one than the options ask for
    """
    folder = found_folder()
    if folder is None:
        return None
    for record in registry.running(folder):
        if record.name != name:
            continue
        running = record.identity
        model = str(DEMO_DIRECTORY) if running["model"] == EMBEDDED else running["model"]
        asked, left_open = identity_of(model, options), plain_options(SystemOptions())
        given = {key: value for key, value in asked["options"].items() if value != left_open[key]}
        asked["options"] = {**running["options"], **given}
        if not is_same(asked, running, record.resolved):
            raise UsageError(
                f"the system {name!r} runs with other options, cores or variables, or files were "
                f"changed since; leave the options out, or give its model, {model}"
            )
        return folder, record
    return None


def _found(asked: Identity) -> tuple[Path, Record] | None:
    folder = found_folder()
    if folder is None:
        return None
    for record in registry.running(folder):
        if is_same(asked, record.identity, record.resolved):
            return folder, record
    return None


def _ready(
    found: tuple[Path, Record],
    keep_s: float,
    daemon: _Daemon | None,
    say: Callable[[str], object],
) -> KeptSystem:
    """The system, once it has loaded. Errors: GoneError; ServiceError of the daemon."""
    folder, record = found
    system = KeptSystem(folder, record, keep_s if keep_s and record.is_kept else None)
    state = _state(system, daemon)
    if state["status"] != "ready":
        _await(system, daemon)
    record = next(one for one in [*registry.running(folder), record] if one.name == record.name)
    system.record = record  # complete since it has loaded
    if daemon is not None:
        stay = "until `hotcold stop`" if keep_s < 0 else f"for {keep_s:g} s after its last answer"
        say(f"the system {record.name!r} stays {stay}")
    else:
        whose = f"of hotcold serve at {record.url}" if record.url else "that is kept"
        say(f"using the system {record.name!r} {whose}")
    return system


def _state(system: KeptSystem, daemon: _Daemon | None) -> dict[str, Any]:
    try:
        return system.state()
    except GoneError:
        if daemon is not None:
            raise daemon.failure() from None
        raise


def _await(system: KeptSystem, daemon: _Daemon | None) -> None:
    """Wait until it has loaded, with a progress bar. Errors: those of `_ready`."""
    from hotcold.actors.protocol.messages import LoadProgress
    from hotcold.jobs.support.console import loading_bar

    with loading_bar() as show:
        num_silent = 0
        while (state := _state(system, daemon))["status"] != "ready":
            num_silent += state["status"] == "silent"
            if num_silent == _MAX_SILENT:
                name = system.record.name
                raise ServiceError(
                    f"the system {name!r} does not answer; end it with `hotcold stop {name}`, or "
                    "give --own"
                )
            if "progress" in state:
                show(LoadProgress(**state["progress"]))
            if daemon is not None:
                daemon.require_alive()
            time.sleep(_POLL_S)


class _Daemon:
    """The daemon's process, for the command that started it."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: IO[bytes], system: tuple[Path, Record]
    ) -> None:
        self.system = system
        self._process = process
        self._log = log

    @staticmethod
    @contextmanager
    def start(
        model: str, options: SystemOptions, identity: Identity, keep_s: float
    ) -> Iterator[_Daemon | None]:
        """A new one, registered; None where a system of this identity was registered meanwhile.

        Its socket exists at once; clients that connect wait for it. Errors: UsageError, OSError.
        """
        folder = own_folder()
        with tempfile.TemporaryFile() as log:
            with registry.locked(folder):
                others = registry.remove_dead(folder)
                daemon = None
                if not any(is_same(identity, one.identity, one.resolved) for one in others):
                    name = Path(model).stem if Path(model).is_file() else Path(model).name
                    record = Record(name, 0, True, model, "", identity)
                    registration = registry.register(folder, record)
                    process = _spawn(registration, model, options, keep_s, log)
                    daemon = _Daemon(process, log, (folder, registration.record))
                    os.close(registration.lock)
                    registration.listener.close()
            yield daemon

    def require_alive(self) -> None:
        """Raise `failure` if the process has ended."""
        if self._process.poll() is not None:
            raise self.failure()

    def failure(self) -> ServiceError:
        """The last error that the process printed, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
        return ServiceError(errors[-1] if errors else f"the system ended ({' '.join(lines[-1:])})")


def _spawn(
    registration: registry.Registration,
    model: str,
    options: SystemOptions,
    keep_s: float,
    log: IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start a daemon, detached from this terminal. Errors: OSError."""
    handed = {
        "model": model,
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(absolute(options)).items()
        },
        "keep_s": keep_s,
        "folder": str(registration.folder),
        "record": asdict(registration.record),
        "lock": registration.lock,
        "listener": registration.listener.fileno(),
    }
    shown = {name: text for name, text in os.environ.items() if name not in secret_variable.NAMES}
    process = subprocess.Popen(
        [sys.executable, "-m", "hotcold.jobs.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=log,
        cwd="/",
        env={**shown, **environment_of_python()},
        pass_fds=[registration.lock, registration.listener.fileno()],
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(handed).encode())
    return process
