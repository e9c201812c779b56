"""The systems of `hotcold serve`: checked before a start, started and ended, found by commands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import click
import psutil

from hotcold.actors.exchange.pulse import Pulse
from hotcold.actors.protocol.messages import (
    COMPILING_LONGER,
    DriverLoad,
    LoadProgress,
    SystemConfig,
)
from hotcold.actors.protocol.options import OPTIONS, PATHS, SystemOptions
from hotcold.actors.setup.account import account
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.system import System
from hotcold.jobs.running.identity import identity_of, model_text, resolved_options
from hotcold.jobs.running.registry import Registration
from hotcold.jobs.support.loading import require_bundles, running_system
from hotcold.model.errors import HotcoldError, ServiceError, UsageError, shown
from hotcold.model.files.locate import locate_model, model_name
from hotcold.ui.api.backend import Backend
from hotcold.ui.model_loading import Need

_TIMEOUT_POLLS = 60  # seconds in which a driver says nothing: requests give up earlier
_ENDED_S = 10.0
_CLOSED_S = 20.0
_RAY = ("raylet", "gcs_server")


@dataclass(frozen=True)
class ModelPlan:
    """One model and the system that will hold it."""

    name: str  # in requests
    model: str  # of `model_text`
    system: SystemConfig
    need: Need


def model_plans(models: Sequence[str], options: SystemOptions) -> list[ModelPlan]:
    """A plan for each model, as if alone on this machine; for the demo model where none is named.

    Errors:  HotcoldError; UsageError for two of one name, and for options of one model alone
    """
    given = [OPTIONS[name].flag for name in PATHS if getattr(options, name) is not None]
    if given and len(models) > 1:
        raise UsageError(
            f"{given[0]} is of one model, and these are {len(models)}; leave it out, or serve one"
        )
    if len(models) < 2:
        return [_plan(models[0] if models else None, options)]
    plans = []
    for model in models:
        try:
            plans.append(_plan(model, options))
        except HotcoldError as problem:
            raise UsageError(f"{shown(model)}: {problem}") from problem
    by_name = {plan.name: plan for plan in plans}
    for plan in plans:
        if by_name[plan.name] is not plan:
            raise UsageError(
                f"two models are called {plan.name!r}, by which requests could not tell them "
                "apart; give one of the folders or files another name"
            )
    return plans


def _plan(model: str | None, options: SystemOptions) -> ModelPlan:
    path = locate_model(model)
    system, config = prepare_system(path, options)
    found = account(system, config)
    shared = found.arena_bytes + found.predictor_bytes
    need = Need(found.total_bytes, system.device != "cpu", shared)
    return ModelPlan(model_name(model, path), model_text(model), system, need)


def tell_unlisted(problem: Exception) -> None:
    """Say why a system is not in the registry."""
    click.echo(f"other commands will not find this system: {problem}", err=True)


class SystemStarter:
    """Starts and ends the systems of one server, all in the private Ray of the first.

    `lost` and `start_first` are called in the main thread, `start` and `end` in any other.
    """

    def __init__(
        self,
        registration: Registration | None,
        plans: Sequence[ModelPlan],
        options: SystemOptions,
        is_kept: bool = False,
        tell: Callable[[str, str], object] = lambda event, model: None,
    ) -> None:
        """`registration` None: no command finds them. `is_kept`: another server's system of the
        same model and options is not started a second time. `tell` is called with what happens to
        a model's services.
        """
        self._registration = registration
        self._is_kept = is_kept
        self._plans = {plan.name: plan for plan in plans}
        self._options = options
        self._pulses: dict[Backend, Pulse] = {}
        self._tell = tell
        self._num_replaced: dict[Backend, int] = {}
        self._compiling: set[Backend] = set()  # of which it was told that kernels are compiled
        self._is_closed = False
        self._working = threading.Lock()  # one starts or ends at a time
        self._ray: list[psutil.Process] = []

    def start_first(
        self, backend: Backend, show: Callable[[LoadProgress], None], stack: ExitStack
    ) -> System:
        """Start the first system, with a progress bar; it and Ray end with `stack`.

        `show` is called with its progress. Errors: HotcoldError
        """
        plan = self._plans[backend.name]
        others = [one.system for one in self._plans.values() if one is not plan]
        self._register(plan)
        system = stack.enter_context(running_system(plan.system, show, others))
        stack.callback(self.unregister_all)  # before the system ends
        children = psutil.Process().children()
        self._ray = [process for process in children if process.name() in _RAY]
        self._answer(backend, system)
        return system

    def start(self, backend: Backend) -> System:
        """Start the system of a model. Errors: HotcoldError."""
        plan = self._plans[backend.name]
        with self._working, ExitStack() as undo:
            self._register(plan)
            undo.callback(self._unregister, plan.name)
            self._require_open()
            require_bundles(plan.system)
            system = System.start(plan.system, on_progress=lambda _: self._require_open())
            undo.callback(system.end)
            self._answer(backend, system)
            undo.pop_all()
            return system

    def end(self, backend: Backend, system: System) -> None:
        """End a system, and wait until its processes have ended."""
        with self._working:
            self._pulses.pop(backend, None)
            self._num_replaced.pop(backend, None)
            self._compiling.discard(backend)
            self._unregister(backend.name)
            processes = []
            with suppress(HotcoldError):
                for pid in system.call("processes").values():
                    with suppress(psutil.NoSuchProcess):
                        processes.append(psutil.Process(pid))
            system.end()
            psutil.wait_procs(processes, timeout=_ENDED_S)  # their memory is free then

    def lost(self) -> list[tuple[Backend, ServiceError]]:
        """The loaded models whose systems have failed since the last call, and how."""
        found = []
        for backend, pulse in list(self._pulses.items()):
            try:
                if (load := pulse.poll(_TIMEOUT_POLLS)) is not None:
                    self._tell_replaced(backend, load)
                    if load.is_compiling and backend not in self._compiling:
                        self._tell(COMPILING_LONGER, backend.name)
                        self._compiling.add(backend)
            except ServiceError as problem:
                if backend.is_loaded:  # else it was just unloaded
                    found.append((backend, problem))
                    self._pulses.pop(backend, None)
        return found

    def _tell_replaced(self, backend: Backend, load: DriverLoad) -> None:
        before = self._num_replaced.get(backend, 0)
        self._num_replaced[backend] = load.num_replaced  # a new driver counts anew
        if load.num_replaced > before:
            self._tell(load.last_replaced, backend.name)

    def require_ray(self) -> None:
        """Raise ServiceError where no system can run or be started any more."""
        for process in self._ray:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise ServiceError("Ray has ended, so no model can run; restart `hotcold serve`")

    def unregister_all(self) -> None:
        """Remove all systems from the registry, so that no command finds them; may be repeated."""
        if self._registration is not None:
            self._registration.close()

    def close(self) -> None:
        """Refuse new starts, and wait for those under way. May be repeated."""
        self._is_closed = True
        if self._working.acquire(timeout=_CLOSED_S):
            self._working.release()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ServiceError("the server is being stopped")

    def publish(self, backend: Backend, system: SystemConfig) -> None:
        """Say in the registry what runs now. Errors: OSError."""
        if self._registration is not None:
            # Loading may have written files of the model.
            identity = identity_of(self._plans[backend.name].model, self._options)
            resolved = resolved_options(system)
            self._registration.publish(backend.name, identity=identity, resolved=resolved)

    def _register(self, plan: ModelPlan) -> None:
        """Register a system that is about to start; where that cannot be, a line says so.

        Errors:  UsageError where another server keeps the same
        """
        if self._registration is not None:
            identity = identity_of(plan.model, self._options)
            try:
                self._registration.add(plan.name, identity, self._is_kept)
            except (UsageError, OSError) as problem:
                if self._is_kept:
                    raise
                tell_unlisted(problem)

    def _answer(self, backend: Backend, system: System) -> None:
        """Answer requests with a system that has loaded."""
        self.publish(backend, system.call("describe"))
        self._pulses[backend] = Pulse("driver", partial(system.begin, "driver_load"))

    def _unregister(self, name: str) -> None:
        if self._registration is not None:
            self._registration.remove(name)
