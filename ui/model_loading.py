"""Loads models with their first request; unloads the least recently used where memory is short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from hotcold.actors.system import System
from hotcold.model.byte_sizes import binary_text
from hotcold.model.errors import HotcoldError
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.errors import ApiError, unavailable


@dataclass(frozen=True)
class Need:
    """The memory and devices of a loaded model, by its plan."""

    memory_bytes: int
    uses_gpu: bool = False  # which holds one model at a time
    reserved_bytes: int = 0  # of memory_bytes, in shared memory, which the first start reserves


class Starter(Protocol):
    """Starts and ends systems; both take long and run in another thread."""

    def start(self, backend: Backend) -> System:
        """A system that has loaded the model. Errors: HotcoldError."""

    def end(self, backend: Backend, system: System) -> None:
        """Return once nothing of the system is left."""


class ModelLoader:
    """Decides which models are loaded; called in the server's loop."""

    def __init__(
        self,
        starter: Starter,
        memory_bytes: int,
        free_bytes: Callable[[], int],
        tell: Callable[[str, str], None],
    ) -> None:
        """`memory_bytes`: limit of all models together; `free_bytes`: the machine's free memory.

        `tell` is called with an event and the model's name.
        """
        self._starter = starter
        self._memory_bytes = memory_bytes
        self._free_bytes = free_bytes
        self._tell = tell
        self._needs: dict[Backend, Need] = {}
        self._bringing: dict[Backend, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def add(self, backend: Backend, need: Need) -> None:
        """Add a model, loaded or not."""
        self._needs[backend] = need

    @property
    def loaded(self) -> list[Backend]:
        """The loaded models."""
        return [backend for backend in self._needs if backend.is_loaded]

    @property
    def has_several(self) -> bool:
        """Whether there are several models, so that unloading one makes room for another."""
        return len(self._needs) > 1

    async def load(self, backend: Backend) -> None:
        """Load a model, once for all requests that wait for it, even if they are cancelled.

        Errors:  ApiError 503, where memory is short or it cannot be loaded
        """
        if backend not in self._bringing:
            loading = asyncio.create_task(self._load(backend))
            self._bringing[backend] = loading
            loading.add_done_callback(lambda done: self._forget(backend, done))
        await asyncio.shield(self._bringing[backend])

    async def drop(self, backend: Backend, reason: str) -> None:
        """Unload a model whose system has failed; the next request loads it again."""
        if backend.is_loaded:
            await self._end(backend, self._taken(backend, f"lost ({reason})"))

    def unload(self, backend: Backend) -> None:
        """Unload a model if no request needs it. Its memory is free some time after."""
        if backend.is_loaded and backend.is_idle:
            ending = asyncio.create_task(self._end(backend, self._taken(backend, "given up")))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _taken(self, backend: Backend, event: str) -> System:
        """Detach its system, which the caller ends; requests wait until it is loaded again."""
        self._tell(event, backend.name)
        system = backend.system
        backend.detach()
        return system

    async def _end(self, backend: Backend, system: System) -> None:
        async with self._one_at_a_time:
            await asyncio.to_thread(self._starter.end, backend, system)

    def _forget(self, backend: Backend, done: asyncio.Task[None]) -> None:
        del self._bringing[backend]
        if not done.cancelled():
            done.exception()  # requests that wait get it; there may be none left

    async def _load(self, backend: Backend) -> None:
        async with self._one_at_a_time:
            await self._make_room(backend)
            backend.is_loading = True
            self._tell("loading", backend.name)
            try:
                backend.attach(await asyncio.to_thread(self._starter.start, backend))
            except HotcoldError as problem:
                text = f"the model {backend.name!r} cannot be loaded: {problem}"
                raise unavailable(text, "not_loaded") from problem
            finally:
                backend.is_loading = False
            backend.metrics.add_start()
            self._tell("loaded", backend.name)
        backend.unload_if_idle()  # the requests for it may have been cancelled

    async def _make_room(self, backend: Backend) -> None:
        """Unload idle models until this one fits. Errors: ApiError 503 where it does not."""
        need = self._needs[backend]
        while True:
            lacking = need.memory_bytes - need.reserved_bytes - self._free_bytes()
            loaded = self.loaded
            if self._fits(need, loaded) and lacking <= 0:
                return
            busy = [one for one in loaded if not one.is_idle]
            idle = [one for one in loaded if one.is_idle]
            # Unload none if the memory of all of them would not be enough.
            gained = sum(self._needs[one].memory_bytes for one in idle)
            if not idle or lacking > gained or not self._fits(need, busy):
                raise _no_room(backend, need, busy)
            oldest = min(idle, key=lambda one: one.used_at)
            system = self._taken(oldest, "given up")
            await asyncio.to_thread(self._starter.end, oldest, system)

    def _fits(self, need: Need, others: Iterable[Backend]) -> bool:
        beside = [self._needs[other] for other in others]
        if need.uses_gpu and any(other.uses_gpu for other in beside):
            return False
        taken = sum(other.memory_bytes for other in beside)
        return taken + need.memory_bytes <= self._memory_bytes


def _no_room(backend: Backend, need: Need, busy: Iterable[Backend]) -> ApiError:
    names = " and ".join(f"{one.name!r}" for one in busy)
    beside = f"{names}, in use now" if names else "what other programs have taken of the memory"
    size = binary_text(need.memory_bytes)
    return unavailable(
        f"the model {backend.name!r} needs {size} and has no room beside {beside}; try again later",
        "no_room",
    )
