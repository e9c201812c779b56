"""Pins threads to cores and binds their memory to NUMA nodes, as far as the kernel allows.

Many containers may not set memory policies (EPERM). Pages then still go to the node of the thread
that first writes them, and threads can be pinned.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hotcold.model.limits import cpu_quota
from hotcold.placement.machine.numa import (
    NodeCores,
    ServicePlace,
    nodes_with_memory,
    place_of_all,
    place_services,
)
from hotcold.placement.machine.survey import usable_cores
from hotcold.placement.machine.sysfs import read_numa_nodes

_DEFAULT, _PREFERRED, _BIND, _INTERLEAVE = 0, 1, 2, 3  # of linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_WORD_BITS = 64
_SPARE_BYTES = 1 << 30  # beside a service's weights: workspace, Python, other programs


@dataclass(frozen=True)
class HostShare:
    """A service's share of its host, from which the host derives nodes and cores.

    `index` is among the host's CPU services; None is the attention service, which uses the cores of
    all of them while they wait.
    """

    threads: tuple[int, ...]  # of each CPU service of the host
    index: int | None = None
    pin: str = "auto"
    root: str = "/"  # below which proc and sys are read


def not_pinned_because(pin: str, nodes: Sequence[NodeCores], quota: float | None) -> str:
    """Why nothing is pinned, in a few words; "" where services are pinned.

    With one node all memory is equally near, and a pinned thread would wait for other programs on
    its core; there a `CoreAffinity` pins and unpins dynamically.
    """
    if pin == "off":
        return "--pin off"
    if not nodes:
        return "the kernel names no NUMA nodes"
    if pin == "on":
        return ""
    if len(nodes) == 1:
        return "one NUMA node"
    return "" if quota is None else "a CPU quota limits this container: no core is its own"


def find_place(share: HostShare, num_threads: int) -> ServicePlace | None:
    """The place on this host of a service with so many threads; None where nothing is pinned."""
    nodes = _nodes(share)
    if not_pinned_because(share.pin, nodes, cpu_quota(Path(share.root))):
        return None
    return _place(share, nodes, num_threads)


def find_cores(share: HostShare, num_threads: int) -> tuple[int, ...]:
    """A core for each thread, for a `CoreAffinity`; () where it should not be used.

    It is used where `--pin auto` pins nothing because there is one node, and each of several
    threads can have its own core.
    """
    nodes = _nodes(share)
    if share.pin != "auto" or len(nodes) != 1 or cpu_quota(Path(share.root)) is not None:
        return ()
    place = _place(share, nodes, num_threads)
    return place.cores if 1 < num_threads == len(place.cores) else ()


def _nodes(share: HostShare) -> tuple[NodeCores, ...]:
    root = Path(share.root)
    return nodes_with_memory(read_numa_nodes(root), usable_cores(root, sum(share.threads)))


def _place(share: HostShare, nodes: Sequence[NodeCores], num_threads: int) -> ServicePlace:
    places = place_services(nodes, share.threads)
    return place_of_all(places, num_threads) if share.index is None else places[share.index]


def pin_process(cores: Sequence[int]) -> None:
    """Pin all threads of this process, and those that they will start, to `cores`."""
    for entry in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # one that has just ended
            pin_thread(cores, int(entry))


def pin_thread(cores: Sequence[int], thread_id: int = 0) -> None:
    """Pin a thread, the caller by default, to `cores`; no effect if the cores are gone."""
    with suppress(OSError):
        os.sched_setaffinity(thread_id, cores)


def bind_memory(nodes: Sequence[int], is_strict: bool = True) -> bool:
    """Let this thread and those that it starts allocate from `nodes`; False where refused.

    One node: only from it, or without `is_strict` preferably; several: interleaved by page.
    """
    if len(nodes) > 1:
        return _set_memory_policy(_INTERLEAVE, nodes)
    return _set_memory_policy(_BIND if is_strict else _PREFERRED, nodes)


def bind_thread(place: ServicePlace, num_bytes: int, root: Path = Path("/")) -> bool:
    """Pin this thread, and those that it starts, to the place's cores, and bind it to its nodes.

    A single node without space for `num_bytes` more is only preferred: the kernel kills a process
    that is bound to a full node. False where the kernel refuses memory policies.
    """
    pin_thread(place.cores)
    own = [node for node in read_numa_nodes(root) if node.node_id in place.nodes]
    spare_bytes = sum(node.free_bytes + node.file_bytes for node in own) - num_bytes
    return bind_memory(place.nodes, is_strict=spare_bytes > _SPARE_BYTES)


def use_local_memory() -> bool:
    """Let this thread allocate from the node that it runs on; False where the kernel refuses."""
    return _set_memory_policy(_DEFAULT, ())


def may_bind_memory() -> bool:
    """Whether the kernel lets this process choose the nodes of its memory."""
    return use_local_memory()  # which is how every thread begins


def _set_memory_policy(mode: int, nodes: Sequence[int]) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    num_words = max(nodes, default=0) // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * num_words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel uses one bit less than the given number.
    bits = num_words * _WORD_BITS + 1 if nodes else 0
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.byref(mask) if nodes else None
    status: int = libc.syscall(
        ctypes.c_long(number), ctypes.c_long(mode), pointer, ctypes.c_ulong(bits)
    )
    return status == 0
