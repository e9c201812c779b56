"""How far a system's services are with loading, in words and bytes."""

from collections.abc import Sequence
from contextlib import suppress

import ray

from hotcold.actors.protocol.messages import (
    LOADING_WEIGHTS,
    WRITING_NEURONS,
    LoadProgress,
    ServiceProgress,
)
from hotcold.actors.setup.connection import Connection

STARTING = "starting services"
# Before any process takes memory, and what of it is made.
PREPARING = "looking at what each host has"
COMPILING = "compiling kernels, once"
LOADING_KERNELS = "loading kernels"
_ANSWER_S = 1.0  # for the services to tell it; one that compiles may not answer


class LoadingServices:
    """Asks services how far they are; remembers what they said last."""

    def __init__(self, total_bytes: int, dtype: str) -> None:
        """Services read `total_bytes` of weights, together; kernels are compiled for `dtype`."""
        self._total_bytes = total_bytes
        self._dtype = dtype
        self._last: Sequence[ServiceProgress] = []

    def progress(self, services: Connection, stage: str, notes: tuple[str, ...]) -> LoadProgress:
        """How far they are; `stage` is what they all do now."""
        total = self._total_bytes
        if stage == STARTING:
            return LoadProgress(0, total, stage)
        if stage not in (PREPARING, LOADING_WEIGHTS, LOADING_KERNELS):
            return LoadProgress(total, total, stage, notes)
        with suppress(ray.exceptions.RayError):
            calls = [handle.loaded.remote() for handle in services.handles]
            self._last = ray.get(calls, timeout=_ANSWER_S)
        if stage == PREPARING:
            return self._prepared(total)
        loaded = sum(each.loaded_bytes for each in self._last)
        num_compiled = sum(each.num_compiled for each in self._last)
        if stage == LOADING_KERNELS:
            loaded, is_compiling = total, True
        else:
            is_compiling = any(each.is_compiling for each in self._last)
        if num_compiled and is_compiling:
            stage = f"compiling kernels for {self._dtype}, once: {num_compiled} so far"
        return LoadProgress(loaded, total, stage, notes)

    def _prepared(self, total: int) -> LoadProgress:
        if file_bytes := sum(each.file_bytes for each in self._last):
            written = sum(each.written_bytes for each in self._last)
            return LoadProgress(written, file_bytes, WRITING_NEURONS)
        is_compiling = any(each.is_compiling for each in self._last)
        return LoadProgress(0, total, COMPILING if is_compiling else PREPARING)
