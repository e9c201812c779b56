"""A model behind the door: the server's backend, whose system is a deployment's replicas."""

from __future__ import annotations

from typing import Any

from hotcold.actors.protocol.failures import service_error
from hotcold.ui.api.backend import Backend
from hotcold.ui.fleet.client import LOST
from hotcold.ui.fleet.turns import places

_ANSWER_S = 10.0


class FleetBackend(Backend):
    """The door attaches a client, and sets `handle`, of the deployment; Serve loads the model."""

    handle: Any
    may_leave = False

    @property
    def is_loaded(self) -> bool:
        """Whether there is a replica, of a model that may leave."""
        return not self.may_leave or bool(places.get(self.handle.deployment_name))

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of one replica's driver, in a thread. Errors: HotcoldError."""
        if not self.is_loaded:
            raise self.absence
        try:
            return self.handle.call.remote(method, *args).result(timeout_s=_ANSWER_S)
        except (*LOST, TimeoutError) as error:
            raise service_error("replica", error) from error
