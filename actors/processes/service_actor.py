"""A service's process: the actor's calls, while the service's threads do the work."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from hotcold.actors.exchange.call_exchange import ServiceReply, ServiceRequest
from hotcold.actors.exchange.service import Service
from hotcold.actors.processes.child_process import give_back_freed_memory, trim_heap
from hotcold.actors.processes.cluster import look_for_own_modules
from hotcold.actors.processes.host_setup import HostSetup
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import NotLoaded
from hotcold.actors.protocol.messages import Fitted, ServiceProgress, ServiceSpec, SystemConfig
from hotcold.actors.setup.account import service_bytes
from hotcold.actors.setup.host_files import (
    named_host,
    own_predictors,
    require_free_memory,
    require_same_model,
)
from hotcold.actors.setup.shards import served_config
from hotcold.actors.setup.storage import offloaded_share
from hotcold.actors.telemetry.vitals import CompileWatch, ServiceVitals, resident_bytes
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.placement.machine.core_affinity import CoreAffinity
from hotcold.placement.machine.memory_pages import FirstTouch
from hotcold.placement.machine.pinning import bind_thread, find_cores, find_place, pin_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotcold.actors.attention.cuda.device import Device
    from hotcold.actors.attention.cuda.load import CudaLoading
    from hotcold.actors.kv_cache.pool import OpenedPages, Page, SavedPages
    from hotcold.actors.kv_cache.prefix_file import PrefixFile


# Reads the service's weights, and reports bytes as it reads them.
Loader = Callable[[Callable[[int], None]], Service]


class ServiceActor:
    """Loads one service and runs it; a Ray actor, or an ordinary object in tests."""

    def __init__(self, spec: ServiceSpec) -> None:
        """Only pins the process to its cores, before imports start threads; see `load`."""
        look_for_own_modules()
        self.spec = spec
        self._place = None if spec.share is None else find_place(spec.share, spec.num_threads)
        if self._place is not None:
            pin_process(self._place.cores)
        self._loaded_bytes = 0
        self._compiling = CompileWatch()
        self._setup = HostSetup()
        self._service: Service | None = None
        self._loading: CudaLoading | None = None
        self._pages: PrefixFile | None = None
        self._arena_ref: Any = None
        self._is_seen = False  # its counters, by the driver

    def fit(self, system: SystemConfig) -> Fitted:
        """Open the GPU and allocate its memory for as much of `system` as fits.

        Errors:  HotcoldError; a system that may do without a GPU becomes one for the CPU instead
        """
        from hotcold.actors.attention.cuda.fit import fit_system

        try:
            device = self._open_device()
            config = read_config(system.model_path)
            self._loading, fitted = fit_system(device, system, config)
        except Exception as problem:  # CuPy's and CUDA's have no common base
            line = (str(problem) or type(problem).__name__).splitlines()[0]
            if system.requires_gpu:
                raise problem if isinstance(problem, HotcoldError) else ServiceError(line) from None
            return Fitted(replace(system, device="cpu"), f"the CPU computes everything: {line}")
        return fitted

    def _open_device(self) -> Device:
        from hotcold.actors.attention.cuda.fit import open_device

        return open_device()

    def prepare_host(self, system: SystemConfig) -> str:
        """Once on a host, before services load there; see `HostSetup.run`. Errors: HotcoldError."""
        require_same_model(self.spec)
        with named_host(self.spec):
            is_home = self.spec.host in ("", *system.hosts[:1])
            return self._setup.run(system, is_home)

    def load(self, spec: ServiceSpec | None = None) -> None:
        """Read this service's part of the checkpoint, as `spec` says. Errors: HotcoldError."""
        self.spec = self.spec if spec is None else spec
        if self.spec.storage is not None:
            give_back_freed_memory()
        require_same_model(self.spec)
        config = read_config(self.spec.path)
        num_bytes = service_bytes(self.spec, config)
        require_free_memory(self.spec, num_bytes)
        self._bind_thread(num_bytes)
        with named_host(self.spec):
            service = self._loader(config)(self._count)
        # A thread that waits for a GPU may run anywhere: all cores have threads that work.
        if self._place is not None and not self.spec.on_gpu:
            service.thread_cores = self._place.thread_cores
        elif self.spec.share is not None and not self.spec.on_gpu:
            cores = find_cores(self.spec.share, self.spec.num_threads)
            service.affinity = CoreAffinity(cores) if cores else None
        self._service = service

    def prepare_prompts(self) -> None:
        """Import and compile what only long prompts need; returns once that is done."""
        self._bind_thread(0)
        self._require_service().prepare_prompts()

    def begin_prompts(self) -> None:
        """Run `prepare_prompts` in the background; an error shows at the first long prompt."""
        self._bind_thread(0)
        service = self._require_service()

        def prepare() -> None:
            with suppress(Exception):
                service.prepare_prompts()
            trim_heap()

        threading.Thread(target=prepare, name="prompts", daemon=True).start()

    def _loader(self, config: ModelConfig) -> Loader:
        if self.spec.on_gpu:
            return self._gpu_loading(config).fill
        return _cpu_loader(self.spec, config, self._touch())

    def _gpu_loading(self, config: ModelConfig) -> CudaLoading:
        """What `fit` has allocated, or the same allocated by a replacement process."""
        from hotcold.actors.attention.cuda.load import CudaLoading

        loading, self._loading = self._loading, None
        if loading is not None and loading.is_of(self.spec):
            return loading
        loading = self._service = None  # a GPU has no room for both
        gc.collect()
        return CudaLoading(self._open_device(), config, self.spec)

    def _bind_thread(self, num_bytes: int) -> None:
        """Call before allocating: Ray runs calls in several threads, each with its own policy."""
        if self._place is not None and self.spec.share is not None:
            bind_thread(self._place, num_bytes, Path(self.spec.share.root))

    def _touch(self) -> FirstTouch | None:
        """Spreads new matrices over NUMA nodes; None with one node."""
        if self._place is None or len(self._place.nodes) < 2:
            return None
        return FirstTouch(self._place.thread_cores)

    def _count(self, num_bytes: int) -> None:
        self._loaded_bytes += num_bytes

    def held_neurons(self) -> list[np.ndarray] | None:
        """The neurons of each layer that it has loaded; None: it holds none."""
        self._require_service()
        return self.spec.neuron_ids

    def loaded(self) -> ServiceProgress:
        """Load progress."""
        setup = self._setup
        return ServiceProgress(
            self._loaded_bytes,
            self._compiling.is_compiling or setup.is_compiling,
            setup.written_bytes,
            setup.file_bytes,
        )

    def attach(self, layout: ArenaLayout, arena_refs: list[Any], is_drivers: bool = True) -> None:
        """Serve through the arena behind `arena_refs[0]`, or through a private one without it.

        `is_drivers`: it is the driver's arena, so the driver sees the counters.
        """
        self._bind_thread(0)
        self._is_seen = is_drivers and bool(arena_refs)
        if arena_refs:
            self._arena_ref = arena_refs[0]  # keeps the pages mapped
            arena = ray.get(self._arena_ref)
        else:
            arena = layout.new_arena()
        self._require_service().attach(layout, arena)

    def ping(self) -> int:
        """The process id. Errors: ServiceError if a thread has failed."""
        if self._service is not None:
            self._service.check([self.spec.index], 0)
        return os.getpid()

    def where(self) -> tuple[str, int]:
        """Ray node and process id."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def machine(self) -> dict[str, Any]:
        """What the bits of its results depend on; see `machine_arithmetic`."""
        from hotcold.actors.driver.arithmetic import machine_arithmetic

        return machine_arithmetic(self.spec.system.numa_root)

    def explain_failure(self) -> str:
        """Why the last request failed, in one line."""
        return self._require_service().explain(self.spec.index)

    def answer(self, request: ServiceRequest) -> ServiceReply:
        """Answer a request that comes as an actor call."""
        return self._require_service().answer(request)

    def try_out(self) -> None:
        """Answer an empty request; see `Service.try_out`. Errors: ServiceError."""
        self._require_service().try_out()

    def join(self, timeout_s: float) -> bool:
        """Whether the threads have ended, after a STOP request."""
        return self._service is None or self._service.join(timeout_s)

    def fired_counts(self) -> np.ndarray:
        """How often each neuron fired in COUNT_FFN requests, in loading order."""
        service: Any = self._require_service()
        return np.array(service.fired_counts)

    def vitals(self) -> ServiceVitals:
        """Process id, memory, device; counters too, where the driver cannot see them."""
        service = self._service
        counts = steps = None
        if service is not None and not self._is_seen and hasattr(service, "buffers"):
            counts = service.buffers.neuron_counts[self.spec.index].copy()
            steps = service.buffers.counted_steps[self.spec.index].copy()
        device = "cpu" if service is None else service.device_name
        return ServiceVitals(os.getpid(), resident_bytes(), device, counts, steps)

    def open_pages(self, session: bytes, identity: bytes, anew: bool) -> OpenedPages:
        """Open the file of KV cache pages; see `PrefixFile.open`."""
        from hotcold.actors.kv_cache.prefix_file import PrefixFile

        if self._pages is None:
            service: Any = self._require_service()
            config = read_config(self.spec.path)
            self._pages = PrefixFile.of(self.spec, service.cache_pages, config)
        return self._pages.open(session, identity, anew)

    def save_pages(
        self, session: bytes, used: Sequence[bytes], keys: Sequence[bytes], pages: Sequence[Page]
    ) -> SavedPages | None:
        """Write pages to it; see `PrefixFile.save`."""
        return None if self._pages is None else self._pages.save(session, used, keys, pages)

    def load_pages(self, session: bytes, keys: Sequence[bytes], pages: Sequence[Page]) -> int:
        """Read pages from it; see `PrefixFile.load`."""
        return 0 if self._pages is None else self._pages.load(session, keys, pages)

    def device_report(self, measure: bool) -> dict[str, float]:
        """Memory and times of the GPU (`CudaAttentionService.device_report`); {} without a GPU."""
        service: Any = self._require_service()
        return service.device_report(measure) if self.spec.on_gpu else {}

    def cpu_seconds(self) -> float:
        """CPU seconds that the process has used."""
        return time.process_time()

    def _require_service(self) -> Service:
        if self._service is None:
            name = self.spec.name
            raise NotLoaded(
                f"the {name} service died, and a new process is not loaded; start again"
            )
        return self._service


def _cpu_loader(spec: ServiceSpec, config: ModelConfig, touch: FirstTouch | None) -> Loader:
    """The loader of the service that `spec` describes; it imports only what that service needs.

    `touch` spreads new matrices over NUMA nodes.
    """
    if spec.cache is not None:
        from hotcold.actors.attention.attention_service import load_attention_service

        return lambda on_bytes: load_attention_service(spec, config, on_bytes, touch)
    if spec.storage is not None:
        from hotcold.actors.cpu.offloaded_service import load_offloaded_service

        stored = served_config(spec.system, config)
        share, ahead = offloaded_share(spec, stored), own_predictors(spec)
        return lambda on_bytes: load_offloaded_service(spec, config, share, ahead, on_bytes)
    if spec.system.down_transposed:
        from hotcold.actors.cpu.dense_service import load_dense_service

        return lambda on_bytes: load_dense_service(spec, config, on_bytes, touch)
    from hotcold.actors.cpu.cpu_service import load_cpu_service

    return lambda on_bytes: load_cpu_service(spec, config, on_bytes, touch)
