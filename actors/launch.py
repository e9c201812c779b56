"""Starts a private Ray, and makes plain classes into Ray actors (nothing else does)."""

import logging
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from hotcold.actors.private_ray.closed_ray import closed_to_others, require_closed
from hotcold.actors.private_ray.start import init_private
from hotcold.actors.private_ray.temp_folder import MAX_CHOSEN_BYTES, TempFolder, base_folder
from hotcold.actors.processes.cluster import (
    NAMESPACE,
    OwnFolders,
    as_this_program,
    bundle_nodes,
    home_node,
    keep_stdout_clean,
    look_for_own_modules,
    numa_slots,
    within_cluster,
)
from hotcold.actors.processes.driver_actor import DriverActor
from hotcold.actors.processes.forked import leave_in_children, require_own_ray
from hotcold.actors.processes.precompile import compiler_of
from hotcold.actors.processes.relay_actor import RelayActor
from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.failures import service_error
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.protocol.ray_memory import (
    MONITOR_EVERY_MS,
    object_store_bytes,
    require_shared_memory,
    reserve_object_store,
)
from hotcold.actors.setup.connection import node_ids
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.ray_parts import environment
from hotcold.model.current_folder import elsewhere, environment_of_python
from hotcold.model.errors import ServiceError

_log = logging.getLogger(__name__)
_CONCURRENT_STREAMS = 64  # requests that wait or run
_MIN_FREE_BYTES = 4 << 20  # for Ray's logs, which begin with 0.2 MB
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0
_MAX_STARTS = 3  # of Ray, whose node has 30 s for each: a busy machine may take longer
_ENDED_S = 10.0  # for processes that were killed
_FIRST_WORKERS = 3  # of the driver, the attention service and a CPU service
_CONTROL_CALLS = 8  # concurrent calls in the group CONTROL, which are short
CONTROL = "control"

# Else Ray records every call, 250 MB in an hour.
_UNRECORDED = {"enable_task_events": False}


@cache
def remote_driver() -> Any:
    """The actor class of drivers.

    Like the others it is made when it is needed: Ray draws its id at random, and forks of a process
    that has drawn one would all draw the same next.
    """
    groups = {CONTROL: _CONTROL_CALLS}
    return ray.remote(concurrency_groups=groups, **_UNRECORDED)(DriverActor)


@cache
def _remote_service() -> Any:
    return ray.remote(**_UNRECORDED)(ServiceActor)


@cache
def _remote_relay() -> Any:
    return ray.remote(**_UNRECORDED)(RelayActor)


def start_local_ray(
    num_cpus: int,
    arena_bytes: int,
    num_gpus: int = 0,
    bits_bytes: int = 0,
    compiled: SystemConfig | None = None,
) -> None:
    """Start a private Ray on this machine, without a dashboard; it ends with this process.

    Its object store, of `object_store_bytes`, is allocated in /dev/shm now, before anything else
    can fill it. Weights are in the actors. Kernels of the system `compiled` are compiled while Ray
    starts.
    Errors:  MemoryBudgetError where /dev/shm is too small; ServiceError where other users could use
             this Ray, the folder for its files is full, or the loopback is down; any of `ray.init`
    """
    require_own_ray()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15
    # The memory was checked; Ray's monitor would kill services that still fit.
    os.environ.setdefault(MONITOR_EVERY_MS, "0")
    store_bytes = object_store_bytes(arena_bytes, bits_bytes)
    require_shared_memory(store_bytes)
    _require_disk_space()
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
    compiler = None if compiled is None else compiler_of(compiled)
    others = _children()
    # Ray's processes keep this one's current folder, and workers would import modules from it.
    with elsewhere(), as_this_program(), environment(environment_of_python()):
        try:
            init_private(_FIRST_WORKERS, compiler, job_config=OwnFolders(), **options)
        except Exception as error:  # any, with an unknown version of Ray
            _end(_children() - others)
            _init(options)
            _log.warning("Ray has started in its own way, which takes longer: %s", error)
    require_closed()
    keep_stdout_clean()
    for process in _children() - others:
        with suppress(psutil.NoSuchProcess):
            if process.name() == "raylet":
                reserve_object_store(process.pid)


def _require_disk_space() -> None:
    """Ray's processes die silently if they cannot write. Errors: ServiceError."""
    folder = base_folder()
    if not folder.is_dir():
        raise ServiceError(
            f"Ray could not be started: {folder} is no directory; set RAY_TMPDIR to one"
        )
    if len(os.fsencode(folder)) > MAX_CHOSEN_BYTES:
        raise ServiceError(
            f"{folder}: its path is too long for the sockets of Ray; set RAY_TMPDIR to a folder "
            f"whose path has at most {MAX_CHOSEN_BYTES} bytes"
        )
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        raise ServiceError(
            f"{folder}, where Ray writes its logs, has {free / 1e6:.1f} MB free, and "
            f"{_MIN_FREE_BYTES / 1e6:.0f} MB are needed; make room there, or set RAY_TMPDIR to "
            "another folder"
        )


def _require_loopback() -> None:
    """Ray's processes would silently try for minutes to connect. Errors: ServiceError."""
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_CONNECT_S),
        ):
            pass
    except OSError as problem:
        raise ServiceError(
            f"this machine does not reach itself at {_LOOPBACK} ({problem.strerror or problem}), "
            "where the processes of a system talk; bring the loopback up: ip link set lo up"
        ) from None


def _init(options: dict[str, Any]) -> None:
    """`ray.init`, repeated if it times out on a busy machine.

    The next start after the end of this process removes its folder.
    """
    others = _children()
    folder = TempFolder()
    for starts_left in reversed(range(_MAX_STARTS)):
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
    """All descendants of this process."""
    return set(psutil.Process().children(recursive=True))


def spawn_service(spec: ServiceSpec, node_id: str | None) -> Any:
    """Start a service's actor on node `node_id`, or on any node; in the driver's placement group.

    A CPU service reserves a Ray CPU a thread, and its share of the node's resource numa_node, if
    there is one; the attention service reserves neither.
    """
    options: dict[str, Any] = {"max_concurrency": 4, "max_task_retries": 0}
    options["num_cpus"] = spec.num_ray_cpus
    # If it reserved no GPU, Ray would hide all GPUs from the process.
    options["num_gpus"] = int(spec.on_gpu)
    options["max_restarts"] = -1  # the driver decides when to give up
    if (bundle := _bundle_on(node_id)) is not None:
        options["scheduling_strategy"] = bundle
    elif node_id is not None:
        options["resources"] = numa_slots(spec.share, node_id)
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # Ray keeps only small arguments for restarts; `load` gets the rest.
    return _remote_service().options(**options).remote(replace(spec, neuron_ids=None))


def _bundle_on(node_id: str | None) -> PlacementGroupSchedulingStrategy | None:
    """The one bundle of the current placement group on that node, or on any; else None."""
    group = ray.util.get_current_placement_group()
    nodes = [] if group is None else bundle_nodes(group)
    found = [index for index, node in enumerate(nodes) if node_id in (None, node)]
    return PlacementGroupSchedulingStrategy(group, found[0], True) if len(found) == 1 else None


def spawn_relay(names: list[str], handles: list[Any], node_id: str) -> Any:
    """Start another host's relay, which mostly waits and reserves no Ray CPU."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4, "max_task_retries": 0}
    return _remote_relay().options(scheduling_strategy=there, **options).remote(names, handles)


def spawn_driver(system: SystemConfig, name: str | None, detached: bool) -> Any:
    """Start the driver's actor, on the first host of --hosts if there are any.

    By `name` other processes attach; a `detached` one outlives this job.
    Errors:  ValueError where the name is taken; UsageError for hosts that are not in the cluster
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _CONCURRENT_STREAMS}
    home = node_ids(system.hosts)[0] if system.hosts else system.home
    if home is not None:
        there = NodeAffinitySchedulingStrategy(home, soft=False)
        options["scheduling_strategy"] = _bundle_on(home) or there
    if name:
        options |= {"name": name, "namespace": NAMESPACE}
    if detached:
        options["lifetime"] = "detached"
    leave_in_children()
    return remote_driver().options(**options).remote(system, spawn_service, spawn_relay)


def prepare_in_cluster(
    path: Path, options: SystemOptions, say: Callable[[str], object]
) -> SystemConfig:
    """`prepare_system` on the node where the system will run: its cores and its memory count.

    Errors:  as `prepare_system`; ServiceError where no node has or gets enough CPUs
    """
    home = home_node(options, say)
    if home is None:
        return prepare_system(path, within_cluster(options))[0]
    leave_in_children()
    there = NodeAffinitySchedulingStrategy(home, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(_prepared).options(scheduling_strategy=there)
    try:
        found: SystemConfig = ray.get(task.remote(path, options, home))
    except ray.exceptions.RayTaskError as error:
        raise service_error("driver", error) from error
    return found


def _prepared(path: Path, options: SystemOptions, home: str) -> SystemConfig:
    look_for_own_modules()
    system, _ = prepare_system(path, within_cluster(options))
    return replace(system, home=home)


def find_driver(name: str) -> Any | None:
    """The driver of a running system, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
