"""The daemon of a kept system: a process that a command starts, detached from its terminal.

It answers at a Unix socket (`ui/control_api.py`). It ends once no request has come for the time
that --keep gave, or by `hotcold stop`. Its arguments come as JSON on standard input. Until it is
ready, the command that started it reads its standard error.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from hotcold.actors.protocol.options import PATHS, SystemOptions
from hotcold.jobs.cli import run
from hotcold.jobs.kept.registry import Record, Registration, start_of
from hotcold.jobs.support.extras import require_extra
from hotcold.jobs.support.shared_imports import share_imports
from hotcold.jobs.support.signals import Signals

_TIMEOUT_POLLS = 60  # seconds in which the driver says nothing
_LAST_BYTES_S = 2.0
_MODULES = (
    "hotcold.jobs.kept.endpoint",
    "hotcold.ui.app",
    "hotcold.ui.server_thread",
)
_FOREVER_S = 1e8  # clients limit an answer's time themselves


class _IdleError(Exception):
    """No request has come for as long as the system stays."""


@click.command()
def keep() -> None:
    """Hold a system until it is idle for too long or stopped."""
    handed = json.load(sys.stdin)
    registration = Registration(
        Path(handed["folder"]),
        Record(**handed["record"]),
        handed["lock"],
        socket.socket(fileno=handed["listener"]),
    )
    for descriptor in (registration.lock, registration.listener.fileno()):
        os.set_inheritable(descriptor, False)
    with ExitStack() as stack:
        stack.callback(registration.remove)
        registration.publish(pid=os.getpid(), started=start_of(os.getpid()))
        require_extra("ui", "--keep")
        share_imports(*_MODULES)
        signals = stack.enter_context(Signals())
        options = _options(handed["options"])
        _hold(registration, handed["model"], options, handed["keep_s"], signals, stack)


def _options(given: dict[str, Any]) -> SystemOptions:
    paths = {name: Path(given[name]) for name in PATHS if given[name] is not None}
    return SystemOptions(**{**given, **paths, "hosts": tuple(given["hosts"])})


def _hold(
    registration: Registration,
    model: str,
    options: SystemOptions,
    keep_s: float,
    signals: Signals,
    stack: ExitStack,
) -> None:
    """Load and answer until a signal comes or the system was idle; then finish what runs."""
    from hotcold.jobs.kept.endpoint import ControlEndpoint
    from hotcold.ui.api.backend import Backend, ServerSettings
    from hotcold.ui.connections import ConnectionLimits
    from hotcold.ui.server_thread import LoadingGate, ServerThread

    settings = ServerSettings(
        registration.record.name, max_tokens=1 << 31, request_timeout_s=_FOREVER_S
    )
    gate = LoadingGate(settings.model_name)
    endpoint = ControlEndpoint(registration, gate, model, options)
    server = ServerThread(
        None,
        gate,
        (),
        True,
        settings.max_body_bytes,
        ConnectionLimits(),
        control=endpoint.socket_app,
    )
    stack.callback(server.stop)

    from hotcold.actors.exchange.watch import Pulse
    from hotcold.actors.setup.preflight import prepare_system
    from hotcold.jobs.support.loading import running_system
    from hotcold.model.files.locate import locate_model
    from hotcold.ui.api.served_models import ServedModels
    from hotcold.ui.app import create_app

    system, _ = prepare_system(locate_model(model), options)
    running = stack.enter_context(running_system(system, on_progress=endpoint.show))
    backend = Backend(running, system, settings)
    server.use(create_app(ServedModels([backend])))
    timer = endpoint.open(backend, running.call("describe"), keep_s)
    _silence()
    pulse = Pulse("driver", partial(running.begin, "driver_load"))

    def poll() -> None:
        pulse.poll(_TIMEOUT_POLLS)
        if timer.left_s == 0:
            raise _IdleError

    with suppress(_IdleError):
        signals.wait(poll)
    registration.remove()
    server.refuse_new()
    signals.wait_while(lambda: backend.num_active > 0)
    server.stop(_LAST_BYTES_S if signals.count < 2 else 0.0)


def _silence() -> None:
    """Discard standard error: the command that read it goes on without this process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


if __name__ == "__main__":
    run(command=keep, program="hotcold")
