"""What the driver's process reports of its system: load progress, telemetry, neuron counts."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psutil
import ray

from hotcold.actors.processes.system_services import (
    LOADING_KERNELS,
    PREPARING,
    STARTING,
    SystemServices,
)
from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import (
    COMPILING,
    LOADING_WEIGHTS,
    WRITING_NEURONS,
    LoadProgress,
    ServiceProgress,
)
from hotcold.actors.setup.connection import Connection
from hotcold.actors.telemetry.snapshot import NeuronWatch, Telemetry
from hotcold.actors.telemetry.vitals import VitalSigns
from hotcold.numba_kernels.kernel_cache import kernels_since

_REPLY_S = 1.0  # for services to report; one that compiles may not reply
_AHEAD_S = 30.0  # before a driver its kernels' compilers begin, at most


class LoadingServices:
    """Load progress of all services; keeps their last reports."""

    def __init__(self, total_bytes: int, dtype: str) -> None:
        """Services read `total_bytes` of weights together; kernels are compiled for `dtype`."""
        self._total_bytes = total_bytes
        self._dtype = dtype
        parent = psutil.Process(os.getppid())  # which begins with its Ray
        self._begin = max(time.time() - _AHEAD_S, parent.create_time())
        self._has_compiled = False
        self._last: Sequence[ServiceProgress] = []

    def progress(self, services: Connection, stage: str, notes: tuple[str, ...]) -> LoadProgress:
        """The progress of all services in the current `stage`."""
        total = self._total_bytes
        if stage == STARTING:
            return LoadProgress(0, total, stage)
        if stage not in (PREPARING, LOADING_WEIGHTS, LOADING_KERNELS):
            return LoadProgress(total, total, stage, notes)
        with suppress(ray.exceptions.RayError):
            calls = [handle.loaded.remote() for handle in services.handles]
            self._last = ray.get(calls, timeout=_REPLY_S)
        is_compiling = any(each.is_compiling for each in self._last)
        if stage == PREPARING:
            return self._host_progress(total, is_compiling)
        loaded = sum(each.loaded_bytes for each in self._last)
        self._has_compiled |= is_compiling
        if stage == LOADING_KERNELS:
            loaded, is_compiling = total, self._has_compiled
        return LoadProgress(loaded, total, self._compiling() if is_compiling else stage, notes)

    def _host_progress(self, total: int, is_compiling: bool) -> LoadProgress:
        if file_bytes := sum(each.file_bytes for each in self._last):
            written = sum(each.written_bytes for each in self._last)
            return LoadProgress(written, file_bytes, WRITING_NEURONS)
        return LoadProgress(0, total, self._compiling() if is_compiling else PREPARING)

    def _compiling(self) -> str:
        """The stage, with the kernels of this host."""
        done, asked = kernels_since(self._begin)
        counts = f": {done} of {asked}" if asked else ""
        return f"{COMPILING} for {self._dtype}, once{counts}"


class SystemHealth:
    """Telemetry of the driver together with the vital signs of all processes."""

    def __init__(self, services: SystemServices) -> None:
        """`services` may still be loading."""
        self._services = services
        self._lock = threading.Lock()
        self._vitals: VitalSigns | None = None
        # A weak reference: once other services serve, this must not keep their old arena alive.
        self._watch: Callable[[], NeuronWatch | None] = lambda: None

    def telemetry(self, watch_s: float) -> Telemetry:
        """What the system does now; see `Driver.telemetry`. Errors: ServiceError while it loads."""
        driver, memory = self._services.driver, psutil.virtual_memory()
        with self._lock:
            watch = driver.neuron_watch
            actors = self._vital_signs(watch).poll(watch.write)
        return replace(
            driver.telemetry(watch_s),
            actors=actors,
            host_memory_bytes=memory.total,
            host_memory_used_bytes=memory.total - memory.available,
        )

    def _vital_signs(self, watch: NeuronWatch) -> VitalSigns:
        """Those of the services that count for `watch`; a new watch comes with new services."""
        if self._vitals is None or self._watch() is not watch:
            connection = self._services.connection
            self._vitals = VitalSigns(connection.names, connection.handles)
            self._watch = weakref.ref(watch)
        return self._vitals


class NeuronCounts:
    """Which neurons fire on a text. Services count; a service that is replaced loses its counts."""

    def __init__(self, services: SystemServices) -> None:
        """`services` may still be loading."""
        self._services = services
        # The services of the first window, and how many had been replaced by then.
        self._counting: tuple[Connection, int] | None = None

    def profile_window(
        self, ids: list[int], recorded: list[int], num_prompt: int | None = None
    ) -> np.ndarray:
        """Count the neurons that fire in a window; see `Driver.profile_window`."""
        if self._counting is None:
            self._counting = self._serving()
        inputs = self._services.driver.profile_window(ids, recorded, num_prompt)
        self._require_complete()
        return inputs

    def gather(self) -> np.ndarray:
        """The number of profiled tokens for which each neuron has fired: (L, N) int64.

        Errors:  RequestError where counts are lost
        """
        from hotcold.actors.driver.profiling import counts_by_neuron

        def gather() -> np.ndarray:
            self._require_complete()
            connection = self._services.connection
            specs = [spec for spec in connection.specs if spec.neuron_ids is not None]
            services = [spec.index for spec in specs]
            counts = connection.call_each("fired_counts", services=services)
            return counts_by_neuron(self._services.config, specs, counts)

        return self._services.driver.between_requests(gather, has_slot=False)

    def _serving(self) -> tuple[Connection, int]:
        connection = self._services.connection
        return connection, connection.replacer.num_replaced

    def _require_complete(self) -> None:
        """Errors: RequestError where a service has been replaced since the first window."""
        if self._counting not in (None, self._serving()):
            raise RequestError(
                "a service was restarted while neurons were counted, and its counts are lost; "
                "profile again"
            )
