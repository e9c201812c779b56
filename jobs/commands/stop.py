"""`hotcold stop`: ends systems that run on this machine."""

from __future__ import annotations

import os
import select
import signal
from contextlib import ExitStack, suppress

import click

from hotcold.jobs.running import registry
from hotcold.model.errors import ServiceError

_TIMEOUT_S = 60.0  # for running requests
_ENDING_S = 15.0


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
def stop(names: tuple[str, ...]) -> None:
    """End the running systems of these NAMEs (see `hotcold ps`); all that are kept without one.

    Requests that run are answered first. `python -m hotcold.jobs.stop` ends one of a Ray cluster.
    """
    running = registry.listed()
    chosen = [registry.named(name, running) for name in dict.fromkeys(names)]
    if not names:
        chosen = [one for one in running if one.is_kept]
    with ExitStack() as stack:
        processes = [_Process(record) for record in chosen]
        for process in processes:
            stack.callback(process.close)
            process.signal(signal.SIGTERM)
        for process in processes:
            process.await_end()
            click.echo(f"the system {process.name!r} has ended")
    if not chosen:
        click.echo("no system is kept")


class _Process:
    """The process that holds a system. Signals reach it, never a later process with its pid."""

    def __init__(self, record: registry.Record) -> None:
        """Errors: ServiceError where the system runs, and its process is not visible here."""
        self.name, self._pid = record.name, record.pid
        self._descriptor: int | None = None
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
        if (record.name, record.pid) not in [(one.name, one.pid) for one in registry.running()]:
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
                registry.running()  # removes the record of a killed one
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
