"""Services on several hosts: which Ray node each is on, and how the driver gets to them.

The first of a system's hosts is home to the driver and to the GPU service. CPU services are dealt
to all of them in turn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from actors.exchange.doorbell_exchange import ArenaExchange
from actors.exchange.hosts_exchange import HostsExchange, Relay
from actors.exchange.watch import ActorWatch
from actors.protocol.arena import ArenaLayout
from actors.protocol.failures import service_error
from actors.protocol.messages import SystemConfig
from model.errors import UsageError

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


class Hosts:
    """The relays of a system's other hosts."""

    def __init__(
        self,
        system: SystemConfig,
        names: Sequence[str],
        handles: Sequence[Any],
        spawn_relay: SpawnRelay,
    ) -> None:
        """Start a relay on every host but the first; services are there already."""
        self._names, self._handles = names, handles
        num_hosts, num_services = len(system.hosts), 1 + system.num_cpu_actors
        self.relays = [
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
        self.relay_of = {service: relay for relay in self.relays for service in relay.services}

    def connect(self, layout: ArenaLayout, arena_ref: Any, watch: ActorWatch) -> HostsExchange:
        """Attach services to the arena of their host, the first host's to `arena_ref`.

        Errors:  HotcoldError of a service or a relay that fails
        """
        for relay in self.relays:
            relay.open_arena(layout)
        refs = {service: relay.arena_refs for service, relay in self.relay_of.items()}
        calls = {
            handle.attach.remote(layout, refs.get(service, [arena_ref])): f"{name} service"
            for service, (name, handle) in enumerate(zip(self._names, self._handles, strict=True))
        }
        _answers(calls)
        self._arena = ray.get(arena_ref)  # held, so that the pages stay mapped
        return HostsExchange(ArenaExchange(layout.wires(self._arena), watch), self.relays)

    def ready(self) -> None:
        """All kernels are compiled: from now on silence is a fault."""
        for relay in self.relays:
            relay.ready()

    def kill(self) -> None:
        """End the relays' processes."""
        for relay in self.relays:
            relay.kill()


def _answers(calls: Mapping[Any, str]) -> list[Any]:
    """What the calls return, in order; the name of the one that fails is in the error."""
    answers = []
    for call, name in calls.items():
        try:
            answers.append(ray.get(call))
        except ray.exceptions.RayError as error:
            raise service_error(name, error) from error
    return answers
