"""Systems on a real Ray whose GPU service is on a device made of NumPy."""

from __future__ import annotations

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
    """A GPU service's process; while the file `broken` is there, its next launch fails."""

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


def _spawn(broken: str, spec: ServiceSpec, node_id: str | None) -> Any:
    if spec.index > 0:
        return spawn_service(spec, node_id)
    actor = ray.remote(StandInService)
    options = {"num_cpus": 0, "max_concurrency": 4, "max_task_retries": 0, "max_restarts": -1}
    return actor.options(**options).remote(spec, broken)


def start_stand_in(system: SystemConfig, broken: Path) -> System:
    """A system, loaded; `broken` is as in `StandInService`."""
    spawn = partial(_spawn, str(broken))
    made = remote_driver().options(num_cpus=0, max_concurrency=64)
    driver = made.remote(system, spawn, spawn_relay)
    handle = System(driver, owned=True)
    handle._await_load(lambda progress: None)
    return handle
