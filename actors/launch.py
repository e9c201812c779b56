"""Plain classes made into Ray actors: the only place that says so."""

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hotcold.actors.private_ray.closed_ray import closed_to_others, require_closed
from hotcold.actors.private_ray.start import init_private
from hotcold.actors.private_ray.temp_folder import LONGEST_CHOSEN, SessionFolder, base_folder
from hotcold.actors.processes.cluster import NAMESPACE, OwnFolders, keep_stdout_clean, numa_slots
from hotcold.actors.processes.driver_actor import DriverActor
from hotcold.actors.processes.relay_actor import RelayActor
from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.ray_memory import MONITOR_EVERY_MS
from hotcold.actors.protocol.shared_memory import require_shared_memory, reserve_object_store
from hotcold.actors.setup.connection import node_ids
from hotcold.model.current_folder import elsewhere, environment_of_python
from hotcold.model.errors import ServiceError

_log = logging.getLogger(__name__)
_MIN_OBJECT_STORE_BYTES = 80 << 20
_CONCURRENT_STREAMS = 64  # requests that wait or run
_MIN_ROOM_BYTES = 4 << 20  # for logs of a session, which begins with 0.2 MB of them
_LOOPBACK = "127.0.0.1"
_REACHED_S = 10.0
_STARTS = 3  # of a Ray of our own; its node has 30 s for each, which a busy machine may take
_ENDED_S = 10.0  # for processes that were killed
_FIRST_WORKERS = 3  # processes: of the driver, the GPU service and a CPU service
_CONTROL_CALLS = 8  # at once, whatever their number: calls in the group CONTROL, which are short
CONTROL = "control"

# Ray otherwise keeps a record of every call, and there are many: 250 MB after an hour.
_UNRECORDED = {"enable_task_events": False}

RemoteDriver = ray.remote(concurrency_groups={CONTROL: _CONTROL_CALLS}, **_UNRECORDED)(DriverActor)
RemoteService = ray.remote(**_UNRECORDED)(ServiceActor)
RemoteRelay = ray.remote(**_UNRECORDED)(RelayActor)


def start_local_ray(
    num_cpus: int, arena_bytes: int, num_gpus: int = 0, bits_bytes: int = 0
) -> None:
    """Start a Ray of our own on this machine, without a dashboard; it ends with this process.

    Its object store holds the arena and little else: weights live in the actors. There is room for
    a second one, which lacks the `bits_bytes` of predictors that the first has besides. All of it
    is taken of /dev/shm at once, so that nothing that fills /dev/shm later can be in its way.
    Errors:  MemoryBudgetError where /dev/shm is too small; ServiceError where others could use this
             Ray, the folder for Ray's files is full, or the loopback is down; those of `ray.init`,
             of any kind
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # workers otherwise run at niceness 15
    # What fits was checked; Ray would kill services while there are megabytes for them.
    os.environ.setdefault(MONITOR_EVERY_MS, "0")
    store_bytes = max(_MIN_OBJECT_STORE_BYTES, 2 * arena_bytes) + bits_bytes
    require_shared_memory(store_bytes)
    _require_room()
    _require_loopback()
    options = {
        "address": "local",
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "include_dashboard": False,
        "object_store_memory": store_bytes,
        "logging_level": "error",
        "log_to_driver": False,
        "namespace": NAMESPACE,
    }
    others = _children()
    # Ray's processes stay in the folder that this one stands in now, and its workers would look for
    # modules there.
    with elsewhere(), _environment(environment_of_python()):
        try:
            init_private(_FIRST_WORKERS, job_config=OwnFolders(), **options)
        except Exception as error:  # of any kind, where this Ray is not like those that were known
            _end(_children() - others)
            _init(options)
            _log.warning("Ray has started in its own way, which takes longer: %s", error)
    require_closed()
    keep_stdout_clean()
    for process in _children() - others:
        with suppress(psutil.NoSuchProcess):
            if process.name() == "raylet":
                reserve_object_store(process.pid)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Let these be variables of what is started meanwhile."""
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ |= {name: before[name] for name in variables if name in before}


def _require_room() -> None:
    """Where they cannot write, Ray's processes die without a word. Errors: ServiceError."""
    folder = base_folder()
    if not folder.is_dir():
        raise ServiceError(
            f"Ray could not be started: {folder} is no directory; set RAY_TMPDIR to one"
        )
    if len(os.fsencode(folder)) > LONGEST_CHOSEN:
        raise ServiceError(
            f"{folder}: its path is too long for the sockets of Ray; set RAY_TMPDIR to a folder "
            f"whose path has at most {LONGEST_CHOSEN} bytes"
        )
    free = shutil.disk_usage(folder).free
    if free < _MIN_ROOM_BYTES:
        raise ServiceError(
            f"{folder}, where Ray writes its logs, has {free / 1e6:.1f} MB free, and "
            f"{_MIN_ROOM_BYTES / 1e6:.0f} MB are needed; make room there, or set RAY_TMPDIR to "
            "another folder"
        )


def _require_loopback() -> None:
    """Ray's processes try for minutes to reach each other, without a word. Errors: ServiceError."""
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as door,
            socket.create_connection(door.getsockname(), timeout=_REACHED_S),
        ):
            pass
    except OSError as problem:
        raise ServiceError(
            f"this machine does not reach itself at {_LOOPBACK} ({problem.strerror or problem}), "
            "where the processes of a system talk; bring the loopback up: ip link set lo up"
        ) from None


def _init(options: dict[str, Any]) -> None:
    """`ray.init`, again where the machine was too busy for it.

    Its folder is removed by the next start after this process has ended.
    """
    others = _children()
    folder = SessionFolder()
    for starts_left in reversed(range(_STARTS)):
        try:
            with closed_to_others(folder.path):
                ray.init(_temp_dir=str(folder.temp_dir), job_config=OwnFolders(), **options)
            return
        except Exception as error:
            if "timed out" not in str(error) or not starts_left:
                raise
            _end(_children() - others)  # of the node that did not start


def _end(processes: set[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_ENDED_S)


def _children() -> set[psutil.Process]:
    """All processes that this one has started, and those that they have."""
    return set(psutil.Process().children(recursive=True))


def spawn_service(spec: ServiceSpec, node_id: str | None) -> Any:
    """Start a service's actor; it takes its threads' cores as Ray CPUs, the GPU service none.

    On the node `node_id` and no other, or on any where it is None. Where that node offers NUMA
    nodes as the resource numa_node, a CPU service takes its own.
    """
    num_cpus = spec.num_threads if spec.index > 0 and spec.reserves_cpus else 0
    options: dict[str, Any] = {"num_cpus": num_cpus, "max_concurrency": 4, "max_task_retries": 0}
    # Without one of its GPUs Ray would hide them all from the process.
    options["num_gpus"] = 0 if spec.gpu is None else 1
    options["max_restarts"] = -1  # the driver says when it is enough
    if node_id is not None:
        options["resources"] = numa_slots(spec.share, node_id)
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # Ray keeps what a process is started with again only where it is small; `load` gets the rest.
    return RemoteService.options(**options).remote(replace(spec, neuron_ids=None))


def spawn_relay(names: list[str], handles: list[Any], node_id: str) -> Any:
    """Start the relay of another host; it waits most of the time and takes no Ray CPU."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4, "max_task_retries": 0}
    return RemoteRelay.options(scheduling_strategy=there, **options).remote(names, handles)


def spawn_driver(system: SystemConfig, name: str | None, detached: bool) -> Any:
    """Start the driver's actor; `name` lets others attach, `detached` lets it outlive this job.

    On the first of the system's hosts, if it names any.
    Errors:  ValueError where the name is taken; UsageError for hosts that are not in the cluster
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _CONCURRENT_STREAMS}
    if system.hosts:
        home = node_ids(system.hosts)[0]
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(home, soft=False)
    if name:
        options |= {"name": name, "namespace": NAMESPACE}
    if detached:
        options["lifetime"] = "detached"
    return RemoteDriver.options(**options).remote(system, spawn_service, spawn_relay)


def find_driver(name: str) -> Any | None:
    """The driver of a running system, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
