"""What a running system shows of itself: its driver's telemetry, and how its processes are."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

from hotcold.actors.processes.system_services import SystemServices
from hotcold.actors.telemetry.snapshot import NeuronWatch, Telemetry
from hotcold.actors.telemetry.vitals import VitalSigns


class SystemHealth:
    """Asks processes how they are, for as long as somebody asks for it."""

    def __init__(self, services: SystemServices) -> None:
        """`services` may still be loading."""
        self._services = services
        self._looking = threading.Lock()
        self._vitals: VitalSigns | None = None
        # Of the services that `_vitals` asks. Once others serve, their arena is not kept for this.
        self._watch: Callable[[], NeuronWatch | None] = lambda: None

    def telemetry(self, watch_s: float) -> Telemetry:
        """What the system does now; see `Driver.telemetry`. Errors: ServiceError while it loads."""
        import psutil

        driver, memory = self._services.driver, psutil.virtual_memory()
        with self._looking:
            watch = driver.neuron_watch
            actors = self._vital_signs(watch).poll(watch.write)
        return replace(
            driver.telemetry(watch_s),
            actors=actors,
            host_memory_bytes=memory.total,
            host_memory_used_bytes=memory.total - memory.available,
        )

    def _vital_signs(self, watch: NeuronWatch) -> VitalSigns:
        """Of the services that count for `watch`: others come with another one."""
        if self._vitals is None or self._watch() is not watch:
            connection = self._services.connection
            self._vitals = VitalSigns(connection.names, connection.handles)
            self._watch = weakref.ref(watch)
        return self._vitals
