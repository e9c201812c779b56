"""The driver's process: the Ray actor that clients call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotcold.actors.processes.child_process import give_back_freed_memory, trim_heap
from hotcold.actors.processes.cluster import look_for_own_modules
from hotcold.actors.processes.reports import LoadingServices, NeuronCounts, SystemHealth
from hotcold.actors.processes.scaling import scale
from hotcold.actors.processes.system_services import SystemServices
from hotcold.actors.protocol.messages import (
    DriverLoad,
    GenerateRequest,
    LoadProgress,
    ReaderEpoch,
    ServiceSpec,
    SystemConfig,
    TokenEvent,
)
from hotcold.actors.setup.account import loaded_bytes
from hotcold.actors.setup.assignment import neuron_owners
from hotcold.actors.setup.connection import SpawnRelay
from hotcold.actors.telemetry.snapshot import WATCH_S, Telemetry
from hotcold.numba_kernels.loops.mailbox import OPERATION, PING

if TYPE_CHECKING:
    from hotcold.actors.driver.scoring import WindowScores
    from hotcold.actors.driver.streams import RequestEvent
    from hotcold.predictors.magnitude_thresholds import LayerThresholds

# Of the GIL: the engine's thread continues after each exchange, and Python's default of 5 ms is as
# long as several steps of a small model (docs/decisions.md).
_SWITCH_S = 0.0002


class DriverActor:
    """Owns the services, which end with it. Methods that need them raise ServiceError until `load`
    has returned.
    """

    def __init__(
        self,
        system: SystemConfig,
        spawn: Callable[[ServiceSpec, str | None], Any],
        spawn_relay: SpawnRelay,
    ) -> None:
        """`spawn` and `spawn_relay` as in `SystemServices`."""
        look_for_own_modules()
        sys.setswitchinterval(_SWITCH_S)
        if system.storage is not None:
            give_back_freed_memory()
        self.services = SystemServices(system, spawn, spawn_relay)
        config = self.services.config
        self._loading = LoadingServices(
            loaded_bytes(system, config), system.weight_dtype or config.dtype
        )
        self._counts = NeuronCounts(self.services)
        self._health = SystemHealth(self.services)

    def load(self) -> None:
        """Load and connect the services; concurrent callers all wait. Errors: HotcoldError."""
        self.services.load()
        trim_heap()

    def progress(self) -> LoadProgress:
        """Load progress; may be called while `load` runs."""
        services = self.services
        stage = services.connection.replacer.stage or services.stage
        return self._loading.progress(services.connection, stage, services.notes)

    def scale(self, num_cpu_actors: int) -> SystemConfig:
        """Serve with another number of CPU services; see `actors.processes.scaling.scale`."""
        return scale(self.services, num_cpu_actors)

    def stop(self) -> None:
        """End all threads, then the services' processes."""
        self.services.stop()

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Stream a request's tokens. Errors: PromptError, RequestError, ServiceError."""
        yield from self.services.driver.generate(request, is_attended=True)

    def submit(self, epoch: ReaderEpoch, request: GenerateRequest) -> None:
        """Queue a request; see `Driver.submit`."""
        self.services.driver.submit(epoch, request)

    def take_events(
        self, epoch: ReaderEpoch, num_taken: int, wait_s: float
    ) -> tuple[int, list[RequestEvent]]:
        """The events of submitted requests; see `Driver.take_events`."""
        return self.services.driver.take_events(epoch, num_taken, wait_s)

    def attend(self, epoch: ReaderEpoch) -> None:
        """A reader is alive and has given up its earlier epochs; see `Readers.attend`."""
        self.services.driver.readers.attend(epoch)

    def cancel(self, request_id: str) -> None:
        """End a request; see `Driver.cancel`."""
        self.services.driver.cancel(request_id)

    def score_window(self, ids: list[int], first: int, audit: bool) -> WindowScores:
        """Log-probabilities of the tokens after ids[first]; see `Driver.score_window`."""
        return self.services.driver.score_window(ids, first, audit)

    def try_thresholds(self, ids: list[int], first: int, thresholds: LayerThresholds) -> np.ndarray:
        """The error that thresholds cause in a window; see `Driver.try_thresholds`."""
        return self.services.driver.try_thresholds(ids, first, thresholds)

    def profile_window(
        self, ids: list[int], recorded: list[int], num_prompt: int | None = None
    ) -> np.ndarray:
        """Count the neurons that fire in a window; see `Driver.profile_window`."""
        return self._counts.profile_window(ids, recorded, num_prompt)

    def fired_counts(self) -> np.ndarray:
        """The number of profiled tokens for which each neuron has fired: (L, N) int64."""
        return self._counts.gather()

    def chosen_counts(self) -> np.ndarray:
        """The number of profiled tokens that have chosen each block of neurons: (L, B) int64."""
        return self.services.driver.chosen_counts()

    def expert_distances(self) -> np.ndarray:
        """How soon experts were chosen again; see `Driver.expert_distances`."""
        return self.services.driver.expert_distances()

    def recorded_weights(self) -> np.ndarray:
        """What blocks weigh for the recorded tokens of the last profiled window: (L, R, B)."""
        return self.services.driver.recorded_weights()

    def ping(self) -> int:
        """The process id. Errors: ServiceError where the engine's thread has ended."""
        self.services.require_alive()
        return os.getpid()

    def describe(self) -> SystemConfig:
        """The system's configuration."""
        return self.services.system

    def identity(self) -> tuple[str, int, int]:
        """What systems of the same tokens have in common; see `Driver.identity`."""
        return self.services.driver.identity(self.services.machines())

    def neuron_owners(self) -> tuple[list[str], np.ndarray]:
        """Which service holds each neuron; see `actors.setup.assignment`."""
        return neuron_owners(self.services.config, self.services.connection.topology)

    def processes(self) -> dict[str, int]:
        """Process ids by name, the driver's too. Errors: ServiceError while it loads."""
        return {"driver": os.getpid(), **self.services.process_ids()}

    def driver_load(self, with_experts: bool = False) -> DriverLoad:
        """As `Driver.load`. Errors: ServiceError where the system has ended."""
        load = self.services.driver.load(with_experts)
        connection = self.services.connection
        replacer = connection.replacer
        return replace(
            load,
            is_compiling=connection.watch.is_compiling,
            device=self.services.device_name,
            num_replaced=replacer.num_replaced,
            last_replaced=replacer.last_replaced,
        )

    def telemetry(self, watch_s: float = WATCH_S) -> Telemetry:
        """What the system does now; see `Driver.telemetry`. Cheap enough for twice a second."""
        return self._health.telemetry(watch_s)

    def measure_exchange(self, num_rounds: int) -> np.ndarray:
        """Nanoseconds of each of `num_rounds` empty requests to all CPU services."""
        services = self.services

        def measure() -> np.ndarray:
            cpus = services.connection.topology.cpu_services
            services.exchange.buffers.requests[cpus, OPERATION] = PING
            return np.array([services.exchange.request(cpus) for _ in range(num_rounds)])

        return services.driver.between_requests(measure, has_slot=False)

    def device_report(self, measure: bool) -> dict[str, float]:
        """Memory and times of the GPU; see `CudaAttentionService.device_report`."""
        report: dict[str, float]
        connection = self.services.connection
        gpus = connection.topology.cache_services
        (report,) = connection.call_each("device_report", measure, services=gpus)
        return report

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds used by each service so far."""
        connection = self.services.connection
        used = connection.call_each("cpu_seconds")
        return dict(zip(connection.names, used, strict=True))
