"""The Ray cluster that this process is told to use: as a job, by the job's environment."""

import math
import os
import socket
from collections.abc import Sequence
from typing import Any

import ray

from model.errors import ServiceError, UsageError
from placement.threads.numa import slots_of
from placement.threads.pinning import HostShare

NAMESPACE = "hotcold"
NUMA_NODE = "numa_node"  # a Ray resource, as many as the host has: `ray start --resources`
_ADDRESS = "RAY_ADDRESS"


def in_cluster() -> bool:
    """Whether the environment names a cluster, as that of a submitted job does."""
    return bool(os.environ.get(_ADDRESS))


def connect(address: str | None = None) -> None:
    """Connect to the cluster at RAY_ADDRESS, else at `address`; never starts a Ray.

    Errors:  UsageError for what is no address, ServiceError where no cluster answers
    """
    address = os.environ.get(_ADDRESS) or address or ""
    try:
        if address != "auto":
            _require_listener(address)
        ray.init(address=address, namespace=NAMESPACE, logging_level="error", log_to_driver=False)
        keep_stdout_clean()
    except UsageError:
        raise
    except Exception as error:  # Ray raises many kinds, none of them its own
        first = str(error).strip().split("\n")[0]
        where = "on this machine" if address == "auto" else f"at {address}"
        raise ServiceError(f"no Ray cluster answers {where}: {first}") from error


def keep_stdout_clean() -> None:
    """Let Ray say nothing on standard output about processes that died: answers stand there.

    What happened is told by our own errors and progress, and is in Ray's logs. Ray has no
    option for it.
    """
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix: None


def _require_listener(address: str) -> None:
    """Fail at once where nothing listens: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal():
        raise UsageError(
            f"{_ADDRESS} is {address!r}, no address of a Ray head such as 127.0.0.1:6379; unset "
            "it, or use `ray job submit`, which sets it for the job"
        )
    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def num_cpus() -> int:
    """CPUs of the largest node of the connected cluster; at least 1."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return max(1, *(int(node["Resources"].get("CPU", 0)) for node in nodes))


def await_actors(
    handles: Sequence[Any], num_cpus: Sequence[int], timeout_s: float, node_id: str | None = None
) -> None:
    """Wait until actors that were just made run; actor i takes `num_cpus[i]` of `node_id`'s.

    Without `node_id` they may be of any node.
    Errors:  ServiceError where the CPUs for them are not to be had
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
    """What a CPU service takes of the NUMA nodes that its Ray node offers; {} where it offers none.

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
        raise ServiceError(
            f"the system needs {needed} CPUs of Ray; {free} of {total} are free where it runs: "
            "give fewer --threads, or stop another system"
        )
