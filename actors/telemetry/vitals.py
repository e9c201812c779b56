"""Health, memory and compiling of actors, polled now and then and never waited for."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numba.core import event

from hotcold.actors.telemetry.snapshot import ActorHealth

_EVERY_S = 2.0  # between two polls of one actor
_SILENT_S = 3.0  # unanswered for so long, an actor is shown as silent


@dataclass(frozen=True, eq=False)
class ServiceVitals:
    """What a service says of itself; `counts`, `steps` only where the driver cannot see them."""

    pid: int
    memory_bytes: int
    device: str
    counts: np.ndarray | None = None
    steps: np.ndarray | None = None


def resident_bytes() -> int:
    """Memory that this process has in the host's RAM."""
    import psutil

    return int(psutil.Process().memory_info().rss)


class CompileWatch(event.Listener):
    """Notes when Numba compiles a kernel, or waits for another process that compiles it."""

    def __init__(self) -> None:
        self._depth = 0  # of functions that are compiled for each other
        event.register("numba:compile", self)

    @property
    def is_compiling(self) -> bool:
        """Whether a function is being compiled now."""
        return self._depth > 0

    def on_start(self, _: event.Event) -> None:
        """A function is not in the cache."""
        self._depth += 1

    def on_end(self, _: event.Event) -> None:
        """It is compiled, or has failed."""
        self._depth -= 1


@dataclass
class _Actor:
    """One actor: the call in progress, and its last reply."""

    name: str
    ref: Any = None
    called_s: float = 0.0
    last: ServiceVitals | None = None
    state: str = "alive"

    def health(self, now_s: float) -> ActorHealth:
        is_silent = self.ref is not None and now_s - self.called_s > _SILENT_S
        state = "silent" if is_silent and self.state == "alive" else self.state
        if self.last is None:
            return ActorHealth(self.name, state, 0, 0, "")
        return ActorHealth(
            self.name, state, self.last.pid, self.last.memory_bytes, self.last.device
        )


class VitalSigns:
    """Polls all services of a system, each at most every two seconds, and keeps their replies."""

    def __init__(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """`handles` are the actors of `names`."""
        self._handles = handles
        self._actors = [_Actor(name) for name in names]

    def poll(
        self, on_counts: Callable[[int, np.ndarray, np.ndarray], None]
    ) -> tuple[ActorHealth, ...]:
        """Collect replies, call again where it is time; the driver comes first.

        `on_counts` receives a service's index, counts and steps.
        """
        now_s = time.monotonic()
        for index, (actor, handle) in enumerate(zip(self._actors, self._handles, strict=True)):
            self._collect(index, actor, on_counts)
            if actor.ref is None and (actor.last is None or now_s - actor.called_s >= _EVERY_S):
                actor.ref, actor.called_s = handle.vitals.remote(), now_s
        driver = ActorHealth("driver", "alive", os.getpid(), resident_bytes(), "cpu")
        return (driver, *(actor.health(now_s) for actor in self._actors))

    def _collect(
        self,
        index: int,
        actor: _Actor,
        on_counts: Callable[[int, np.ndarray, np.ndarray], None],
    ) -> None:
        if actor.ref is None or not ray.wait([actor.ref], timeout=0)[0]:
            return
        ref, actor.ref = actor.ref, None
        try:
            vitals: ServiceVitals = ray.get(ref, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            actor.state = "restarting"
        except ray.exceptions.RayError:
            actor.state = "dead"
        else:
            actor.last, actor.state = vitals, "alive"
            if vitals.counts is not None and vitals.steps is not None:
                on_counts(index, vitals.counts, vitals.steps)
