"""Systems on a real Ray of which one service is a stand-in, whose faults a file begins."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from hotcold.actors.launch import remote_driver, spawn_relay, spawn_service
from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.system import System
from tests.actors.numpy_device import NumpyDevice


class StandInService(ServiceActor):
    """A GPU service's process on a device made of NumPy.

    While the file `broken` is there, its next launch fails.
    """

    index = 0

    def __init__(self, spec: ServiceSpec, broken: str) -> None:
        super().__init__(spec)
        self._broken = Path(broken)

    def _open_device(self) -> NumpyDevice:
        return NumpyDevice(fails_at=lambda launch: self._take_broken())

    def _take_broken(self) -> bool:
        if not self._broken.exists():
            return False
        self._broken.unlink()
        return True


class WithoutGpu(StandInService):
    """Its GPU cannot be opened."""

    def _open_device(self) -> NumpyDevice:
        raise RuntimeError("the GPU cannot be used")


class Forgetful(StandInService):
    """A CPU service that loses a neuron on the way, while the file `broken` is there."""

    index = 1

    def load(self, spec: ServiceSpec | None = None) -> None:
        """See `ServiceActor`."""
        if spec is not None and self._broken.exists():
            ids = spec.neuron_ids or []
            spec = replace(spec, neuron_ids=[ids[0][1:], *ids[1:]])
        super().load(spec)


def _spawn(broken: str, kind: type[StandInService], spec: ServiceSpec, node_id: str | None) -> Any:
    if spec.index != kind.index:
        return spawn_service(spec, node_id)
    actor = ray.remote(kind)
    options = {"num_cpus": 0, "max_concurrency": 4, "max_task_retries": 0, "max_restarts": -1}
    return actor.options(**options).remote(spec, broken)


def start_stand_in(
    system: SystemConfig, broken: Path, kind: type[StandInService] = StandInService
) -> System:
    """A system, loaded, whose service number `kind.index` is of that kind."""
    spawn = partial(_spawn, str(broken), kind)
    made = remote_driver().options(num_cpus=0, max_concurrency=64)
    driver = made.remote(system, spawn, spawn_relay)
    handle = System(driver, owned=True)
    try:
        handle._await_load(lambda progress: None)
    except BaseException:
        handle.stop()
        raise
    return handle
