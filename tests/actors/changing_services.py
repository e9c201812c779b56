"""Systems whose services change: how they start, what they have to know, requests meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda import fit as cuda_fit
from hotcold.actors.driver.driver import Driver
from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.kv_pool import num_pages_of
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.actors.setup.placement_choice import plan_request
from hotcold.model.config.build import read_config
from hotcold.model.errors import ServiceError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.sampling import SamplingParams
from hotcold.placement.plan import plan_path, write_plan
from hotcold.placement.planner import make_plan
from tests.actors.batching import Background
from tests.actors.numpy_device import NumpyDevice
from tests.actors.stand_in_ray import StandInRay, StandInSystem
from tests.actors.test_placement_choice import WITH_GPU

CONTEXT = 256
SIZES = (5, 2 * MATRIX_TOKENS, 20)  # of prompts
KINDS = ("cpu", "fall-back", "cuda")


def config_of(path: Path, **options: Any) -> SystemConfig:
    settings: dict[str, Any] = {
        "num_cpu_actors": 1,
        "num_threads": 3,
        "context_length": CONTEXT,
        "max_batch": 4,
        "kv_positions": 4 * CONTEXT,
        "kv_dtype": "float32",
        "prefill_chunk": 64,
    }
    return SystemConfig(str(path), **(settings | options))


class ServiceOnDevice(ServiceActor):
    """Its GPU is a stand-in."""

    def _open_device(self) -> NumpyDevice:
        return NumpyDevice()


class ServiceWithoutGpu(ServiceActor):
    """Its GPU cannot be opened."""

    def _open_device(self) -> NumpyDevice:
        raise RuntimeError("the GPU cannot be used")


def half_on_gpu(path: Path) -> SystemConfig:
    """A system whose GPU has memory for half of the neurons."""
    system, config = config_of(path, device="cuda"), read_config(path)
    sizes = cuda_fit._Sizes.of(system, config, NumpyDevice())
    parts = config.num_layers * sizes.layer + sizes.head + sizes.work + cuda_fit.LATE_BYTES
    neurons = config.num_neurons // 2 * sizes.neuron
    return replace(system, gpu_memory_bytes=parts + neurons)


def with_plan(path: Path, seed: int = 1) -> SystemConfig:
    """A system for one GPU and one CPU service, with a plan of random places."""
    system, config = config_of(path, device="cuda"), read_config(path)
    plan = make_plan(config, WITH_GPU, None, plan_request(system, None, None, "", None))
    places = np.random.default_rng(seed).choice(2, plan.neuron_device.shape).astype(np.int16)
    file = plan_path(path, plan.request)
    assert plan.num_gpus == 1 and len(plan.device_names) == 2
    write_plan(file, ModelIdentity.of(path), replace(plan, neuron_device=places))
    return replace(system, plan_path=str(file))


def start_of(kind: str, path: Path, host: StandInRay) -> SystemConfig:
    if kind == "cpu":
        return config_of(path)
    host.new_service = ServiceOnDevice if kind == "cuda" else ServiceWithoutGpu
    return half_on_gpu(path) if kind == "cuda" else with_plan(path)


def greedy(size: int, num_tokens: int = 16) -> GenerateRequest:
    ids = np.random.default_rng(size).integers(0, 101, size).tolist()
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=ids)


def complete(system: StandInSystem, request: GenerateRequest) -> list[int]:
    *_, last = driver_of(system).generate(request)  # whose readers need not attend
    assert last.result is not None
    return last.result.ids


def tokens(system: StandInSystem) -> list[list[int]]:
    return [complete(system, greedy(size)) for size in SIZES]


def driver_of(system: StandInSystem) -> Driver:
    return system.actor.services.driver


def require_whole(system: StandInSystem, num_cpu_actors: int, hot: Sequence[np.ndarray]) -> None:
    """All that is known in several places says the same."""
    services, driver = system.actor.services, driver_of(system)
    actors = [system.service(name) for name in services.connection.names]
    assert [actor.name for actor in actors] == ["gpu", *(f"cpu{i}" for i in range(num_cpu_actors))]
    assert sorted(map(id, system.host.alive())) == sorted(map(id, actors))
    config, held = driver.generator.config, [actor.service.spec.neuron_ids for actor in actors]
    for layer in range(config.num_layers):
        ids = [one for layers in held if layers is not None for one in layers[layer].tolist()]
        assert sorted(ids) == list(range(config.ffn_size))
    num_hot = [ids.size for ids in hot]
    assert [ids.tolist() for ids in held[0] or []] == [ids.tolist() for ids in hot if any(num_hot)]
    for engine in (driver.engine, driver._profiling):
        assert engine.topology is services.connection.topology
        assert engine.topology.num_hot.tolist() == num_hot
    assert driver.telemetry(0.0).neurons.num_hot.sum(axis=1).tolist() == num_hot
    driver._scheduler.between_steps(lambda: require_pages(driver))
    names, owners = system.actor.neuron_owners()
    for actor in actors:
        for layer, own in enumerate(actor.service.spec.neuron_ids or []):
            assert (owners[layer, own] == names.index(actor.name)).all()
    assert system.actor.describe().num_cpu_actors == num_cpu_actors
    assert len({driver._system, services.system, services.connection.system}) == 1


def require_pages(driver: Driver) -> None:
    """Pages are free or have as many users as are counted; services read what the pool wrote."""
    tables, pool = driver.engine.exchange.buffers.page_tables, driver._pool
    assert np.shares_memory(pool._page_tables, tables)
    assert pool.num_pages[0] == 4 * num_pages_of(CONTEXT)
    for number, group in enumerate(pool._groups):
        allocated = Counter(page for held in group.held.values() for page in held.pages)
        users = {page: count for page, count in enumerate(group._num_users) if count}
        assert dict(allocated) == users and set(allocated).isdisjoint(group._free_pages)
        assert len(allocated) + group.num_free == group.num_pages
        for slot, held in group.held.items():
            assert tables[number, slot, held.first : held.end].tolist() == held.pages


def hot_of(system: StandInSystem) -> list[np.ndarray]:
    """What the GPU service holds, in every layer."""
    config = driver_of(system).generator.config
    held = system.service("gpu").service.spec.neuron_ids
    return held or [np.empty(0, np.int32)] * config.num_layers


def when_others_wait(system: StandInSystem) -> threading.Event:
    """Hold the next step until another job waits for the engine's thread; set once it is held."""
    incoming, is_held = driver_of(system)._scheduler._incoming, threading.Event()

    def hold(services: Sequence[int]) -> None:
        is_held.set()
        while incoming.empty():
            threading.Event().wait(0.001)
        system.host.on_request = lambda services: None

    system.host.on_request = hold
    return is_held


def scale_among_requests(system: StandInSystem, count: int) -> tuple[Any, list[Any]]:
    """Scale while requests run; the outcome, and what came of the requests."""
    is_held = when_others_wait(system)
    running = [Background(partial(complete, system, greedy(size))) for size in SIZES]
    is_held.wait()
    outcome: Any = None
    try:
        outcome = system.actor.scale(count)
    except Exception as error:
        outcome = error
    system.host.on_request = lambda services: None
    with suppress(ServiceError):  # where the system has ended
        driver_of(system)._scheduler.between_steps(lambda: require_pages(driver_of(system)))
    return outcome, [one.end() for one in running]
