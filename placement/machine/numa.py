"""Which service gets which NUMA nodes and cores; numbers only, nothing is pinned here.

Services and nodes are both in order. Fewer services than nodes: a service takes a run of
neighbouring nodes. As many or more: services are dealt to the nodes in turn, and those of one node
cut its cores among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hotcold.placement.machine.sysfs import NumaNode


@dataclass(frozen=True)
class NodeCores:
    """One NUMA node with memory, and the cores to read it with."""

    node_id: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class ServicePlace:
    """Where one service belongs: its memory on `nodes`, thread t on one of `thread_cores[t]`.

    A thread has a core of its own where the service has as many threads as cores, else all of its
    service's.
    """

    nodes: tuple[int, ...]
    thread_cores: tuple[tuple[int, ...], ...]

    @property
    def cores(self) -> tuple[int, ...]:
        """All cores of its threads, sorted."""
        return tuple(sorted({core for cores in self.thread_cores for core in cores}))


def nodes_with_memory(nodes: Sequence[NumaNode], cores: Sequence[int]) -> tuple[NodeCores, ...]:
    """Nodes that have memory and may be read with some of the usable `cores`, in order.

    The cores of a node without memory go to the nearest node that has some, the first of several;
    a node without a usable core is left out.
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
    """The nodes of each service, as indices; nodes are shared where services are more."""
    if num_services >= num_nodes:
        return [(service % num_nodes,) for service in range(num_services)]
    ends = [service * num_nodes // num_services for service in range(num_services + 1)]
    return [tuple(range(first, last)) for first, last in pairwise(ends)]


def num_sharing(num_nodes: int, num_services: int) -> list[int]:
    """How many services each service shares its nodes with, itself included."""
    groups = node_groups(num_nodes, num_services)
    return [groups.count(group) for group in groups]


def slots_of(num_nodes: int, num_services: int, service: int) -> float:
    """How many of the nodes a service takes: some whole ones, or its part of one."""
    group = node_groups(num_nodes, num_services)[service]
    return len(group) / num_sharing(num_nodes, num_services)[service]


def thread_counts(
    nodes: Sequence[NodeCores], num_services: int, num_threads: int
) -> tuple[int, ...]:
    """Threads of each service: at least one, else in proportion to its cores, the first ones first.

    Equal shares where no nodes are known.
    """
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
    """The place of each service, of which service s has threads[s] threads.

    Errors:  ValueError without nodes
    """
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
    """The place of the service that takes the other services' cores in turn, thread by thread.

    Its threads are dealt over all nodes, so that thread t of it and of them sit on one core.
    """
    nodes = sorted({node for place in places for node in place.nodes})
    by_node = sorted(places, key=lambda place: place.nodes)
    cores = [its_cores for place in by_node for its_cores in place.thread_cores]
    if len(cores) != num_threads:
        everything = tuple(sorted({core for its_cores in cores for core in its_cores}))
        cores = [everything] * num_threads
    return ServicePlace(tuple(nodes), tuple(cores))


def _cut(cores: list[int], threads: Sequence[int], part: int) -> list[int]:
    """A service's cores of those that it shares; all where there are fewer than threads."""
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
