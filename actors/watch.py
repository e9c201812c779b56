"""Liveness of services, looked at while the driver waits for them."""

import time
from collections.abc import Sequence
from typing import Any

import ray

from actors.failures import service_error
from model.errors import ServiceError

_PATIENCE_S = 1.0  # a live actor answers a ping in milliseconds, even at work
_LONGEST_REQUEST_S = 600.0


class ActorWatch:
    """Pings the actors that the driver waits for; one that died or is stuck is named."""

    def __init__(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """`names[s]` and `handles[s]` belong to service s."""
        self._names = names
        self._handles = handles
        self._pings: dict[int, tuple[Any, float]] = {}

    def check(self, services: Sequence[int], waited_s: float) -> None:
        """Raise ServiceError if one of `services` is dead, or has not answered a ping for 1 s."""
        for service in services:
            self._look(service)
        if waited_s > _LONGEST_REQUEST_S:
            name = self._names[services[0]]
            raise ServiceError(
                f"the {name} service has not answered for {waited_s:.0f} s; start again"
            )

    def _look(self, service: int) -> None:
        now = time.monotonic()
        if service not in self._pings:
            self._pings[service] = (self._handles[service].ping.remote(), now)
        ref, asked = self._pings[service]
        done, _ = ray.wait([ref], timeout=0)
        name = f"{self._names[service]} service"
        if done:
            del self._pings[service]
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                raise service_error(name, error) from error
        elif now - asked > _PATIENCE_S:
            del self._pings[service]
            raise service_error(name, ray.exceptions.GetTimeoutError())

    def explain(self, service: int) -> str:
        """What the service says of its last failure."""
        return str(ray.get(self._handles[service].explain_failure.remote(), timeout=5))
