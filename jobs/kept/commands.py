"""`hotcold ps` and `hotcold stop`: which systems run on this machine, and ending them."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

from hotcold.jobs.kept import registry
from hotcold.jobs.kept.client import GoneError, KeptSystem
from hotcold.jobs.kept.folder import found_folder, own_folder, systems_folder
from hotcold.jobs.support.console import json_option, print_json
from hotcold.model.byte_sizes import binary_text
from hotcold.model.errors import ServiceError, UsageError

_POLL_S = 0.05
_TIMEOUT_S = 60.0  # for running requests
_ENDING_S = 15.0
_HEADS = ("NAME", "MODEL", "MODE", "MEMORY", "TOKENS/S", "IDLE", "STAYS", "AT")


@click.command()
@json_option
def ps(as_json: bool) -> None:
    """List the running systems of this user: those that are kept, and those of `hotcold serve`.

    MEMORY is that of all their processes, TOKENS/S of the last answer; IDLE is the time since the
    last request, STAYS how long a system goes on if no other comes, AT where one is served.
    """
    found = [_state(folder, record) for folder, record in running_systems()]
    if not as_json or found:
        rows = [_HEADS, *(_row(state) for state in found)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            click.echo("  ".join(cells).rstrip())
    if as_json:
        print_json({"systems": found})


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
def stop(names: tuple[str, ...]) -> None:
    """End the running systems of these NAMEs (see `hotcold ps`); all that are kept without one.

    Requests that run are answered first. `python -m hotcold.jobs.stop` ends one of a Ray cluster.
    """
    running = running_systems()
    chosen = [system_named(name, running) for name in dict.fromkeys(names)]
    if not names:
        chosen = [one for one in running if one[1].is_kept]
    with ExitStack() as stack:
        processes = [_Process(folder, _with_pid(folder, record)) for folder, record in chosen]
        for process in processes:
            stack.callback(process.close)
            process.signal(signal.SIGTERM)
        for process in processes:
            process.await_end()
            click.echo(f"the system {process.name!r} has ended")
    if not chosen:
        click.echo("no system is kept")


def running_systems() -> list[tuple[Path, registry.Record]]:
    """The systems of this user. Errors: UsageError for a folder that is not this user's alone."""
    if systems_folder().is_symlink() or systems_folder().exists():
        own_folder()
    folder = found_folder()
    return [] if folder is None else [(folder, one) for one in registry.running(folder)]


def system_named(
    name: str, running: list[tuple[Path, registry.Record]]
) -> tuple[Path, registry.Record]:
    """The running system of that name. Errors: UsageError."""
    for one in running:
        if one[1].name == name:
            return one
    names = ", ".join(record.name for _, record in running)
    others = f"these do: {names}" if names else "none does"
    raise UsageError(
        f"no system named {name!r} is running; {others} (those of a Ray cluster are not listed)"
    )


def _state(folder: Path, record: registry.Record) -> dict[str, Any]:
    """A system's own state, or that it does not answer."""
    known = {
        "name": record.name,
        "pid": record.pid,
        "model": record.model,
        "url": record.url,
        "kept": record.is_kept,
    }
    try:
        return {**known, **KeptSystem(folder, record).state()}
    except GoneError:
        return {**known, "status": "silent"}


def _row(state: dict[str, Any]) -> tuple[str, ...]:
    name, model = state["name"], Path(state["model"]).name if state["kept"] else state["model"]
    if state["status"] != "ready":
        return (name, model, state["status"], "", "", "", "", state["url"])
    left_s = state["left_s"]
    until = "until stopped" if left_s is None else f"{_time(left_s)} more"
    busy = "busy" if state["num_active"] else _time(state["idle_s"])
    memory = binary_text(state["memory_bytes"])
    speed = f"{state['tokens_per_s']:.1f}" if state["tokens_per_s"] else "-"
    return (name, model, state["mode"], memory, speed, busy, until, state["url"])


def _time(seconds: float) -> str:
    """A duration for people."""
    for unit_s, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _with_pid(folder: Path, record: registry.Record) -> registry.Record:
    """The record with the process that holds the system, once it is known; 0 if it has ended.

    Errors:  ServiceError
    """
    deadline = time.monotonic() + _ENDING_S
    while time.monotonic() < deadline:
        if record.pid:
            return record
        time.sleep(_POLL_S)
        same = [one for one in registry.running(folder) if one.name == record.name]
        if not same:
            return record
        record = same[0]
    raise ServiceError(f"the system {record.name!r} does not start; try again")


class _Process:
    """The process that holds a system. Signals reach it, never a later process with its pid."""

    def __init__(self, folder: Path, record: registry.Record) -> None:
        """Errors: ServiceError where the system runs, and its process is not visible here."""
        self.name, self._folder, self._pid = record.name, folder, record.pid
        self._descriptor: int | None = None
        if not record.pid:
            return
        try:
            self._descriptor = os.pidfd_open(record.pid)
            is_same = record.started in (0, registry.start_of(record.pid))
        except (ProcessLookupError, FileNotFoundError):
            is_same = False
        except OSError as problem:
            raise ServiceError(
                f"the system {record.name!r} cannot be ended from here ({problem.strerror}); end "
                f"its process, {record.pid}"
            ) from None
        # A system's process locks its record: if it is locked, the pid was that process's.
        if not registry.is_running(folder, record):
            self.close()
            self._descriptor = None
        elif not is_same:
            raise ServiceError(
                f"the system {record.name!r} runs where its process cannot be seen from here, such "
                "as in a container; end it there"
            )

    def signal(self, number: int) -> None:
        """Send it, unless the process has ended."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def await_end(self) -> None:
        """Wait until the process is gone; one that does not end is killed. Errors: ServiceError"""
        for timeout_s, number in (
            (_TIMEOUT_S, signal.SIGTERM),  # a second one cancels running requests
            (_ENDING_S, signal.SIGKILL),
            (_ENDING_S, 0),
        ):
            if self._descriptor is None or _has_ended(self._descriptor, timeout_s):
                registry.running(self._folder)  # removes the record of a killed one
                return
            self.signal(number)
        raise ServiceError(
            f"the system {self.name!r} does not end; end its process: kill -9 {self._pid}"
        )

    def close(self) -> None:
        """Close the process's descriptor; may be repeated."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _has_ended(process: int, wait_s: float) -> bool:
    """Whether a process, by its descriptor, ends within `wait_s`."""
    ended = select.poll()
    ended.register(process, select.POLLIN)
    return bool(ended.poll(1e3 * wait_s))
