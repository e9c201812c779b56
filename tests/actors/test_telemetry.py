"""What a watched system says of itself, beside counts made in another way."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from hotcold.actors.driver.driver import Driver
from hotcold.actors.exchange.hosts_exchange import Relay
from hotcold.actors.exchange.recovery import RecoveryPolicy
from hotcold.actors.exchange.replacement import OwnPlace
from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.messages import GenerateRequest, ServiceSpec, SystemConfig
from hotcold.actors.setup.connection import Connection
from hotcold.actors.telemetry.snapshot import (
    NeuronWatch,
    bucket_of,
    bucket_sizes,
    num_buckets,
)
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.serve.mailbox import (
    FFN,
    LAYER,
    NUM_BUCKETS,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    WATCHED,
)
from tests import reference
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint
from tests.placement_cases import mixture_config

Tiny = Callable[..., TinyCheckpoint]


def buckets_of(ids: np.ndarray, ffn_size: int) -> np.ndarray:
    """How many of `ids` are in each of equally long runs of neighbours."""
    found = [0] * NUM_BUCKETS
    for neuron in ids:
        found[int(neuron) * NUM_BUCKETS // ffn_size] += 1
    return np.array(found)


def watch_of(system: InProcessSystem) -> NeuronWatch:
    return NeuronWatch(system.config, system.exchange.buffers, system.topology)


def until_unwatched(watch: NeuronWatch) -> None:
    deadline = time.monotonic() + 30
    while watch.is_watching:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def firing(
    monkeypatch: pytest.MonkeyPatch, tiny: TinyCheckpoint, ids: np.ndarray
) -> list[np.ndarray]:
    """By layer, which gates (T, N) fire for each of `ids` in the float64 reference."""
    found: list[np.ndarray] = []
    compute = reference._ffn

    def recording(config, weights, layer, x, thresholds):
        part = weights.part(layer)
        products = reference._linear(x, weights.gate[part], weights.gate_bias[part])
        found.append((products > 0).numpy())
        return compute(config, weights, layer, x, thresholds)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "_ffn", recording)
        reference.reference_logits(tiny.path, ids)
    return found


@pytest.mark.parametrize("variant", ["llama-relu", "opt-prenorm", "falcon-relu"])
def test_neurons_that_fire_are_counted(variant, tiny: Tiny, monkeypatch) -> None:
    ids = tiny(variant).ids[:6]
    fires = firing(monkeypatch, tiny(variant), ids)
    with InProcessSystem(tiny(variant).path, num_services=2, num_threads=2) as system:
        watch, engine, size = watch_of(system), system.engine("exact"), system.config.ffn_size
        watch.watch(60)
        for position, token_id in enumerate(ids.tolist()):
            engine.step([token_id], [position], [0])
        found = watch.read()
    assert found.num_steps == len(ids)
    for layer, fired in enumerate(fires):
        by_token = [buckets_of(np.flatnonzero(row), size) for row in fired]
        np.testing.assert_array_equal(found.last_computed[layer], by_token[-1])
        np.testing.assert_allclose(found.mean_computed[layer], np.mean(by_token, axis=0))
        np.testing.assert_array_equal(found.last_gates[layer], buckets_of(np.arange(size), size))
        assert found.num_neurons[layer].sum() == size
    assert not found.num_hot.any()


def test_of_listed_neurons_only_gates_on_the_list_count(tiny: Tiny) -> None:
    with InProcessSystem(tiny("llama-relu").path) as system:
        watch, buffers, size = watch_of(system), system.exchange.buffers, system.config.ffn_size
        watch.watch(60)
        order = system.shards()[0]
        rows = np.array([0, 5, 6, 40, size - 1], np.int32)
        buffers.ffn_input[0] = np.random.default_rng(0).normal(size=buffers.ffn_input.shape[1])
        buffers.active_ids[1, : rows.size] = rows
        request = buffers.requests[1]
        request[OPERATION], request[LAYER], request[NUM_TOKENS] = FFN, 1, 1
        request[NUM_IDS] = rows.size
        system.exchange.request([1])
        found = watch.read()
        request[NUM_IDS] = 0
        system.exchange.request([1])
        unwatched = watch.read()
    np.testing.assert_array_equal(found.last_gates[1], buckets_of(order[rows], size))
    assert (found.last_computed <= found.last_gates).all()
    assert not unwatched.last_gates[1].any()
    np.testing.assert_allclose(unwatched.mean_gates[1], found.last_gates[1] / 2)


def test_counting_ends_when_nobody_asks(tiny: Tiny) -> None:
    with InProcessSystem(tiny("llama-relu").path) as system:
        watch, engine, buffers = watch_of(system), system.engine("exact"), system.exchange.buffers
        engine.step([3], [0], [0])
        assert not buffers.counted_steps.any()
        watch.watch(0.01)
        until_unwatched(watch)
        assert not buffers.requests[:, WATCHED].any()
        engine.step([3], [1], [0])
        assert not buffers.counted_steps.any()
        watch.watch(60)  # a second watch begins with nothing
        assert watch.read().num_steps == 0
        engine.step([3], [2], [0])
        assert watch.read().num_steps == 1
        watch.watch(0)
        until_unwatched(watch)


def test_counts_wrap_around_without_a_jump(tiny: Tiny) -> None:
    with InProcessSystem(tiny("llama-relu").path) as system:
        system.exchange.buffers.neuron_counts[:] = 2**32 - 3
        system.exchange.buffers.counted_steps[:] = 2**32 - 1
        watch = watch_of(system)
        watch.watch(60)
        system.engine("exact").step([3], [0], [0])
        found = watch.read()
    assert found.num_steps == 1
    np.testing.assert_array_equal(found.mean_gates, found.num_neurons)


def test_a_fresh_process_that_shares_no_memory_begins_anew(tiny: Tiny) -> None:
    with InProcessSystem(tiny("llama-relu").path) as system:
        watch, buffers = watch_of(system), system.exchange.buffers
        layers, size = system.config.num_layers, system.config.ffn_size

        def counts(steps: int, a_step: int) -> tuple[np.ndarray, np.ndarray]:
            counts = np.full_like(buffers.neuron_counts[1], steps * a_step)
            return counts, np.full(layers, steps, np.uint32)

        watch.write(1, *counts(900, 2))
        watch.watch(60)
        watch.write(1, *counts(910, 2))
        assert watch.read().num_steps == 10
        np.testing.assert_array_equal(watch.read().mean_gates, 2)
        watch.write(1, *counts(4, 3))
        found = watch.read()
    assert found.num_steps == 4 and found.num_neurons.sum() == layers * size
    np.testing.assert_array_equal(found.mean_gates, 3)


def test_services_that_the_driver_does_not_see_tell_what_they_counted(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they have an arena, with a relay of another host."""
    with InProcessSystem(tiny("llama-relu").path, num_services=2) as system:
        monkeypatch.setattr(ray, "get", lambda ref: system.arena)
        config = SystemConfig("m", num_cpu_actors=2, hosts=("a", "b"))
        specs = [
            ServiceSpec(**vars(part) | {"system": config, "num_threads": 1})
            for part in system.topology.parts
        ]
        actors = [ServiceActor(spec) for spec in specs]
        for actor, service in zip(actors, system.services, strict=True):
            actor._service = SimpleNamespace(  # type: ignore[assignment]
                attach=lambda *arena: None, buffers=service.buffers, device_name="cpu"
            )
        handles = [
            SimpleNamespace(
                attach=SimpleNamespace(remote=actor.attach), ping=SimpleNamespace(remote=0)
            )
            for actor in actors
        ]
        connection = Connection(config, specs, handles, RecoveryPolicy())
        relay = Relay("b", handles[2], [2])
        relay.arena_refs = ["the relay's"]
        own = OwnPlace(["the driver's"], system.exchange.buffers)
        connection._places, connection._layout = [own, own, relay], system.layout
        connection.exchange = system.exchange
        monkeypatch.setattr(
            "hotcold.actors.setup.connection.await_each", lambda calls, watch: calls
        )
        connection.attach(connection.topology.services)
        system.exchange.buffers.counted_steps[:] = 7
        found = [actor.vitals() for actor in actors]
    assert [vitals.steps is not None for vitals in found] == [False, False, True]
    assert np.all(found[2].steps == 7)


@pytest.mark.parametrize("mode", ["exact", "dense"])
def test_a_driver_tells_what_its_steps_computed(
    mode, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hotcold.actors.telemetry.snapshot._RECENT_S", 600
    )  # steps may wait for a compiler
    config = SystemConfig(str(tiny("llama-relu").path), mode=mode, context_length=128, max_batch=2)
    with InProcessSystem(tiny("llama-relu").path, num_slots=2, num_services=2) as system:
        driver = Driver(config, system.exchange, system.topology)
        try:
            assert driver.telemetry(600).speed.tokens_per_s == 0
            sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            for prompt_ids in ([5, 6, 7], list(range(30))):  # the last one's steps alone are told
                request = GenerateRequest(sampling, prompt_ids=prompt_ids, use_cache=False)
                *_, event = driver.generate(request)
            shown, steps = driver.telemetry(), list(driver._scheduler.recent)[-19:]
        finally:
            driver.close()
    result, neurons, speed = event.result, shown.neurons, shown.speed
    assert result is not None
    assert neurons.num_steps == len(steps) == 19  # without the one that held the whole prompt
    computed = sum(step.times.num_neurons for step in steps)
    assert neurons.mean_computed.sum() * len(steps) == pytest.approx(computed)
    assert neurons.last_computed.sum() == steps[-1].times.num_neurons
    share = computed / neurons.num_neurons.sum() / len(steps)
    assert speed.neurons_computed == result.neurons_computed == pytest.approx(share)
    assert speed.tokens_per_s == pytest.approx(result.decode_tokens_per_s)
    assert speed.per_step_ms["total"] == pytest.approx(result.per_token_ms["total"])
    assert (shown.num_running, shown.num_waiting, shown.kv_pages_used) == (0, 0, 0)
    assert shown.mode == mode


def test_buckets_of_a_mixture_are_experts() -> None:
    config = mixture_config(num_experts=5, size=12, shared_size=7, dense_layers=(1,))
    assert num_buckets(config) == 6
    found = [
        bucket_of(config, layer, np.arange(size)) for layer, size in enumerate(config.ffn_sizes)
    ]
    assert found[0].tolist() == [*np.repeat(range(5), 12), *[5] * 7]
    assert found[1].tolist() == [neuron * 6 // 1000 for neuron in range(1000)]
    sizes = bucket_sizes(config, [np.arange(size) for size in config.ffn_sizes])
    assert sizes[0].tolist() == [12] * 5 + [7] and sizes[1].sum() == 1000
