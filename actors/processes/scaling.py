"""More or fewer CPU services while the system serves: new ones are loaded beside the old ones.

The GPU service stays, with its KV cache: between two steps it leaves the old arena for the new one.
Until then the old services serve, and where new ones cannot be had they go on. A plan is made for a
number of services: after a change cold neurons are dealt in turn; hot ones stay where they are.
"""

from dataclasses import replace

from ray.util.placement_group import PlacementGroup, placement_group

from actors.exchange.doorbell_exchange import Exchange
from actors.processes.cluster import await_actors
from actors.processes.system_services import SystemServices
from actors.protocol.arena import ArenaLayout
from actors.protocol.failures import cause_of
from actors.protocol.messages import SystemConfig
from actors.protocol.ray_memory import free_bytes
from actors.setup.connection import Connection
from actors.setup.shards import arena_layout, service_specs
from model.config.model_config import ModelConfig
from model.errors import HotcoldError, MemoryBudgetError, UsageError
from numba_kernels.serve.mailbox import OPERATION, STOP
from placement.memory import memory_need

_START_S = 60.0
_JOIN_S = 10.0
_GIB = 1 << 30


def scale(services: SystemServices, num_cpu_actors: int) -> SystemConfig:
    """Serve with another number of CPU services; returns when they do. Requests go on.

    Errors:  HotcoldError where they cannot be had: the old ones go on
    """
    driver = services.driver
    with services.changing:
        system = scaled_system(services.system, num_cpu_actors)
        if num_cpu_actors == services.system.num_cpu_actors:
            return services.system
        old = services.connection
        new = connect_more(services, system)
        try:
            driver.change_services(system, new.shards, lambda: _change(services, new))
        except BaseException:
            if services.connection is old:
                new.kill(new.cpu_services)
            raise
        old.kill(old.cpu_services)
        if services.held_cpus is None:
            services.held_cpus = hold_cpus(system.num_threads, services.node_id)
        return system


def _change(services: SystemServices, new: Connection) -> None:
    """Take other CPU services; called by the engine's thread. Errors: CacheLost."""
    new.replacer.take_over(0, services.connection.replacer)
    failure, products = "", services.system.products
    if products is not None and new.system.products is None:  # agreed on while these loaded
        new.system = replace(new.system, products=products)
        new.use_products(products)
    try:
        move_gpu(services.exchange.inner, new)
    except HotcoldError as error:  # then a fresh GPU service comes to the new arena
        failure = cause_of(error)
    services.exchange.change(new.exchange, new.replacer)
    services.system, services.connection = new.system, new
    if failure:
        services.exchange.renew(0, failure)


def scaled_system(system: SystemConfig, num_cpu_actors: int) -> SystemConfig:
    """The same system with another number of CPU services. Errors: UsageError."""
    if system.hosts:
        raise UsageError("a system on several hosts cannot be scaled while it serves; start anew")
    if not 1 <= num_cpu_actors <= system.num_threads:
        raise UsageError(
            f"--cpu-actors {num_cpu_actors} is not within 1..{system.num_threads}: the system has "
            f"{system.num_threads} threads, and a CPU service takes at least one"
        )
    # A GPU keeps the neurons that it has; without one a plan says nothing of the new services.
    plan_path = system.plan_path if system.device == "cuda" else ""
    return replace(system, num_cpu_actors=num_cpu_actors, plan_path=plan_path)


def connect_more(services: SystemServices, system: SystemConfig) -> Connection:
    """Load and try out the CPU services of `system` beside those that serve now.

    Their cores are those of the services that they replace: Ray is asked for none.
    Errors:  MemoryBudgetError, ServiceError, and what a service cannot load; none is left then
    """
    config, node_id = services.config, services.node_id
    layout = arena_layout(system, config)
    _require_room(system, config, layout)
    specs = [replace(spec, reserves_cpus=False) for spec in service_specs(system, config)]
    gpu = services.connection.handles[0]
    handles = [gpu, *(services.spawn(spec, node_id) for spec in specs[1:])]
    new = Connection(system, specs, handles, services.policy)
    cpus = new.cpu_services
    try:
        await_actors(new.handles[1:], [0] * len(cpus), _START_S, node_id)
        new.call_each("load", services=cpus)
        new.open(layout, services.spawn_relay)
        new.attach(cpus)
        new.ready()
    except BaseException:
        new.kill(cpus)
        raise
    return new


def move_gpu(old: Exchange, new: Connection) -> None:
    """Let the GPU service leave the old arena for the new one, with its KV cache.

    Errors:  HotcoldError where it fails or dies; nothing else has changed then
    """
    if new.shares_arena:  # over actor calls it has an arena of its own
        old.wires.requests[0, OPERATION] = STOP
        old.ask([0])
        new.call_each("join", _JOIN_S, services=[0])
        new.attach([0])


def hold_cpus(num_cpus: int, node_id: str | None) -> PlacementGroup:
    """Keep so many of Ray's CPUs from other systems, in place of services that have ended."""
    return placement_group(
        [{"CPU": num_cpus}], strategy="STRICT_PACK", _soft_target_node_id=node_id
    )


def _require_room(system: SystemConfig, config: ModelConfig, layout: ArenaLayout) -> None:
    need = memory_need(config, 1, 2, system.num_cpu_actors, layout.num_bytes)
    needed = need.ffn_bytes + need.process_bytes + need.arena_bytes
    free = free_bytes()
    if needed > free:
        raise MemoryBudgetError(
            f"{system.num_cpu_actors} new CPU services need {needed / _GIB:.2f} GiB beside the old "
            f"ones, {free / _GIB:.2f} GiB are free: {(needed - free) / _GIB:.2f} GiB are missing; "
            "free as much, or start the system anew with --cpu-actors"
        )
