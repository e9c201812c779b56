"""Liveness of services, looked at while the driver waits for them."""

from collections.abc import Sequence
from typing import Any

import ray

from actors.failures import service_error
from model.errors import ServiceError

# Unanswered looks, 100 ms apart, at which an actor counts as stuck. A live one answers a ping in
# milliseconds, even at work, but not while it compiles kernels, which may keep the interpreter for
# seconds. Looks are counted, not seconds: time in which all processes are stopped is no silence.
_PATIENCE_LOOKS = 15
_STARTING_LOOKS = 1200
_LONGEST_REQUEST_S = 600.0


class ActorWatch:
    """Pings the actors that the driver waits for; one that died or is stuck is named."""

    def __init__(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """`names[s]` and `handles[s]` belong to service s."""
        self._names = names
        self._handles = handles
        self._pings: dict[int, tuple[Any, int]] = {}
        self.starting = True  # until the driver says that all kernels are compiled

    def check(self, services: Sequence[int], waited_s: float) -> None:
        """Raise ServiceError if one of `services` is dead or leaves a ping unanswered."""
        for service in services:
            self._look(service)
        if waited_s > _LONGEST_REQUEST_S:
            name = self._names[services[0]]
            raise ServiceError(
                f"the {name} service has not answered for {waited_s:.0f} s; start again"
            )

    def _look(self, service: int) -> None:
        if service not in self._pings:
            self._pings[service] = (self._handles[service].ping.remote(), 0)
        ref, num_looks = self._pings[service]
        done, _ = ray.wait([ref], timeout=0)
        name = f"{self._names[service]} service"
        if done:
            del self._pings[service]
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                raise service_error(name, error) from error
            return
        if num_looks >= (_STARTING_LOOKS if self.starting else _PATIENCE_LOOKS):
            del self._pings[service]
            raise service_error(name, ray.exceptions.GetTimeoutError())
        self._pings[service] = (ref, num_looks + 1)

    def explain(self, service: int) -> str:
        """What the service says of its last failure."""
        return str(ray.get(self._handles[service].explain_failure.remote(), timeout=5))
