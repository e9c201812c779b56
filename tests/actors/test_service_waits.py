"""Services that are stopped while somebody waits for them, and those that lack a neuron."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.model.errors import ServiceError
from tests.actors.changing_services import (
    config_of,
    hot_of,
    require_whole,
    tokens,
)
from tests.actors.stand_in_ray import (
    StandInActor,
    StandInRay,
    StandInSystem,
    lose_once,
    stand_in_system,
)
from tests.conftest import TinyCheckpoint

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("one_torch_thread")]
Spawn = Callable[..., StandInActor]


def stopping_at(method: str, name: str, spawn: Spawn) -> Spawn:
    """As `spawn`, but the service of that name is stopped before its first call of `method`."""

    def stopping(spec: ServiceSpec, node_id: str | None) -> StandInActor:
        actor = spawn(spec, node_id)
        if spec.name == name:
            actor.before[method] = actor.stop
        return actor

    return stopping


@pytest.mark.parametrize("method", ["load", "held_neurons", "attach"])
def test_a_new_service_that_is_stopped_is_refused(
    copied: TinyCheckpoint, host: StandInRay, method: str
) -> None:
    with stand_in_system(host, config_of(copied.path)) as system:
        expected, spawn = tokens(system), host.spawn
        system.actor.services.spawn = stopping_at(method, "cpu1", spawn)
        with pytest.raises(ServiceError) as caught:
            system.actor.scale(2)
        assert str(caught.value) == (
            "the number of CPU services stays 1: the cpu1 service does not answer: it is stopped "
            "or stuck"
        )
        system.actor.services.spawn = spawn
        require_whole(system, 1, hot_of(system))
        assert tokens(system) == expected


@pytest.mark.parametrize("lost", [(0, 2), (2, 1, 0)])
def test_services_that_are_lost_together_are_replaced_together(
    copied: TinyCheckpoint, host: StandInRay, lost: tuple[int, ...]
) -> None:
    """They load at the same time, so it takes as long as for one."""
    with stand_in_system(host, config_of(copied.path, num_cpu_actors=2)) as system:
        expected, meeting = tokens(system), threading.Barrier(len(lost))
        before = [actor.pid for actor in host.alive()]

        def meet() -> None:
            meeting.wait(60)

        for service in lost:
            host.alive()[service].before["load"] = meet
        lose_once(host, *lost)
        assert tokens(system) == expected
        after = [actor.pid for actor in host.alive()]
        assert {each for each in range(3) if after[each] != before[each]} == set(lost)
        load = system.actor.driver_load()
        died = ", ".join(f"service {service} died" for service in lost)
        assert load.num_replaced == len(lost)
        assert load.last_replaced == f"{died}, and were replaced"


def test_one_of_several_that_fails_as_it_is_replaced(
    copied: TinyCheckpoint, host: StandInRay
) -> None:
    with stand_in_system(host, config_of(copied.path, num_cpu_actors=2)) as system:
        expected, cpu = tokens(system), system.service("cpu1")

        def stop_once() -> None:
            cpu.before.clear()
            cpu.stop()

        cpu.before["load"] = stop_once
        lose_once(host, 1, 2)
        assert tokens(system) == expected and not cpu.before
        load = system.actor.driver_load()
        assert load.num_replaced == 2
        assert load.last_replaced.startswith("service 1 died, the cpu1 service does not answer")


def test_a_service_that_is_stopped_while_the_system_starts(
    copied: TinyCheckpoint, host: StandInRay
) -> None:
    host.spawn = stopping_at("attach", "cpu0", host.spawn)  # type: ignore[method-assign]
    system = StandInSystem(host, config_of(copied.path))
    with pytest.raises(ServiceError, match="the cpu0 service does not answer: it is stopped"):
        system.actor.load()
    assert not host.alive()


class Forgetful(ServiceActor):
    """A CPU service of which one neuron is lost on the way; at first it is only said to be."""

    loses = True

    def load(self, spec: ServiceSpec | None = None) -> None:
        if spec is not None and spec.index and self.loses:
            ids = spec.neuron_ids or []
            spec = replace(spec, neuron_ids=[ids[0][1:], *ids[1:]])
        super().load(spec)


def test_a_system_that_lacks_a_neuron_does_not_start(
    copied: TinyCheckpoint, host: StandInRay
) -> None:
    host.new_service = Forgetful
    system = StandInSystem(host, config_of(copied.path))
    with pytest.raises(ServiceError, match="of layer 0, 1 are in no service and 0 too many"):
        system.actor.load()


def test_a_service_that_comes_back_with_fewer_neurons_ends_the_system(
    copied: TinyCheckpoint, host: StandInRay
) -> None:
    with stand_in_system(host, config_of(copied.path)) as system:
        tokens(system)
        host.new_service = Forgetful
        lose_once(host, 1)
        with pytest.raises(ServiceError, match="the cpu0 service came back with other neurons"):
            tokens(system)
