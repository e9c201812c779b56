"""Which service gets which NUMA nodes and cores; nothing is pinned here.

With fewer services than nodes each gets a run of neighbouring nodes. Otherwise services are
assigned to nodes round-robin, and those of one node divide its cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hotcold.placement.machine.sysfs import NumaNode


@dataclass(frozen=True)
class NodeCores:
    """One NUMA node with memory, and the cores that read it."""

    node_id: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class ServicePlace:
    """One service's place: its memory is on `nodes`, thread t runs on `thread_cores[t]`.

    A thread has its own core if the service has as many threads as cores, else all its cores.
    """

    nodes: tuple[int, ...]
    thread_cores: tuple[tuple[int, ...], ...]

    @property
    def cores(self) -> tuple[int, ...]:
        """All cores of its threads, sorted."""
        return tuple(sorted({core for cores in self.thread_cores for core in cores}))


def nodes_with_memory(nodes: Sequence[NumaNode], cores: Sequence[int]) -> tuple[NodeCores, ...]:
    """The nodes with memory and usable `cores`, in order.

    Cores of a node without memory go to the nearest node with memory, the first of several. Nodes
    without a usable core are left out.
    """
    usable = set(cores)
    own = {n.node_id: [c for c in n.cores if c in usable] for n in nodes if n.total_bytes}
    homes = [node_id for node_id, its_cores in own.items() if its_cores]
    if not homes:
        return ()
    for node in nodes:
        if not node.total_bytes:
            home = _nearest(node, homes, [other.node_id for other in nodes])
            own[home] += [core for core in node.cores if core in usable]
    return tuple(NodeCores(node_id, tuple(own[node_id])) for node_id in sorted(homes))


def _nearest(node: NumaNode, homes: Sequence[int], online: Sequence[int]) -> int:
    distances = dict(zip(sorted(online), node.distances, strict=False))
    return min(sorted(homes), key=lambda node_id: distances.get(node_id, 0))


def node_groups(num_nodes: int, num_services: int) -> list[tuple[int, ...]]:
    """Indices of each service's nodes; services share nodes if there are more services."""
    if num_services >= num_nodes:
        return [(service % num_nodes,) for service in range(num_services)]
    ends = [service * num_nodes // num_services for service in range(num_services + 1)]
    return [tuple(range(first, last)) for first, last in pairwise(ends)]


def num_sharing(num_nodes: int, num_services: int) -> list[int]:
    """How many services share each service's nodes, itself included."""
    groups = node_groups(num_nodes, num_services)
    return [groups.count(group) for group in groups]


def slots_of(num_nodes: int, num_services: int, service: int) -> float:
    """How many nodes a service has: a whole number, or its fraction of one."""
    group = node_groups(num_nodes, num_services)[service]
    return len(group) / num_sharing(num_nodes, num_services)[service]


def thread_counts(
    nodes: Sequence[NodeCores], num_services: int, num_threads: int
) -> tuple[int, ...]:
    """Threads of each service: in proportion to its cores, at least one, equal without nodes."""
    weights = [1.0] * num_services
    if nodes:
        sharing = num_sharing(len(nodes), num_services)
        groups = node_groups(len(nodes), num_services)
        weights = [
            sum(len(nodes[index].cores) for index in group) / among
            for group, among in zip(groups, sharing, strict=True)
        ]
    counts = [1] * num_services
    for _ in range(num_threads - num_services):
        loads = [(count + 1) / weight for count, weight in zip(counts, weights, strict=True)]
        counts[loads.index(min(loads))] += 1
    return tuple(counts)


def place_services(nodes: Sequence[NodeCores], threads: Sequence[int]) -> list[ServicePlace]:
    """The place of each service, with threads[s] threads. Errors: ValueError without nodes."""
    if not nodes:
        raise ValueError("there are no nodes to place services on")
    groups = node_groups(len(nodes), len(threads))
    places = []
    for service, group in enumerate(groups):
        same = [other for other, its_group in enumerate(groups) if its_group == group]
        cores = [core for index in group for core in nodes[index].cores]
        cores = _cut(cores, [threads[other] for other in same], same.index(service))
        places.append(
            ServicePlace(
                tuple(nodes[index].node_id for index in group),
                _thread_cores(cores, threads[service]),
            )
        )
    return places


def place_of_all(places: Sequence[ServicePlace], num_threads: int) -> ServicePlace:
    """The place of the attention service: one thread on each core of the other services.

    With another number of threads, all threads use all cores.
    """
    nodes = sorted({node for place in places for node in place.nodes})
    by_node = sorted(places, key=lambda place: place.nodes)
    cores = [its_cores for place in by_node for its_cores in place.thread_cores]
    if len(cores) != num_threads:
        everything = tuple(sorted({core for its_cores in cores for core in its_cores}))
        cores = [everything] * num_threads
    return ServicePlace(tuple(nodes), tuple(cores))


def _cut(cores: list[int], threads: Sequence[int], part: int) -> list[int]:
    """A service's part of the cores that it shares; all if there are fewer cores than threads."""
    total = sum(threads)
    if total > len(cores):
        return cores
    before = sum(threads[:part])
    first, last = (len(cores) * count // total for count in (before, before + threads[part]))
    return cores[first:last]


def _thread_cores(cores: list[int], num_threads: int) -> tuple[tuple[int, ...], ...]:
    if len(cores) == num_threads:
        return tuple((core,) for core in cores)
    return (tuple(cores),) * num_threads
