"""A service's process: what its actor answers while its threads do the work."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from hotcold.actors.exchange.call_exchange import ServiceReply, ServiceRequest
from hotcold.actors.exchange.service import Service
from hotcold.actors.processes.cluster import look_for_own_modules
from hotcold.actors.processes.freed_memory import give_back_freed_memory
from hotcold.actors.processes.host_setup import HostSetup
from hotcold.actors.processes.service_loading import Loader, service_loader
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.messages import Fitted, ServiceProgress, ServiceSpec, SystemConfig
from hotcold.actors.protocol.step_sizes import MatmulChoice
from hotcold.actors.setup.host_files import (
    named_host,
    require_room,
    require_same_model,
    weight_bytes,
)
from hotcold.actors.telemetry.compiling import CompileCounter
from hotcold.actors.telemetry.vitals import ServiceVitals, resident_bytes
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.placement.machine.core_affinity import CoreAffinity
from hotcold.placement.machine.first_touch import FirstTouch
from hotcold.placement.machine.pinning import find_cores, find_place, pin_process, settle_thread

if TYPE_CHECKING:
    from hotcold.actors.attention.cuda.device import Device
    from hotcold.actors.attention.cuda.load import CudaLoading


class ServiceActor:
    """Loads one service and runs it; a Ray actor, or an ordinary object in tests."""

    def __init__(self, spec: ServiceSpec) -> None:
        """Light: loading is `load`, which is told of the neurons too, so that progress can be asked
        meanwhile.

        The process is kept on its cores here, before anything that starts threads is imported.
        """
        look_for_own_modules()
        self.spec = spec
        self._place = None if spec.share is None else find_place(spec.share, spec.num_threads)
        if self._place is not None:
            pin_process(self._place.cores)
        self._loaded_bytes = 0
        self._compiled = CompileCounter()
        self._setup = HostSetup()
        self._service: Service | None = None
        self._loading: CudaLoading | None = None
        self._arena_ref: Any = None
        self._is_seen = False  # what it counts, by the driver

    def fit(self, system: SystemConfig) -> Fitted:
        """Open the GPU and take its memory for as much of `system` as fits.

        Errors:  HotcoldError; where the system can do without a GPU it is then one without
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
            return self._setup.run(system, is_home=self.spec.index == 1)

    def load(self, spec: ServiceSpec | None = None) -> None:
        """Read this service's own part of the checkpoint; of `spec` instead of the one from before.

        Errors:  HotcoldError
        """
        self.spec = self.spec if spec is None else spec
        if self.spec.storage is not None:
            give_back_freed_memory()
        require_same_model(self.spec)
        config = read_config(self.spec.model_path)
        num_bytes = weight_bytes(self.spec, config)
        require_room(self.spec, num_bytes)
        self._settle(num_bytes)
        with named_host(self.spec):
            service = self._loader(config)(self._count)
        # One that waits for a GPU goes where a core is free: all of them have threads that work.
        if self._place is not None and self.spec.gpu is None:
            service.thread_cores = self._place.thread_cores
        elif self.spec.share is not None and self.spec.gpu is None:
            cores = find_cores(self.spec.share, self.spec.num_threads)
            service.keeper = CoreAffinity(cores) if cores else None
        self._service = service

    def choose_matmul(self) -> MatmulChoice:
        """How this process would best multiply long prompts; it tries."""
        from hotcold.actors.cpu.matmul_choice import choose_matmul

        return choose_matmul()

    def use_matmul(self, choice: MatmulChoice) -> None:
        """Multiply long prompts as `choice` says; returns once it is ready to."""
        self._settle(0)
        self._require_service().use_matmul(choice)

    def prepare_prompts(self) -> None:
        """Begin in the background what only long prompts need; what fails, fails there again."""
        self._settle(0)
        service = self._require_service()

        def prepare() -> None:
            with suppress(Exception):
                service.prepare_prompts()

        threading.Thread(target=prepare, name="prompts", daemon=True).start()

    def _loader(self, config: ModelConfig) -> Loader:
        if self.spec.gpu is not None:
            return self._gpu_loading(config).fill
        return service_loader(self.spec, config, self._touch())

    def _gpu_loading(self, config: ModelConfig) -> CudaLoading:
        """What `fit` took, or the same taken by a process that comes in another's place."""
        from hotcold.actors.attention.cuda.load import CudaLoading

        loading, self._loading = self._loading, None
        if loading is None or not loading.is_of(self.spec):
            loading = CudaLoading(self._open_device(), config, self.spec)
        return loading

    def _settle(self, num_bytes: int) -> None:
        """Before memory is taken: Ray answers calls in several threads, each has its own policy."""
        if self._place is not None and self.spec.share is not None:
            settle_thread(self._place, num_bytes, Path(self.spec.share.root))

    def _touch(self) -> FirstTouch | None:
        """How new matrices are spread over several nodes; on one, all memory is near."""
        if self._place is None or len(self._place.nodes) < 2:
            return None
        return FirstTouch(self._place.thread_cores)

    def _count(self, num_bytes: int) -> None:
        self._loaded_bytes += num_bytes

    def held_neurons(self) -> list[np.ndarray] | None:
        """The neurons of each layer that it was loaded with; None: it holds none."""
        self._require_service()
        return self.spec.neuron_ids

    def loaded_bytes(self) -> int:
        """Bytes of weights read so far."""
        return self._loaded_bytes

    def loaded(self) -> ServiceProgress:
        """How far this service is."""
        compiled, setup = self._compiled, self._setup
        return ServiceProgress(
            self._loaded_bytes,
            compiled.num_begun,
            compiled.is_compiling or setup.is_compiling,
            setup.written_bytes,
            setup.file_bytes,
        )

    def attach(self, layout: ArenaLayout, arena_refs: list[Any], is_drivers: bool = True) -> None:
        """Start serving through the arena behind `arena_refs[0]`, or a private one without it.

        `is_drivers`: the driver sees that arena, and with it what is counted.
        """
        self._settle(0)
        self._is_seen = is_drivers and bool(arena_refs)
        if arena_refs:
            self._arena_ref = arena_refs[0]  # held, so that the pages stay mapped
            arena = ray.get(self._arena_ref)
        else:
            arena = layout.new_arena()
        self._require_service().attach(layout, arena)
        if layout.products is not None:
            self.prepare_prompts()

    def ping(self) -> int:
        """The process id; an answer says that the process lives and its threads too.

        Errors:  ServiceError if a thread has failed
        """
        if self._service is not None:
            self._service.check([self.spec.index], 0)
        return os.getpid()

    def where(self) -> tuple[str, int]:
        """The node, and the process id there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def explain_failure(self) -> str:
        """Why the last request failed, in one line."""
        service = self._require_service()
        return service.explain(self.spec.index)

    def answer(self, question: ServiceRequest) -> ServiceReply:
        """ServiceReply a request that came as an actor call."""
        return self._require_service().answer(question)

    def try_out(self) -> None:
        """ServiceReply an empty question; see `Service.try_out`. Errors: ServiceError."""
        self._require_service().try_out()

    def join(self, timeout_s: float) -> bool:
        """True when the threads have ended, after a STOP request."""
        return self._service is None or self._service.join(timeout_s)

    def fired_counts(self) -> np.ndarray:
        """How often each neuron of the shard fired in COUNT_FFN requests, in loading order."""
        service: Any = self._require_service()
        return np.array(service.fired_counts)

    def vitals(self) -> ServiceVitals:
        """Process id, memory, device; what was counted too, where the driver cannot see that."""
        service = self._service
        counts = steps = None
        if service is not None and not self._is_seen and hasattr(service, "buffers"):
            counts = service.buffers.neuron_counts[self.spec.index].copy()
            steps = service.buffers.counted_steps[self.spec.index].copy()
        device = "cpu" if service is None else service.device_name
        return ServiceVitals(os.getpid(), resident_bytes(), device, counts, steps)

    def device_report(self, measure: bool) -> dict[str, float]:
        """See `CudaService.device_report`; {} of a service without a GPU."""
        service: Any = self._require_service()
        return service.device_report(measure) if self.spec.gpu is not None else {}

    def cpu_seconds(self) -> float:
        """CPU seconds that the process has used; an idle service uses none."""
        return time.process_time()

    def _require_service(self) -> Service:
        if self._service is None:
            raise ServiceError(f"the {self.spec.name} service is not loaded")
        return self._service
