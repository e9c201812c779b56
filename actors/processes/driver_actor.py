"""The driver's process: starts the services, watches their loading, serves requests.

What serves requests is imported while the services' processes start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.util.placement_group import remove_placement_group

from actors.exchange.recovering_exchange import RecoveringExchange
from actors.exchange.recovery import RecoveryPolicy
from actors.exchange.service_calls import await_each
from actors.processes.cluster import await_actors
from actors.processes.scaling import (
    connect_more,
    hold_cpus,
    move_gpu,
    scaled_system,
)
from actors.protocol.failures import RequestError, ServiceLost, cause_of
from actors.protocol.messages import (
    LOADING_WEIGHTS,
    DriverLoad,
    Fitted,
    GenerateRequest,
    LoadProgress,
    ServiceProgress,
    ServiceSpec,
    SystemConfig,
    TokenEvent,
)
from actors.setup.connection import Connection
from actors.setup.hosts import SpawnRelay, service_nodes
from actors.setup.preflight import system_need
from actors.setup.shards import arena_layout, service_specs
from actors.telemetry.snapshot import WATCH_S, Telemetry
from actors.telemetry.vitals import VitalSigns
from model.config.build import read_config
from model.errors import HotcoldError, ServiceError
from model.files.checkpoint import Checkpoint
from model.weights.check import stored_config
from numba_kernels.serve.mailbox import OPERATION, PING, STOP
from placement.memory import require_memory, weight_bytes

if TYPE_CHECKING:
    from actors.driver.driver import Driver
    from actors.driver.request_events import RequestEvent
    from actors.driver.scoring import WindowScores

_LOADING_KERNELS = "loading kernels"
_PROGRESS_S = 1.0  # for the services to tell it; one that compiles may not answer
_IDLE_S = 0.5  # between two looks; whoever has just started a system asks it at once
_START_S = 60.0  # for a service's process to start


class DriverActor:
    """A Ray actor, alone in knowing its services; they end with it."""

    def __init__(
        self,
        system: SystemConfig,
        spawn: Callable[[ServiceSpec, str | None], Any],
        spawn_relay: SpawnRelay,
    ) -> None:
        """`spawn` starts a service's actor, on a given node; services load all side by side.

        `spawn_relay` starts one of those that other hosts have.
        """
        self._system = system
        self._spawn = spawn
        config = read_config(system.model_path)
        self._config = stored_config(
            Checkpoint(Path(system.model_path)), config, system.weight_dtype
        )
        self._total_bytes = weight_bytes(self._config)
        specs = service_specs(system, self._config)
        shares_arena = system.exchange == "arena"  # with whoever is on this process's node
        self._node_id = ray.get_runtime_context().get_node_id() if shares_arena else None
        nodes = service_nodes(system, self._node_id)
        handles = [spawn(spec, node) for spec, node in zip(specs, nodes, strict=True)]
        self._spawn_relay = spawn_relay
        self._policy = RecoveryPolicy()
        self._services = Connection(system, specs, handles, self._policy)
        self._num_replaced_before: int | None = None  # before neurons were first counted
        self._stage = "starting services"
        self._services_progress: list[ServiceProgress] = []
        self._notes: tuple[str, ...] = ()
        self._device_name = "cpu"  # of the GPU service
        self._driver: Driver | None = None
        self._loading = threading.Lock()
        self._looking = threading.Lock()
        self._vitals: VitalSigns | None = None
        self._failure: BaseException | None = None
        self._held_cpus: Any = None
        self._stopping = threading.Event()
        threading.Thread(target=_import_driver, name="imports", daemon=True).start()

    def load(self) -> None:
        """Return when all is loaded and connected, to all who wait for it. Errors: HotcoldError."""
        with self._loading:
            if self._failure is not None:
                raise self._failure
            if self._driver is None:
                self._load()

    def _load(self) -> None:
        try:
            num_cpus = [0, *(spec.num_threads for spec in self._services.specs[1:])]
            node_id = None if self._system.hosts else self._node_id
            await_actors(self._services.handles, num_cpus, _START_S, node_id)
            self._services.call_each("ping", timeout_s=5.0)
            self._stage = LOADING_WEIGHTS
            if self._system.device == "cuda":
                self._fit_gpu()
            self._load_services()
            self._stage = _LOADING_KERNELS
            self._services.open(arena_layout(self._system, self._config), self._spawn_relay)
            self._services.attach(self._services.services)
            replacer = self._services.replacer
            self._exchange = RecoveringExchange(self._services.exchange, replacer, self._policy)
            from actors.driver.driver import Driver

            shards = self._services.shards
            self._driver = Driver(self._system, self._exchange, shards, self._prepare_products)
            self._services.ready()
            self._exchange.start()
            self._stage = "ready"
            threading.Thread(target=self._prepare_prompts, name="prompts", daemon=True).start()
        except BaseException as error:
            self._failure = error
            self._kill()
            raise

    def _prepare_products(self) -> None:
        """Let the services agree how they multiply; in the engine's thread, for the system's life.

        Errors:  RequestError where one cannot, CacheLost after the GPU service was replaced
        """
        while self._system.products is None:
            try:
                choice = self._services.agree_on_products()
            except ServiceLost as error:
                self._exchange.renew(error.service, cause_of(error))
            else:
                self._system = replace(self._system, products=choice)

    def _prepare_prompts(self) -> None:
        """Let services prepare for long prompts once nobody waits for them to answer."""
        driver, num_steps = self._ready(), -1
        while not self._stopping.wait(_IDLE_S):
            load, before, num_steps = driver.load(), num_steps, driver.engine.num_steps
            if num_steps == before and not (load.num_running or load.num_waiting):
                for handle in self._services.handles:
                    handle.prepare_prompts.remote()  # the first long prompt tells what fails
                return

    def _fit_gpu(self) -> None:
        """Let the GPU service take what fits; the CPU services then load the rest."""
        fitted: Fitted
        (fitted,) = self._services.call_each("fit", self._system, services=[0])
        self._system, self._device_name = fitted.system, fitted.device_name
        self._notes = (fitted.note,) if fitted.note else ()
        if self._system.device == "cpu":  # then it takes more of the host's memory
            require_memory(system_need(self._system, self._config))
        specs = service_specs(self._system, self._config)
        self._services = Connection(self._system, specs, self._services.handles, self._policy)

    def _load_services(self) -> None:
        services = self._services
        loads = zip(services.handles, services.specs, strict=True)
        await_each(services.names, [handle.load.remote(spec) for handle, spec in loads])

    def progress(self) -> LoadProgress:
        """How far loading is; may be called while `load` runs."""
        stage = self._services.replacer.stage or self._stage
        if stage == "starting services":
            return LoadProgress(0, self._total_bytes, stage)
        if stage not in (LOADING_WEIGHTS, _LOADING_KERNELS):
            return LoadProgress(self._total_bytes, self._total_bytes, stage, self._notes)
        calls = [handle.loaded.remote() for handle in self._services.handles]
        with suppress(ray.exceptions.RayError):
            self._services_progress = ray.get(calls, timeout=_PROGRESS_S)
        services = self._services_progress
        num_compiled = sum(each.num_compiled for each in services)
        loaded_bytes = sum(each.loaded_bytes for each in services)
        if stage == _LOADING_KERNELS:
            loaded_bytes = self._total_bytes
        if num_compiled and (
            stage == _LOADING_KERNELS or any(each.is_compiling for each in services)
        ):
            dtype = self._system.weight_dtype or self._config.dtype
            stage = f"compiling kernels for {dtype}, once: {num_compiled} so far"
        return LoadProgress(loaded_bytes, self._total_bytes, stage, self._notes)

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Stream a request's tokens. Errors: PromptError, RequestError, ServiceError."""
        yield from self._ready().generate(request)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request; see `Driver.submit`."""
        self._ready().submit(request)

    def take_events(self, wait_s: float) -> list[RequestEvent]:
        """The events of submitted requests; see `Driver.take_events`."""
        return self._ready().take_events(wait_s)

    def driver_load(self) -> DriverLoad:
        """What the driver is busy with. Errors: ServiceError where the system has ended."""
        return replace(self._ready().load(), device=self._device_name)

    def cancel(self, request_id: str) -> None:
        """End a request; see `Driver.cancel`."""
        self._ready().cancel(request_id)

    def score_window(self, ids: list[int], first: int, audit: bool) -> WindowScores:
        """How well tokens after ids[first] are predicted; see `Driver.score_window`."""
        return self._ready().score_window(ids, first, audit)

    def profile_window(self, ids: list[int], recorded: list[int]) -> np.ndarray:
        """Count who fires in a window; see `Driver.profile_window`."""
        if self._num_replaced_before is None:
            self._num_replaced_before = self._services.replacer.num_replaced
        inputs = self._ready().profile_window(ids, recorded)
        self._require_counts()
        return inputs

    def fired_counts(self) -> np.ndarray:
        """For how many profiled tokens each neuron has fired since the start: (L, N) int64."""

        from actors.driver.profiling import counts_by_neuron

        def gather() -> np.ndarray:
            self._require_counts()
            specs = [spec for spec in self._services.specs if spec.neuron_ids is not None]
            services = [spec.index for spec in specs]
            counts = self._services.call_each("fired_counts", services=services)
            return counts_by_neuron(self._config, specs, counts)

        return self._ready().between_requests(gather)

    def _require_counts(self) -> None:
        """A service that was replaced has forgotten who fired. Errors: RequestError."""
        if self._num_replaced_before not in (None, self._services.replacer.num_replaced):
            raise RequestError(
                "a service was restarted while neurons were counted, and its counts are lost; "
                "profile again"
            )

    def ping(self) -> int:
        """The process id; an answer says that the process lives."""
        return os.getpid()

    def describe(self) -> SystemConfig:
        """What this system runs."""
        return self._system

    def processes(self) -> dict[str, int]:
        """Process ids by service name, the driver's too."""
        self._ready()
        pids = self._services.replacer.process_ids()
        return {"driver": os.getpid(), **dict(zip(self._services.names, pids, strict=True))}

    def scale(self, num_cpu_actors: int) -> SystemConfig:
        """Serve with another number of CPU services; returns when they do. Requests go on.

        Errors:  HotcoldError where they cannot be had: the old ones go on
        """
        driver = self._ready()
        with self._loading:
            system = scaled_system(self._system, num_cpu_actors)
            if num_cpu_actors == self._system.num_cpu_actors:
                return self._system
            old = self._services
            new = connect_more(
                system,
                self._config,
                old.handles[0],
                self._spawn,
                self._spawn_relay,
                self._node_id,
                self._policy,
            )
            try:
                driver.change_services(system, new.shards, lambda: self._change(new))
            except BaseException:
                if self._services is old:
                    new.kill(new.cpu_services)
                raise
            old.kill(old.cpu_services)
            if self._held_cpus is None:
                self._held_cpus = hold_cpus(system.num_threads, self._node_id)
            return system

    def _change(self, new: Connection) -> None:
        """Take other CPU services; called by the engine's thread. Errors: CacheLost."""
        new.replacer.take_over(0, self._services.replacer)
        failure, products = "", self._system.products
        if products is not None and new.system.products is None:  # agreed on while these loaded
            new.system = replace(new.system, products=products)
            new.use_products(products)
        try:
            move_gpu(self._exchange.inner, new)
        except HotcoldError as error:  # then a fresh GPU service comes to the new arena
            failure = cause_of(error)
        self._exchange.change(new.exchange, new.replacer)
        self._system, self._services = new.system, new
        with self._looking:
            self._vitals = None
        if self._num_replaced_before is not None:
            self._num_replaced_before = -1  # counts went with the old services
        if failure:
            self._exchange.renew(0, failure)

    def telemetry(self, watch_s: float = WATCH_S) -> Telemetry:
        """What the system does now; see `Driver.telemetry`. Cheap: ask twice a second."""
        import psutil

        driver, memory = self._ready(), psutil.virtual_memory()
        with self._looking:
            if self._vitals is None:
                names, on_counts = self._services.names, driver.neuron_watch.write
                self._vitals = VitalSigns(names, lambda: self._services.handles, on_counts)
            actors = self._vitals.look()
        return replace(
            driver.telemetry(watch_s),
            actors=actors,
            host_memory_bytes=memory.total,
            host_memory_used_bytes=memory.total - memory.available,
        )

    def measure_exchange(self, num_rounds: int) -> np.ndarray:
        """Nanoseconds of each of `num_rounds` empty questions to all CPU services."""
        cpus = self._services.cpu_services

        def measure() -> np.ndarray:
            self._exchange.wires.requests[1:, OPERATION] = PING
            return np.array([self._exchange.ask(cpus) for _ in range(num_rounds)])

        return self._ready().between_requests(measure)

    def device_report(self, measure: bool) -> dict[str, float]:
        """What the GPU service's GPU does; see `CudaService.device_report`."""
        found: dict[str, float]
        (found,) = self._services.call_each("device_report", measure, services=[0])
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds used by each service so far."""
        used = self._services.call_each("cpu_seconds", timeout_s=5.0)
        return dict(zip(self._services.names, used, strict=True))

    def stop(self) -> None:
        """End all threads, then the services' processes."""
        self._stopping.set()
        self._services.replacer.close()
        try:
            if self._driver is not None:
                self._driver.close()
                self._exchange.wires.requests[:, OPERATION] = STOP
                with suppress(HotcoldError):
                    self._exchange.inner.ask(self._services.services)
                    self._services.call_each("join", 2.0, timeout_s=5.0)
        finally:
            self._kill()

    def _kill(self) -> None:
        self._services.kill()
        if self._held_cpus is not None:
            remove_placement_group(self._held_cpus)

    def _ready(self) -> Driver:
        if self._driver is None:
            raise ServiceError("the system is still loading")
        return self._driver


def _import_driver() -> None:
    import actors.driver.driver  # noqa: F401
