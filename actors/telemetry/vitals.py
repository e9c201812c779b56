"""Health and memory of actors, asked for now and then and never waited for."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from hotcold.actors.telemetry.snapshot import ActorHealth

_ASK_S = 2.0  # between two questions to one actor
_SILENT_S = 3.0  # unanswered for so long, an actor is shown as silent


@dataclass(frozen=True, eq=False)
class ServiceVitals:
    """What a service says of itself; counts, steps only where the driver cannot see them."""

    pid: int
    memory_bytes: int
    device: str
    counts: np.ndarray | None = None
    steps: np.ndarray | None = None


def resident_bytes() -> int:
    """Memory that this process has in the host's RAM."""
    import psutil

    return int(psutil.Process().memory_info().rss)


class _Patient:
    """One actor: the question under way and the last answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ref: Any = None
        self.asked_s = self.answered_s = time.monotonic()
        self.last: ServiceVitals | None = None
        self.state = "alive"

    def health(self, now_s: float) -> ActorHealth:
        last, state = self.last, self.state
        if self.ref is not None and state == "alive" and now_s - self.asked_s > _SILENT_S:
            state = "silent"
        if last is None:
            return ActorHealth(self.name, state, 0, 0, "", now_s - self.answered_s)
        answered_s = now_s - self.answered_s
        return ActorHealth(self.name, state, last.pid, last.memory_bytes, last.device, answered_s)


class VitalSigns:
    """Asks all services of a system, at most every two seconds, and remembers their answers."""

    def __init__(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """`handles` are the actors of `names`."""
        self._handles = handles
        self._patients = [_Patient(name) for name in names]

    def look(
        self, on_counts: Callable[[int, np.ndarray, np.ndarray], None]
    ) -> tuple[ActorHealth, ...]:
        """Collect answers that have come, ask again where it is time; the driver comes first.

        `on_counts` receives what a service has counted.
        """
        now_s = time.monotonic()
        for index, (patient, handle) in enumerate(zip(self._patients, self._handles, strict=True)):
            self._collect(index, patient, now_s, on_counts)
            if patient.ref is None and (patient.last is None or now_s - patient.asked_s >= _ASK_S):
                patient.ref, patient.asked_s = handle.vitals.remote(), now_s
        driver = ActorHealth("driver", "alive", os.getpid(), resident_bytes(), "cpu", 0.0)
        return (driver, *(patient.health(now_s) for patient in self._patients))

    def _collect(
        self,
        index: int,
        patient: _Patient,
        now_s: float,
        on_counts: Callable[[int, np.ndarray, np.ndarray], None],
    ) -> None:
        if patient.ref is None or not ray.wait([patient.ref], timeout=0)[0]:
            return
        ref, patient.ref = patient.ref, None
        try:
            vitals: ServiceVitals = ray.get(ref, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            patient.state = "restarting"
        except ray.exceptions.RayError:
            patient.state = "dead"
        else:
            patient.last, patient.answered_s, patient.state = vitals, now_s, "alive"
            if vitals.counts is not None and vitals.steps is not None:
                on_counts(index, vitals.counts, vitals.steps)
