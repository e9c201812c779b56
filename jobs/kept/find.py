"""Finds the running system that a command may use, or has one kept for it."""

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
from hotcold.jobs.kept import records
from hotcold.jobs.kept.client import GoneError, KeptSystem
from hotcold.jobs.kept.folder import found_folder, may_be_running, own_folder
from hotcold.jobs.kept.identity import Identity, absolute, identity_of, is_same, model_text
from hotcold.jobs.kept.records import Record
from hotcold.model.current_folder import environment_of_python
from hotcold.model.errors import ServiceError

_POLL_S = 0.05
_MAX_SILENT = 12  # times ten seconds: a keeper imports much before it answers
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
    """The running system of this model and these options, ready; None where a command starts one.

    With a `keep_s` that is not 0 one is started that stays so long after its last request. Says in
    a line which one it is. `is_own`: none but a system of the command's own will do.
    Errors:  HotcoldError of what cannot be started
    """
    if is_own or not (keep_s or may_be_running()):
        return None
    model = model_text(model)
    asked = identity_of(model, options)
    while True:
        found, process = _found(asked), None
        if found is None and keep_s:
            with _Keeper.start(model, options, asked, keep_s) as process:
                if process is not None:
                    return _ready(process.system, keep_s, process, say)
                found = _found(asked)  # another command has been faster
        if found is None:
            return None
        with contextlib.suppress(GoneError):
            return _ready(found, keep_s, None, say)


def _found(asked: Identity) -> tuple[Path, Record] | None:
    folder = found_folder()
    if folder is None:
        return None
    for record in records.running(folder):
        if is_same(asked, record.identity, record.resolved):
            return folder, record
    return None


def _ready(
    found: tuple[Path, Record],
    keep_s: float,
    keeper: _Keeper | None,
    say: Callable[[str], object],
) -> KeptSystem:
    """The system, once it has loaded. Errors: GoneError; ServiceError as the keeper says it."""
    folder, record = found
    system = KeptSystem(folder, record, keep_s if keep_s and record.is_kept else None)
    state = _state(system, keeper)
    if state["status"] != "ready":
        _await(system, keeper)
    record = next(one for one in [*records.running(folder), record] if one.name == record.name)
    system.record = record  # with what is known since it has loaded
    if keeper is not None:
        stay = "until `hotcold stop`" if keep_s < 0 else f"for {keep_s:g} s after its last answer"
        say(f"the system {record.name!r} stays {stay}")
    else:
        whose = f"of hotcold serve at {record.url}" if record.url else "that is kept"
        say(f"using the system {record.name!r} {whose}")
    return system


def _state(system: KeptSystem, keeper: _Keeper | None) -> dict[str, Any]:
    try:
        return system.state()
    except GoneError:
        if keeper is not None:
            raise keeper.failure() from None
        raise


def _await(system: KeptSystem, keeper: _Keeper | None) -> None:
    """Wait until it has loaded, and show how far it is. Errors: as above."""
    from hotcold.actors.protocol.messages import LoadProgress
    from hotcold.jobs.support.loading_bar import loading_bar

    with loading_bar() as show:
        num_silent = 0
        while (state := _state(system, keeper))["status"] != "ready":
            num_silent += state["status"] == "silent"
            if num_silent == _MAX_SILENT:
                name = system.record.name
                raise ServiceError(
                    f"the system {name!r} does not answer; end it with `hotcold stop {name}`, or "
                    "give --own"
                )
            if "progress" in state:
                show(LoadProgress(**state["progress"]))
            if keeper is not None:
                keeper.require_alive()
            time.sleep(_POLL_S)


class _Keeper:
    """The process that holds a system, as the command sees it that has started it."""

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
    ) -> Iterator[_Keeper | None]:
        """A new one, registered; None where a system of this identity is registered meanwhile.

        Its socket is there at once, and whoever connects waits for it.
        Errors:  UsageError, OSError
        """
        folder = own_folder()
        with tempfile.TemporaryFile() as log:
            with records.alone(folder):
                others = records.remove_dead(folder)
                keeper = None
                if not any(is_same(identity, one.identity, one.resolved) for one in others):
                    name = Path(model).stem if Path(model).is_file() else Path(model).name
                    record = Record(name, 0, True, model, "", identity)
                    claimed = records.claim(folder, record)
                    process = _spawn(claimed, model, options, keep_s, log)
                    keeper = _Keeper(process, log, (folder, claimed.record))
                    os.close(claimed.lock)
                    claimed.listener.close()
            yield keeper

    def require_alive(self) -> None:
        """Raise what ended the process, if it has ended."""
        if self._process.poll() is not None:
            raise self.failure()

    def failure(self) -> ServiceError:
        """What ended the process, in its own words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        told = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
        return ServiceError(told[-1] if told else f"the system ended ({' '.join(lines[-1:])})")


def _spawn(
    claimed: records.Claim, model: str, options: SystemOptions, keep_s: float, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start the keeper of a claim, out of reach of this terminal. Errors: OSError."""
    handed = {
        "model": model,
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(absolute(options)).items()
        },
        "keep_s": keep_s,
        "folder": str(claimed.folder),
        "record": asdict(claimed.record),
        "lock": claimed.lock,
        "listener": claimed.listener.fileno(),
    }
    shown = {name: text for name, text in os.environ.items() if name != "HOTCOLD_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hotcold.jobs.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=log,
        cwd="/",
        env={**shown, **environment_of_python()},
        pass_fds=[claimed.lock, claimed.listener.fileno()],
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(handed).encode())
    return process
