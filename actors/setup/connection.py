"""Connects the driver to its services: nodes, arenas, the exchange, other hosts' relays."""

from collections.abc import Callable, Sequence
from typing import Any

import ray

from hotcold.actors.exchange.call_exchange import CalledService, CallExchange
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange, Exchange
from hotcold.actors.exchange.pulse import POLL_S, STARTING_POLLS
from hotcold.actors.exchange.relay import Relay
from hotcold.actors.faults.recovery import RecoveryPolicy
from hotcold.actors.faults.replacement import OwnPlace, Place, ServiceReplacer
from hotcold.actors.faults.watch import ActorWatch, await_each
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import RequestError, ServiceLost
from hotcold.actors.protocol.messages import ServicePart, ServiceSpec, SystemConfig
from hotcold.actors.protocol.ray_memory import put_arena
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.assignment import require_partition
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, UsageError
from hotcold.numba_kernels.loops.mailbox import OPERATION, PING

SpawnRelay = Callable[[list[str], list[Any], str], Any]


class Connection:
    """The actors of all services; `open` and `attach` connect them once they have loaded."""

    exchange: Exchange
    _layout: ArenaLayout

    def __init__(
        self,
        system: SystemConfig,
        specs: Sequence[ServiceSpec],
        handles: Sequence[Any],
        policy: RecoveryPolicy,
    ) -> None:
        """`specs[s]` and `handles[s]` are those of service s."""
        self.system, self.specs, self.handles = system, list(specs), list(handles)
        self.topology = Topology(tuple(specs))
        self.names = [spec.name for spec in specs]
        self.watch = ActorWatch(self.names, self.handles)
        self.replacer = ServiceReplacer(self.specs, self.handles, self.watch, policy)
        self.shares_arena = system.exchange == "arena"
        self._relays: list[Relay] = []

    def find(self, services: Sequence[int]) -> None:
        """Find the processes of `services` and watch them from now on. Errors: ServiceLost."""
        self.replacer.find(services)

    def call_each(
        self, method: str, *arguments: Any, services: Sequence[int] | None = None
    ) -> list[Any]:
        """Call a method of `services`, or of all, concurrently. Errors: as in `await_each`."""
        called = self.topology.services if services is None else services
        calls = {s: getattr(self.handles[s], method).remote(*arguments) for s in called}
        return await_each(calls, self.watch)

    def load(self, services: Sequence[int]) -> None:
        """Let `services` load as their specs say. Errors: HotcoldError of one that fails."""
        await_each({s: self.handles[s].load.remote(self.specs[s]) for s in services}, self.watch)

    def require_partition(self, config: ModelConfig) -> None:
        """Check that each neuron is in exactly one loaded service. Errors: ServiceError."""
        require_partition(config, self.call_each("held_neurons"))

    @property
    def has_matmul(self) -> bool:
        """Whether all services have prepared for long prompts; replacements will, too."""
        return self.replacer.prepares_prompts

    def begin_prompts(self, services: Sequence[int]) -> None:
        """Let `services` prepare for long prompts; the first of these shows what fails."""
        for service in services:
            self.handles[service].begin_prompts.remote()

    def await_prompts(self) -> None:
        """Return once all services have prepared for long prompts, or failed, or take too long."""
        with self.watch.preparing():
            calls = [handle.prepare_prompts.remote() for handle in self.handles]
            ray.wait(calls, num_returns=len(calls), timeout=STARTING_POLLS * POLL_S)

    def prepare_prompts(self, services: Sequence[int] | None = None) -> None:
        """Return once services, all by default, have prepared for long prompts.

        This may compile kernels. Services that replace them prepare too.

        Errors:  ServiceLost of one that died or is stuck; RequestError of one that fails
        """
        try:
            with self.watch.preparing():
                self.call_each("prepare_prompts", services=services)
            self.replacer.prepares_prompts = True
        except ServiceLost:
            raise
        except HotcoldError as error:
            raise RequestError(str(error)) from error

    def open(self, layout: ArenaLayout, spawn_relay: SpawnRelay) -> None:
        """Make an arena on every host, and start the other hosts' relays.

        With the exchange by calls, every process has its own arena.
        Errors:  HotcoldError of a service or a relay that fails
        """
        self._layout, arena, arena_refs = layout, layout.new_arena(), []
        if self.shares_arena:
            arena_ref, arena = put_arena(arena)
            arena_refs = [arena_ref]
        buffers = layout.buffers(arena)
        if not self.shares_arena:
            actors = enumerate(zip(self.names, self.handles, strict=True))
            called = [CalledService(s, name, handle, self.watch) for s, (name, handle) in actors]
            self.exchange = CallExchange(buffers, called)
        else:
            self.exchange = local = ArenaExchange(buffers, self.watch)
            self._relays = self._start_relays(spawn_relay)
            if self._relays:
                self.exchange = CallExchange(buffers, self._relays, local)
        for relay in self._relays:
            relay.open_arena(layout)
        relay_of = {service: relay for relay in self._relays for service in relay.services}
        own = OwnPlace(arena_refs, buffers if arena_refs else None)
        self._places: list[Place] = [
            relay_of.get(service, own) for service in self.topology.services
        ]
        self.replacer.connected(layout, self._places)

    def attach(self, services: Sequence[int]) -> None:
        """Attach `services` to the arena of their host; returns once their compiled loops run.

        Errors:  HotcoldError of a service that fails
        """
        calls = {
            s: self.handles[s].attach.remote(self._layout, place.arena_refs, place.is_drivers)
            for s, place in ((s, self._places[s]) for s in services)
        }
        await_each(calls, self.watch)
        self.exchange.buffers.requests[services, OPERATION] = PING
        self.exchange.request(services)

    def ready(self) -> None:
        """All kernels are compiled: from now on a timeout is a failure."""
        self.watch.has_started = True
        for relay in self._relays:
            relay.ready()

    def kill(self, services: Sequence[int] | None = None) -> None:
        """Kill the processes of `services`, or of all, and the relays."""
        for service in self.topology.services if services is None else services:
            ray.kill(self.handles[service], no_restart=True)
        for relay in self._relays:
            relay.kill()

    def _start_relays(self, spawn_relay: SpawnRelay) -> list[Relay]:
        """A relay on every host but the first, for the services there; none without --hosts."""
        nodes, relays = node_ids(self.system.hosts), []
        for host, node in list(zip(self.system.hosts, nodes, strict=True))[1:]:
            relay = spawn_relay(self.names, self.handles, node)
            relays.append(Relay(host, relay, self.topology.on_host(host)))
        return relays


def node_ids(hosts: Sequence[str]) -> list[str]:
    """Ids of the Ray nodes at these addresses, or of these ids. Errors: UsageError for no node."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = {node["NodeManagerAddress"]: node["NodeID"] for node in alive}
    ids = {node["NodeID"]: node["NodeID"] for node in alive}
    for host in hosts:
        if host not in found | ids:
            raise UsageError(
                f"--hosts: no Ray node is at {host}, there are {', '.join(sorted(found))}; run "
                "`ray start --address=HEAD:6379` there"
            )
    return [(found | ids)[host] for host in hosts]


def service_nodes(
    parts: Sequence[ServicePart], hosts: Sequence[str], own_node: str | None
) -> list[str | None]:
    """The Ray node of each service; None is any node. Errors: UsageError.

    Without --hosts `own_node`.
    """
    nodes = dict(zip(hosts, node_ids(hosts), strict=True)) if hosts else {}
    return [nodes[part.host] if part.host else own_node for part in parts]
