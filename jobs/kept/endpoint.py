"""A running system's record and Unix socket, by which other commands find it and send requests."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from typing import Any

from hotcold.actors.protocol.messages import LoadProgress, SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.kept import registry
from hotcold.jobs.kept.folder import own_folder
from hotcold.jobs.kept.identity import identity_of, resolved_options
from hotcold.ui.api.backend import Backend
from hotcold.ui.control_api import ControlRouter, IdleTimer, create_control_app
from hotcold.ui.server_thread import LoadingGate


class ControlEndpoint:
    """The control socket of one system, for the process that holds it."""

    def __init__(
        self,
        registration: registry.Registration,
        gate: LoadingGate,
        model: str,
        options: SystemOptions,
    ) -> None:
        """`gate` answers the whole API; `model` is of `model_text`."""
        self._router = ControlRouter(gate, self._state)
        self._registration, self._gate = registration, gate
        self._model, self._options = model, options
        self._progress: LoadProgress | None = None

    @classmethod
    def of_server(
        cls, gate: LoadingGate, name: str, url: str, model: str, options: SystemOptions
    ) -> ControlEndpoint:
        """Of `hotcold serve` at `url`.

        Errors:  UsageError, OSError where the registry's folder cannot be used
        """
        folder, identity = own_folder(), identity_of(model, options)
        pid = os.getpid()
        started = registry.start_of(pid)
        record = registry.Record(name, pid, False, name, url, identity, started=started)
        with registry.locked(folder):
            return cls(registry.register(folder, record), gate, model, options)

    @property
    def socket_app(self) -> tuple[socket.socket, ControlRouter]:
        """The listening socket, and the application that answers there."""
        return self._registration.listener, self._router

    def show(self, progress: LoadProgress) -> None:
        """Answer requests for the state with this progress."""
        self._gate.stage = progress.stage
        self._progress = progress

    def open(self, backend: Backend, system: SystemConfig, keep_s: float | None) -> IdleTimer:
        """Answer all requests from now on; `system` is as it runs. Errors: OSError."""
        record, timer = self._registration.record, IdleTimer(backend, keep_s)
        facts = {"model": record.model, "mode": system.mode, "device": system.device}
        self._router.use(create_control_app(backend, timer, facts, self._publish))
        self._publish(system)
        return timer

    def _publish(self, system: SystemConfig) -> None:
        """Say what runs now. Errors: OSError."""
        # Loading may have written files of the model.
        identity = identity_of(self._model, self._options)
        self._registration.publish(identity=identity, resolved=resolved_options(system))

    def close(self) -> None:
        """Remove it from the registry; may be repeated."""
        self._registration.remove()

    def _state(self) -> dict[str, Any]:
        """The answer to a request for the state before `open`."""
        state = {"model": self._registration.record.model}
        return state if self._progress is None else {**state, "progress": asdict(self._progress)}
