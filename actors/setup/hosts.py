"""Services on several hosts: which Ray node each is on, and how the driver gets to them.

The first of a system's hosts is home to the driver and to the GPU service. CPU services are dealt
to all of them in turn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ray

from hotcold.actors.exchange.hosts_exchange import Relay
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.model.errors import UsageError

SpawnRelay = Callable[[list[str], list[Any], str], Any]


def node_ids(hosts: Sequence[str]) -> list[str]:
    """The Ray nodes at these addresses. Errors: UsageError for an address without a node."""
    found = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for host in hosts:
        if host not in found:
            raise UsageError(
                f"--hosts: no Ray node is at {host}, there are {', '.join(sorted(found))}; run "
                "`ray start --address=HEAD:6379` there"
            )
    return [found[host] for host in hosts]


def service_nodes(system: SystemConfig, own_node: str | None) -> list[str | None]:
    """The Ray node of each service, `own_node` without --hosts; None is any node.

    Errors:  UsageError
    """
    if not system.hosts:
        return [own_node] * (1 + system.num_cpu_actors)
    ids = node_ids(system.hosts)
    return [ids[0], *(ids[service % len(ids)] for service in range(system.num_cpu_actors))]


def start_relays(
    system: SystemConfig, names: Sequence[str], handles: Sequence[Any], spawn_relay: SpawnRelay
) -> list[Relay]:
    """A relay on every host but the first, for the services that are there; none without --hosts.

    `names[s]` and `handles[s]` are of service s.
    """
    num_hosts, num_services = len(system.hosts), 1 + system.num_cpu_actors
    return [
        Relay(
            host,
            spawn_relay(list(names), list(handles), node_id),
            range(1 + number, num_services, num_hosts),
        )
        for number, (host, node_id) in enumerate(
            zip(system.hosts, node_ids(system.hosts), strict=True)
        )
        if number > 0
    ]
