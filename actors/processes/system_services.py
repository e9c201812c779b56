"""The services of a driver's system, from their start to their end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import remove_placement_group

from hotcold.actors.faults.recovery import RecoveringExchange, RecoveryPolicy
from hotcold.actors.processes.cluster import await_actors
from hotcold.actors.protocol.failures import ServiceLost
from hotcold.actors.protocol.messages import (
    LOADING_WEIGHTS,
    PREDICTED_MODES,
    Fitted,
    ServiceSpec,
    SystemConfig,
)
from hotcold.actors.protocol.ray_memory import monitor_bytes, require_object_store
from hotcold.actors.setup.account import account, require_memory
from hotcold.actors.setup.connection import Connection, SpawnRelay, service_nodes
from hotcold.actors.setup.modes import no_predictors_note, threshold_note
from hotcold.actors.setup.placement_choice import plan_note
from hotcold.actors.setup.shards import arena_layout, served_config, service_specs
from hotcold.actors.setup.storage import storage_beside_gpu
from hotcold.model.config.build import read_config
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.numba_kernels.loops.mailbox import OPERATION, STOP

if TYPE_CHECKING:
    from hotcold.actors.driver.driver import Driver
    from hotcold.actors.kv_cache.page_store import PageStore

# Stages of a start, in order, beside LOADING_WEIGHTS.
STARTING = "starting services"
PREPARING = "looking at what each host has"
LOADING_KERNELS = "loading kernels"
_IDLE_S = 0.5  # between two polls for idleness: a new system mostly gets its first request at once
_START_S = 60.0  # for a service's process to start


class SystemServices:
    """Starts, loads and connects services, makes the driver that sends them requests, ends them.

    connection: the services that serve now; `actors.processes.scaling` replaces it
    exchange: sends requests to them; set once they have loaded, the same for the system's life
    """

    exchange: RecoveringExchange

    def __init__(
        self,
        system: SystemConfig,
        spawn: Callable[[ServiceSpec, str | None], Any],
        spawn_relay: SpawnRelay,
    ) -> None:
        """`spawn` starts a service's actor on a node; `spawn_relay` another host's relay."""
        self.system = system
        self.spawn, self.spawn_relay = spawn, spawn_relay
        config = read_config(system.model_path)
        checkpoint = Checkpoint(Path(system.model_path))
        self.config = served_config(system, config)
        specs = service_specs(system, self.config)
        shares_arena = system.exchange == "arena"
        self.node_id = ray.get_runtime_context().get_node_id() if shares_arena else None
        nodes = service_nodes(specs, system.hosts, self.node_id)
        handles = [spawn(spec, node) for spec, node in zip(specs, nodes, strict=True)]
        self.policy = RecoveryPolicy()
        self.connection = Connection(system, specs, handles, self.policy)
        self.stage = STARTING
        by_layer = dict(self.config.mean_row_bytes)
        # For the user: formats that differ from the files, approximations, what could not be had.
        conversion_note = "" if system.weight_dtype else checkpoint.conversion_note(by_layer)
        planned = plan_note(system, self.config)
        notes = conversion_note, threshold_note(system, self.config), planned
        self.notes: tuple[str, ...] = tuple(note for note in notes if note)
        self.device_name = "cpu"  # of the attention service
        self.changing = threading.Lock()  # held while services are loaded
        self.held_cpus: Any = None  # a placement group, once services have changed
        self._driver: Driver | None = None
        self._store: PageStore | None = None
        self._failure: BaseException | None = None
        self._preparing: threading.Thread | None = None  # services, for long prompts
        self._stopping = threading.Event()
        # The driver is imported, and its kernels compiled, while services start and load.
        threading.Thread(target=self._begin_driver, name="imports", daemon=True).start()

    @property
    def driver(self) -> Driver:
        """The driver. Errors: ServiceError while services load."""
        if self._driver is None:
            raise ServiceError("the system is still loading")
        return self._driver

    def _begin_driver(self) -> None:
        from hotcold.actors.driver.driver import compile_driver

        if self.system.storage is None:  # else kernels are compiled first (`precompile`)
            layout = arena_layout(self.system, self.config)
            with suppress(Exception):  # `Driver` will raise it
                compile_driver(self.system, layout, self.connection.topology)

    def require_alive(self) -> None:
        """Raise ServiceError if the driver has ended by itself; never while services load."""
        if self._driver is not None:
            self._driver.require_alive()

    def process_ids(self) -> dict[str, int]:
        """Process ids by service name. Errors: ServiceError while services load."""
        _ = self.driver  # raises while services load
        pids = self.connection.replacer.process_ids()
        return dict(zip(self.connection.names, pids, strict=True))

    def machines(self) -> dict[str, Any]:
        """The `machine_arithmetic` of each host but the driver's. Errors: HotcoldError."""
        topology, hosts = self.connection.topology, self.system.hosts[1:]
        firsts = [topology.on_host(host)[0] for host in hosts]
        return dict(zip(hosts, self.connection.call_each("machine", services=firsts), strict=True))

    def load(self) -> None:
        """Load and connect the services; concurrent callers all wait. Errors: HotcoldError."""
        with self.changing:
            if self._failure is not None:
                raise self._failure
            if self._driver is None:
                self._load()

    def _load(self) -> None:
        try:
            num_cpus = [spec.num_ray_cpus for spec in self.connection.specs]
            node_id = None if self.system.hosts else self.node_id
            await_actors(self.connection.handles, num_cpus, _START_S, node_id)
            self.connection.find(self.connection.topology.services)
            if self.system.shares_arena:
                require_object_store(arena_layout(self.system, self.config).num_bytes)
            if self.system.storage is not None:
                self._prepare_hosts()
            self.stage = LOADING_WEIGHTS
            if self.system.device == "cuda":
                self._fit_gpu()
            self.connection.load(self.connection.topology.services)
            self.connection.require_partition(self.config)
            self.stage = LOADING_KERNELS
            self.connection.open(arena_layout(self.system, self.config), self.spawn_relay)
            self.connection.attach(self.connection.topology.services)
            replacer = self.connection.replacer
            self.exchange = RecoveringExchange(
                self.connection.exchange,
                replacer.replace,
                self.connection.topology,
                self.policy,
            )
            from hotcold.actors.driver.driver import Driver

            topology = self.connection.topology
            store = self._page_store()
            self._driver = Driver(
                self.system,
                self.exchange,
                topology,
                self.prepare_matmul,
                page_store=store,
                begin_matmul=self.begin_matmul,
            )
            self.notes += (store.note,) if store is not None and store.note else ()
            self.connection.ready()
            self.exchange.start()
            if self.system.auto_mode:
                self._choose_mode(self._driver)
            self.stage = "ready"
            threading.Thread(target=self._prepare_prompts, name="prompts", daemon=True).start()
        except BaseException as error:
            self._failure = error
            self._kill()
            raise

    def _page_store(self) -> PageStore | None:
        """What keeps pages of the KV cache in files; None where none is wanted."""
        from hotcold.actors.kv_cache.page_store import PageStore

        def call(method: str, *arguments: Any) -> list[Any]:
            connection = self.connection
            caches = connection.topology.cache_services
            return connection.call_each(method, *arguments, services=caches)

        if self.system.prefix_cache_bytes:
            self._store = PageStore(call, lambda causes: self.exchange.renew(causes))
        return self._store

    def _prepare_hosts(self) -> None:
        """Make what a host needs once, before any service takes memory."""
        self.stage = PREPARING
        topology, hosts = self.connection.topology, self.system.hosts or ("",)
        firsts = [topology.on_host(host)[0] for host in hosts]
        notes = self.connection.call_each("prepare_host", self.system, services=firsts)
        self.notes += tuple(note for note in notes if note)

    def _choose_mode(self, driver: Driver) -> None:
        """Go on in the mode that is faster here, and note which."""
        if self.system.mode not in PREDICTED_MODES:
            self.notes += (no_predictors_note(self.config, self.system.mode),)
            return
        self.stage = "comparing modes"
        trial = driver.choose_mode()
        self.notes += (trial.line,)
        if trial.fastest != self.system.mode:
            self.system = replace(
                self.system, mode=trial.fastest, predictors_path="", gpu_predicts=()
            )

    def _fit_gpu(self) -> None:
        """Let the attention service fill its GPU; the CPU services then load the rest."""
        fitted: Fitted
        gpus = self.connection.topology.cache_services
        (fitted,) = self.connection.call_each("fit", self.system, services=gpus)
        self.system, self.device_name = fitted.system, fitted.device_name
        self.notes += (fitted.note,) if fitted.note else ()
        storage = storage_beside_gpu(self.system, self.config)
        self.system = replace(self.system, storage=storage)
        if self.system.device == "cpu":  # no GPU after all: the host needs more memory
            need = account(self.system, self.config)
            require_memory(need, monitor_bytes=monitor_bytes())
        specs = service_specs(self.system, self.config)
        self.connection = Connection(self.system, specs, self.connection.handles, self.policy)
        self.connection.find(self.connection.topology.services)

    def prepare_matmul(self) -> None:
        """Return once all services can compute long prompts.

        Runs in the engine's thread. Errors: RequestError where a service cannot, CacheLost after
        the attention service was replaced
        """
        while not self.connection.has_matmul:
            try:
                self.connection.prepare_prompts()
            except ServiceLost as error:
                self.exchange.renew(error.causes)

    def begin_matmul(self, wait_s: float) -> bool:
        """Whether `prepare_matmul` would return at once, or raise; waits up to `wait_s` for that.

        Services prepare meanwhile, and go on with steps of few tokens. Only the engine's thread
        calls this.
        """
        if self.connection.has_matmul:
            return True
        if self._preparing is None:
            self._preparing = threading.Thread(
                target=self.connection.await_prompts, name="matmul", daemon=True
            )
            self._preparing.start()
        self._preparing.join(wait_s)
        if self._preparing.is_alive():
            return False
        self._preparing = None
        return True

    def _prepare_prompts(self) -> None:
        """Let services prepare for long prompts, and the driver for all else, once it is idle."""
        driver, num_steps = self.driver, -1
        while not self._stopping.wait(_IDLE_S):
            try:
                load = driver.load()
            except ServiceError:
                return  # the system has ended, and tells those who ask
            before, num_steps = num_steps, driver.engine.num_steps
            if num_steps == before and not (load.num_running or load.num_waiting):
                self.connection.begin_prompts(self.connection.topology.services)
                driver.generator.compile_extras()
                return

    def stop(self) -> None:
        """End all threads, then the services' processes."""
        self._stopping.set()
        self.connection.replacer.close()
        try:
            if self._driver is not None:
                with suppress(HotcoldError):
                    self._end_threads(self._driver)
        finally:
            self._kill()

    def _end_threads(self, driver: Driver) -> None:
        """End the driver's threads and, unless the system has failed already, the services'.

        Errors:  HotcoldError of what ended the system, or of a service that fails meanwhile
        """
        try:
            driver.load()
        finally:
            driver.close()
            if self._store is not None:
                self._store.close()
        self.exchange.buffers.requests[:, OPERATION] = STOP
        self.exchange.inner.request(self.connection.topology.services)
        self.connection.call_each("join", 2.0)

    def _kill(self) -> None:
        self.connection.kill()
        if self.held_cpus is not None:
            remove_placement_group(self.held_cpus)
