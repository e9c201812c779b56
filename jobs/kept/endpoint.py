"""Where other commands find a running system and ask it: its record and its Unix socket."""

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
from hotcold.ui.control_api import ControlDoor, Stay, create_control_app
from hotcold.ui.server_thread import LoadingGate


class Holder:
    """A system's place in the register, for the process that holds the system."""

    def __init__(
        self, claim: registry.Claim, gate: LoadingGate, model: str, options: SystemOptions
    ) -> None:
        """`gate` stands before the whole API; `model` is of `model_text`."""
        self.own: tuple[socket.socket, ControlDoor] = (
            claim.listener,
            ControlDoor(gate, self._state),
        )
        self._claim, self._gate = claim, gate
        self._model, self._options = model, options
        self._progress: LoadProgress | None = None

    @classmethod
    def of_server(
        cls, gate: LoadingGate, name: str, url: str, model: str, options: SystemOptions
    ) -> Holder:
        """Of `hotcold serve` at `url`.

        Errors:  UsageError, OSError where there is no folder for it
        """
        folder, identity = own_folder(), identity_of(model, options)
        pid = os.getpid()
        started = registry.start_of(pid)
        record = registry.Record(name, pid, False, name, url, identity, started=started)
        with registry.alone(folder):
            return cls(registry.claim(folder, record), gate, model, options)

    def show(self, progress: LoadProgress) -> None:
        """Tell who asks meanwhile how far loading is."""
        self._gate.stage = progress.stage
        self._progress = progress

    def open(self, backend: Backend, system: SystemConfig, keep_s: float | None) -> Stay:
        """Answer; `system` is as it runs. `keep_s` is `Stay`'s. Errors: OSError."""
        record, stay = self._claim.record, Stay(backend, keep_s)
        facts = {"model": record.model, "mode": system.mode, "device": system.device}
        self.own[1].use(create_control_app(backend, stay, facts))
        # Loading may have written files beside the model.
        identity = identity_of(self._model, self._options)
        self._claim.publish(identity=identity, resolved=resolved_options(system))
        return stay

    def leave(self) -> None:
        """Be found no more; may be repeated."""
        self._claim.leave()

    def _state(self) -> dict[str, Any]:
        """What is said before `open`."""
        told = {"model": self._claim.record.model}
        return told if self._progress is None else {**told, "progress": asdict(self._progress)}
