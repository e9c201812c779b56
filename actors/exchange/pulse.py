"""Pings of one actor that something waits for."""

from collections.abc import Callable
from typing import Any

import ray

from hotcold.actors.protocol.failures import service_error

POLL_S = 0.1  # between two polls
# Unanswered polls at which an actor counts as stuck. A live one answers a ping in milliseconds,
# even at work, but not while it compiles kernels or encodes a long prompt, which may hold the
# interpreter for seconds. Polls are counted, not seconds: while all processes are stopped, nothing
# is late.
STARTING_POLLS = 1200
DRIVER_POLLS = 50  # it encodes the prompts
RELAY_POLLS = 50


class Pulse:
    """Pings one actor, one call at a time, and counts the polls that a call goes unanswered."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        """`call` starts a call that a live actor answers at once, and returns its object ref."""
        self._name = name
        self._call = call
        self._ref: Any = None
        self._num_polls = 0

    def poll(self, max_polls: int, *, counts: bool = True) -> Any | None:
        """The answer if it has come since the last poll, else None.

        `counts` False: the actor is known to be slow.
        Errors:  ServiceError if the actor is dead, or leaves `max_polls` polls unanswered
        """
        if self._ref is None:
            self._ref, self._num_polls = self._call(), 0
        done, _ = ray.wait([self._ref], timeout=0)
        if not done and (self._num_polls < max_polls or not counts):
            self._num_polls += counts
            return None
        ref, self._ref = self._ref, None
        try:
            return ray.get(ref, timeout=0)
        except ray.exceptions.RayError as error:
            raise service_error(self._name, error) from error
