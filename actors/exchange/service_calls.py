"""Calls of several services at once: what they answer, or who fails or is stuck."""

from collections.abc import Mapping
from typing import Any

import ray

from hotcold.actors.exchange.watch import POLL_S, ActorWatch
from hotcold.actors.protocol.failures import ServiceLost, service_error


def await_each(calls: Mapping[int, Any], watch: ActorWatch) -> list[Any]:
    """What calls of services return, in order; `calls[s]` is of service s, as `watch` knows it.

    Errors:  of the first that fails what it raised, as `service_error` tells it; ServiceLost of one
             that died, is stopped or stuck
    """
    answers: dict[int, Any] = {}
    own_watch = watch.apart()
    while len(answers) < len(calls):
        waiting = {service: call for service, call in calls.items() if service not in answers}
        done, _ = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=POLL_S)
        for service, call in waiting.items():
            if call in done:
                answers[service] = _answer(call, service, watch.name(service))
        if silent := [service for service in waiting if service not in answers]:
            own_watch.check(silent, 0)
    return [answers[service] for service in calls]


def _answer(call: Any, service: int, name: str) -> Any:
    try:
        return ray.get(call, timeout=0)
    except ray.exceptions.RayError as error:
        told = service_error(name, error)
        if isinstance(error, ray.exceptions.RayTaskError):
            raise told from error
        raise ServiceLost(service, str(told)) from error
