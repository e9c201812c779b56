"""The Ray cluster of RAY_ADDRESS or of this user: connecting to it, and CPUs in it."""

import ctypes
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.job_config import JobConfig

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.ray_parts import replaced
from hotcold.model.current_folder import own_folders
from hotcold.model.errors import HotcoldError, ServiceError, UsageError
from hotcold.placement.machine.numa import slots_of
from hotcold.placement.machine.pinning import HostShare
from hotcold.placement.machine.survey import usable_cores

NAMESPACE = "hotcold"
NUMA_NODE = "numa_node"  # a Ray resource, as many as the host has: `ray start --resources`
_ADDRESS = "RAY_ADDRESS"
_UV = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
_MAX_BYTES = 300
_CONNECTED_S = 10.0
_ANSWERED_S = 30.0
_AUTOSCALER, _NEW_AUTOSCALER = (
    "__autoscaling_status",
    "__autoscaler_v2_enabled",
)  # in Ray's KV store
_OF_GCS = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"  # a method that wants a token, as all
_FIRST_REPORT_S = 10.0
_NEW_NODE_S = 900.0  # a cloud's machine that pulls its image may take so long
# RayLog::InstallFailureSignalHandler(char const*, bool)
_TAKE_SIGNALS = "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"
_SIGACTION_BYTES = 256  # more than a `struct sigaction` has
_LISTENING = "0A"  # a socket's state in /proc/net/tcp
_NOT_OURS = (
    "the Ray cluster on this machine is another user's; if you trust it, give its address in "
    "RAY_ADDRESS"
)


class OwnFolders(JobConfig):
    """A job whose workers import modules from this program's folder, not from the current one.

    By default Ray adds the script's folder and the current folder to their sys.path. A job's
    working_dir, which its user has chosen, stays in it.
    """

    _py_driver_sys_path: list[str]

    def _serialize(self) -> bytes:
        self._py_driver_sys_path = own_folders(self._py_driver_sys_path)
        return super()._serialize()


def look_for_own_modules() -> None:
    """In a worker of a Ray that somebody else started: import nothing from its driver's folders.

    Of those that this program lies in it does.
    """
    from ray._private.worker import WORKER_MODE, global_worker

    if global_worker.mode == WORKER_MODE:
        folders = list(global_worker.core_worker.get_job_config().py_driver_sys_path)
        foreign = set(folders) - set(own_folders(folders))
        sys.path[:] = [folder for folder in sys.path if folder not in foreign]


def in_cluster() -> bool:
    """Whether RAY_ADDRESS names a cluster, as it does in a submitted job."""
    return bool(os.environ.get(_ADDRESS))


def within_cluster(options: SystemOptions) -> SystemOptions:
    """Without --threads, as many as this node gives, where the system will run."""
    if options.num_threads is not None or not ray.is_initialized():
        return options
    given = _cpus().get(ray.get_runtime_context().get_node_id(), 0)
    return replace(options, num_threads=max(1, min(len(usable_cores()), given)))


def home_node(options: SystemOptions, say: Callable[[str], object]) -> str | None:
    """The node where the system will run: None for this one, unless it offers no CPUs.

    A head often has none; then the node that has most. Where the autoscaler can bring one it is
    waited for, of which `say` is told.
    Errors:  ServiceError where no node of so many CPUs comes
    """
    if not ray.is_initialized() or options.hosts:
        return None
    own, needed = ray.get_runtime_context().get_node_id(), options.num_threads or 1
    if _cpus().get(own, 0):
        return None
    if max(_cpus().values()) < needed and can_grow():
        say(f"waiting for a node of {needed} CPUs, which the cluster's autoscaler is asked for")
        asked = ray.util.placement_group([{"CPU": needed}])
        try:
            asked.wait(_NEW_NODE_S)
        finally:
            ray.util.remove_placement_group(asked)
    most, node = max((count, node) for node, count in _cpus().items())
    _require_cpus(needed, most, most)
    return node


def bundle_nodes(group: Any) -> tuple[str, ...]:
    """The Ray node of each bundle of a placement group; "" while it has none."""
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return tuple(nodes[index] for index in sorted(nodes))


def _require_token(address: str) -> None:
    """Fail where a head wants another token than this process has: Ray would try for 20 seconds."""
    if _has_tls():
        return
    import grpc  # slow to import
    from ray._raylet import AuthenticationTokenLoader

    own: tuple[tuple[str, str], ...] = ()
    with suppress(ray.exceptions.AuthenticationError):  # there is none
        own = tuple(AuthenticationTokenLoader.instance().get_token_for_http_header().items())
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        asked = channel.unary_unary(_OF_GCS).future(b"", timeout=_ANSWERED_S, metadata=own)
        if asked.code() is grpc.StatusCode.UNAUTHENTICATED:
            found = "another one is given here" if own else "none is given here"
            raise ServiceError(
                f"the Ray head at {address} wants its token, and {found}: set RAY_AUTH_MODE=token, "
                "and RAY_AUTH_TOKEN_PATH to the cluster's file (without it ~/.ray/auth_token)"
            )


def _has_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _cpus() -> dict[str, int]:
    """CPUs of each node of the connected cluster, by its id."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes}


def can_grow() -> bool:
    """Whether an autoscaler looks after the cluster. Its first report comes soon after the start.

    Without one a head has a monitor all the same, to which each node is of a type of its own. A Ray
    that this process has started has no autoscaler.
    """
    from ray._private import worker
    from ray.experimental.internal_kv import _internal_kv_get

    if worker._global_node is not None and worker._global_node.is_head():
        return False
    deadline = time.monotonic() + _FIRST_REPORT_S
    while True:
        if _internal_kv_get(_NEW_AUTOSCALER, namespace="__autoscaler") == b"1":
            return True
        report = json.loads(_internal_kv_get(_AUTOSCALER) or b"{}").get("autoscaler_report")
        if report:
            types = report["node_type_mapping"].items()
            return any(kind != f"node_{node}" for node, kind in types)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def connect(address: str | None = None) -> None:
    """Connect to the cluster at RAY_ADDRESS, else at `address`; never starts Ray.

    `auto` is this user's cluster on this machine.
    Errors:  UsageError for an invalid address or another user's cluster; ServiceError where no
             cluster answers
    """
    address = os.environ.get(_ADDRESS) or address or ""
    try:
        if address == "auto":
            address = own_cluster()
            _use_own_token()
        _require_head(address)
        _require_token(address)
        with as_this_program():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                logging_level="error",
                log_to_driver=False,
                job_config=OwnFolders(),
            )
        keep_stdout_clean()
    except HotcoldError:
        raise
    except Exception as error:  # Ray raises many kinds, none of them its own
        first = str(error).strip().split("\n")[0]
        raise ServiceError(f"no Ray cluster answers at {address}: {first}") from error


def _use_own_token() -> None:
    """Authenticate by token where this user has one, as `ray start` and Ray's own `auto` do."""
    from ray._private.authentication import authentication_token_setup as setup

    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def own_cluster() -> str:
    """Address and port of the cluster that this user's last `ray start` made or joined.

    Ray's own `auto` takes any cluster of this machine, or one named by a file that anybody may
    write. That is not safe: a client sends its token there and unpickles the replies.
    Errors:  ServiceError where there is none, UsageError where it is another user's
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        with open(Path(folder, "ray/ray_current_cluster"), opener=_opened) as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            address = file.read(_MAX_BYTES).strip()
    except FileNotFoundError:
        raise ServiceError(
            "no Ray cluster answers on this machine; start one with `ray start --head`, or give "
            "its address in RAY_ADDRESS"
        ) from None
    except (OSError, ValueError):
        is_ours, address = False, ""
    if not is_ours or _listens_for_another(address):
        raise UsageError(_NOT_OURS)
    return address


def _opened(path: str, flags: int) -> int:
    """Opens no symbolic link, and does not block on a pipe that somebody has put there."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _listens_for_another(address: str) -> bool:
    """Whether another user listens at this port of this machine; the cluster may have ended."""
    host, _, port = address.rpartition(":")
    here = {one.address for ones in psutil.net_if_addrs().values() for one in ones}
    if host.strip("[]") not in here or not port.isdecimal():
        return False
    return not listeners(int(port)) <= {os.geteuid()}


def listeners(port: int) -> set[int]:
    """Ids of the users whose processes listen at a port of this machine."""
    lines = []
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # without IPv6 or IPv4
            lines += Path("/proc/net", name).read_text().splitlines()[1:]
    users = set()
    for line in lines:
        _, local, _, state, _, _, _, user, *_ = line.split()
        if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
            users.add(int(user))
    return users


@contextmanager
def as_this_program() -> Iterator[None]:
    """Within it Ray starts or is connected to, and this program stays what it is.

    By itself Ray takes SIGTERM: it prints a stack, and ends with a status of its own. It does so
    once in a process, so that is done here first. And under `uv run` Ray would upload the current
    folder and have `uv run` make an environment for each worker, where this program may be missing.
    """
    from ray._private import ray_constants, utils, worker

    act = ctypes.CDLL(None).sigaction
    own = ctypes.create_string_buffer(_SIGACTION_BYTES)
    act(signal.SIGTERM, None, own)
    with (
        replaced(ray_constants, _UV, os.environ.get(_UV) == "1"),
        replaced(utils, "set_sigterm_handler", lambda handler: None),
        replaced(worker, "connect", partial(_uninterrupted, worker.connect)),
    ):
        try:
            with suppress(AttributeError, OSError):  # another version has no such function
                library = ctypes.CDLL(ray._raylet.__file__)
                library[_TAKE_SIGNALS](None, ctypes.c_bool(False))
                act(signal.SIGTERM, own, None)
            yield
        finally:
            act(signal.SIGTERM, own, None)


def _uninterrupted(connect: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Connect; SIGTERM takes effect after that: Ray that is half there ends by a memory fault."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        connect(*args, **kwargs)
        return
    come: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: come.append(number))
    try:
        connect(*args, **kwargs)
    finally:
        signal.signal(signal.SIGTERM, handler)
        if come:
            signal.raise_signal(signal.SIGTERM)


def keep_stdout_clean() -> None:
    """Keep Ray's messages about dead processes off standard output, which holds the answers.

    Our own errors report what happened, and Ray's logs have it. Ray has no option for this.
    """
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix: None


def _require_head(address: str) -> None:
    """Fail where nothing listens or nothing answers: Ray would try for minutes, deaf to signals.

    A GCS server says its HTTP/2 settings as soon as it is connected to; with TLS the client begins.
    """
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal():
        raise UsageError(
            f"{_ADDRESS} is {address!r}, no address of a Ray head such as 127.0.0.1:6379; unset "
            "it, or use `ray job submit`, which sets it for the job"
        )
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECTED_S) as head:
        head.settimeout(_ANSWERED_S)
        if not _has_tls() and not head.recv(1):
            raise ConnectionError("it ends the connection")


def await_actors(
    handles: Sequence[Any], num_cpus: Sequence[int], timeout_s: float, node_id: str | None = None
) -> None:
    """Wait until new actors run; actor i takes `num_cpus[i]` CPUs of `node_id`, or of any node.

    Errors:  ServiceError where Ray has not enough free CPUs
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node_id in (None, node["NodeID"])]
    total = int(sum(node["Resources"].get("CPU", 0) for node in nodes))
    _require_cpus(sum(num_cpus), total, total)
    pings = [handle.ping.remote() for handle in handles]
    _, waiting = ray.wait(pings, num_returns=len(pings), timeout=timeout_s)
    if waiting:
        needed = [count for count, ping in zip(num_cpus, pings, strict=True) if ping in waiting]
        free = int(ray.available_resources().get("CPU", 0))
        _require_cpus(sum(needed), min(free, total), total)
        slots = sum(node["Resources"].get(NUMA_NODE, 0) for node in nodes)
        if slots and ray.available_resources().get(NUMA_NODE, 0) < slots:
            raise ServiceError(
                f"services did not start within {timeout_s:.0f} s; if another system has taken "
                "these hosts' NUMA nodes, stop it"
            )


def numa_slots(share: HostShare | None, node_id: str) -> dict[str, float]:
    """The share of its Ray node's resource numa_node that a CPU service takes; {} without one.

    Ray counts in ten-thousandths.
    """
    offered = [node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id]
    num_nodes = int(offered[0].get(NUMA_NODE, 0)) if offered else 0
    if not num_nodes or share is None or share.index is None:
        return {}
    taken = slots_of(num_nodes, len(share.threads), share.index)
    return {NUMA_NODE: math.floor(taken * 10_000) / 10_000}


def _require_cpus(needed: int, free: int, total: int) -> None:
    if needed > free:
        advice = "give fewer --threads, or stop another system"
        if not total:
            advice = "no node offers any; start one that does with `ray start --address=HEAD`"
        raise ServiceError(
            f"the system needs {needed} CPUs of Ray; {free} of {total} are free where it runs: "
            + advice
        )
