"""The process that holds a system which stays: started by a command, and out of its terminal.

It answers at a Unix socket (`ui/control_api.py`) and ends when nobody has asked for as long as was
wanted, or by `hotcold stop`. What it was started with comes as JSON on standard input; until it is
ready, its standard error is read by the command that has started it.
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

from hotcold.actors.exchange.watch import Pulse
from hotcold.actors.private_ray.fork_server import begin_workers
from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.cli import run
from hotcold.jobs.kept.registry import Claim, Record, start_of
from hotcold.jobs.support.extras import require_extra
from hotcold.jobs.support.until_stopped import Signals

_TIMEOUT_POLLS = 60  # seconds in which the driver says nothing
_LAST_BYTES_S = 2.0
_FOREVER_S = 1e8  # an answer's time is its client's to limit


class _IdleError(Exception):
    """Nobody has asked for as long as the system was to stay."""


@click.command()
def keep() -> None:
    """Hold a system until nobody wants it any more."""
    handed = json.load(sys.stdin)
    claim = Claim(
        Path(handed["folder"]),
        Record(**handed["record"]),
        handed["lock"],
        socket.socket(fileno=handed["listener"]),
    )
    for descriptor in (claim.lock, claim.listener.fileno()):
        os.set_inheritable(descriptor, False)
    with ExitStack() as stack:
        stack.callback(claim.leave)
        claim.publish(pid=os.getpid(), started=start_of(os.getpid()))
        begin_workers()
        signals = stack.enter_context(Signals())
        _hold(claim, handed["model"], _options(handed["options"]), handed["keep_s"], signals, stack)


def _options(given: dict[str, Any]) -> SystemOptions:
    names = ("predictors", "thresholds", "plan")
    paths = {name: Path(given[name]) for name in names if given[name] is not None}
    return SystemOptions(**{**given, **paths, "hosts": tuple(given["hosts"])})


def _hold(
    claim: Claim,
    model: str,
    options: SystemOptions,
    keep_s: float,
    signals: Signals,
    stack: ExitStack,
) -> None:
    """Load, answer, and return at a signal or when the time is over; what runs is answered then."""
    require_extra("ui", "--keep")
    from hotcold.jobs.kept.endpoint import Holder
    from hotcold.ui.api.backend import Backend, ServerSettings
    from hotcold.ui.connections import ConnectionLimits
    from hotcold.ui.server_thread import LoadingGate, ServerThread

    settings = ServerSettings(claim.record.name, max_tokens=1 << 31, request_timeout_s=_FOREVER_S)
    gate = LoadingGate(settings.model_name)
    holder = Holder(claim, gate, model, options)
    server = ServerThread(
        None, gate, (), True, settings.max_body_bytes, ConnectionLimits(), own=holder.own
    )
    stack.callback(server.stop)

    from hotcold.actors.setup.preflight import prepare_system
    from hotcold.jobs.support.loading import running_system
    from hotcold.model.files.locate import locate_model
    from hotcold.ui.app import create_app
    from hotcold.ui.served_models import ServedModels

    system, _ = prepare_system(locate_model(model), options)
    running = stack.enter_context(running_system(system, on_progress=holder.show))
    backend = Backend(running, system, settings)
    server.use(create_app(ServedModels([backend])))
    stay = holder.open(backend, running.call("describe"), keep_s)
    _silence()
    pulse = Pulse("driver", partial(running.begin, "driver_load"))

    def look() -> None:
        pulse.look(_TIMEOUT_POLLS)
        if stay.left_s == 0:
            raise _IdleError

    with suppress(_IdleError):
        signals.wait(look)
    claim.leave()
    server.refuse_new()
    signals.wait_while(lambda: backend.num_active > 0)
    server.stop(_LAST_BYTES_S if signals.count < 2 else 0.0)


def _silence() -> None:
    """From now on nobody reads what is written on standard error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


if __name__ == "__main__":
    run(command=keep, program="hotcold")
