"""Changes the number of CPU services while the system serves.

New services load beside the old ones, which serve until then, and go on if that fails. The
attention service stays, with its KV cache: between two steps it moves from the old arena to the new
one. A placement plan holds for one number of services: after a change cold neurons are assigned
round-robin; hot ones stay where they are.
"""

from dataclasses import replace

from ray.util.placement_group import PlacementGroup, placement_group

from hotcold.actors.exchange.doorbell_exchange import Exchange
from hotcold.actors.processes.cluster import await_actors
from hotcold.actors.processes.system_services import SystemServices
from hotcold.actors.protocol.failures import ServiceLost, cause_of
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.ray_memory import free_bytes
from hotcold.actors.setup.account import new_services_bytes
from hotcold.actors.setup.connection import Connection
from hotcold.actors.setup.shards import arena_layout, changed_specs
from hotcold.model.byte_sizes import binary_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, MemoryBudgetError, ServiceError, UsageError
from hotcold.numba_kernels.loops.mailbox import OPERATION, STOP

_START_S = 60.0
_JOIN_S = 10.0


def scale(services: SystemServices, num_cpu_actors: int) -> SystemConfig:
    """Serve with another number of CPU services; returns once they serve. Requests go on.

    Errors:  SystemLost where it fails half-way, which ends the system; after any other HotcoldError
             the old services go on
    """
    driver = services.driver
    with services.changing:
        system = scaled_system(services.system, num_cpu_actors)
        if num_cpu_actors == services.system.num_cpu_actors:
            return services.system
        old = services.connection
        try:
            new = connect_more(services, system)
            try:
                driver.change_services(CpuServiceChange(services, new))
            except BaseException:
                unused = new if services.connection is old else old
                unused.kill(unused.topology.cpu_services)
                raise
        except ServiceLost as error:
            raise ServiceError(
                f"the number of CPU services stays {old.system.num_cpu_actors}: {cause_of(error)}"
            ) from error
        old.kill(old.topology.cpu_services)
        if services.held_cpus is None:
            services.held_cpus = hold_cpus(system.num_threads, services.node_id)
        return services.system


class CpuServiceChange:
    """New CPU services beside those that serve, loaded and ready, for `Driver.change_services`.

    system, topology, exchange: as they are with them; hot neurons stay where they are
    """

    def __init__(self, services: SystemServices, new: Connection) -> None:
        """`new` shares services with attention of `services`, which still use the old arena."""
        self._services, self._new = services, new
        self.system, self.topology, self.exchange = new.system, new.topology, new.exchange

    def prepare(self) -> None:
        """Do what can fail and changes no service that serves. Errors: HotcoldError.

        The new services are prepared for long prompts if the old ones are.
        """
        new, old = self._new, self._services.connection
        take_over_attention(new, old)
        if old.has_matmul:
            new.prepare_prompts(new.topology.cpu_services)

    def move(self) -> None:
        """Move services with attention to the new arena, and the driver's exchange to all.

        Errors:  CacheLost where one with attention had to be replaced, ServiceError where that
                 failed
        """
        services, new = self._services, self._new
        failures: dict[int, str] = {}
        for service in new.topology.cache_services:
            try:
                move_attention(service, services.exchange.inner, new)
            except HotcoldError as error:
                failures[service] = cause_of(error)
        services.exchange.change(new.exchange, new.replacer.replace, new.topology)
        services.system, services.connection = new.system, new
        if failures:
            services.exchange.renew(failures)


def scaled_system(system: SystemConfig, num_cpu_actors: int) -> SystemConfig:
    """The same system with another number of CPU services. Errors: UsageError."""
    if system.hosts:
        raise UsageError("a system on several hosts cannot be scaled while it serves; start anew")
    if system.storage is not None:
        raise UsageError(
            "a system with neurons on storage cannot be scaled while it serves; "
            "start anew with --cpu-actors"
        )
    if not 1 <= num_cpu_actors <= system.num_threads:
        raise UsageError(
            f"--cpu-actors {num_cpu_actors} is not within 1..{system.num_threads}: the system has "
            f"{system.num_threads} threads, and a CPU service takes at least one"
        )
    # The attention service keeps its neurons; the plan does not hold for the others.
    return replace(system, num_cpu_actors=num_cpu_actors, plan_path="")


def connect_more(services: SystemServices, system: SystemConfig) -> Connection:
    """Load and try out the CPU services of `system` beside those that serve now.

    The attention service keeps the neurons that it has loaded, whatever profile or plan has been
    written since. The new services take over the old ones' cores, so they reserve no Ray CPUs.
    Errors:  MemoryBudgetError, ServiceError, and those of `load`; no new service is left then
    """
    config, node_id, old = services.config, services.node_id, services.connection
    _require_memory(system, config)
    kept = [old.specs[service] for service in old.topology.cache_services]
    changed = changed_specs(system, config, kept)
    specs = [replace(spec, reserves_cpus=False) for spec in changed]
    handles = [
        services.spawn(spec, node_id) if spec.is_cpu_service else old.handles[spec.index]
        for spec in specs
    ]
    new = Connection(system, specs, handles, services.policy)
    cpus = new.topology.cpu_services
    try:
        await_actors([handles[s] for s in cpus], [0] * len(cpus), _START_S, node_id)
        new.find(cpus)
        take_over_attention(new, old)
        new.load(cpus)
        new.require_partition(config)
        new.open(arena_layout(system, config), services.spawn_relay)
        new.attach(cpus)
        new.ready()
    except BaseException:
        new.kill(cpus)
        raise
    return new


def take_over_attention(new: Connection, old: Connection) -> None:
    """Expect the services with attention in the processes in which `old` knows them."""
    for service in new.topology.cache_services:
        new.replacer.take_over(service, old.replacer)


def move_attention(service: int, old: Exchange, new: Connection) -> None:
    """Move a service with attention, and its KV cache, from the old arena to the new one.

    Errors:  HotcoldError where it fails, dies or is stuck: then it serves through neither
    """
    if new.shares_arena:  # with actor calls it has an arena of its own
        old.buffers.requests[service, OPERATION] = STOP
        old.request([service])
        (has_ended,) = new.call_each("join", _JOIN_S, services=[service])
        if not has_ended:
            name = new.names[service]
            raise ServiceError(f"the {name} service's threads do not end; start again")
        new.attach([service])


def hold_cpus(num_cpus: int, node_id: str | None) -> PlacementGroup:
    """Reserve Ray CPUs in place of services that have ended."""
    return placement_group(
        [{"CPU": num_cpus}], strategy="STRICT_PACK", _soft_target_node_id=node_id
    )


def _require_memory(system: SystemConfig, config: ModelConfig) -> None:
    needed, free = new_services_bytes(system, config), free_bytes()
    if needed > free:
        raise MemoryBudgetError(
            f"{system.num_cpu_actors} new CPU services need {binary_text(needed)} beside the old "
            f"ones, {binary_text(free)} are free: {binary_text(needed - free)} are missing; "
            "free as much, or start the system anew with --cpu-actors"
        )
