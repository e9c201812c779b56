"""What a watched system says of itself, beside counts made in another way."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.actors.telemetry.snapshot import NeuronWatch
from hotcold.numba_kernels.loops.mailbox import NUM_BUCKETS
from tests import reference
from tests.actors.batching import batching, complete, greedy
from tests.actors.in_process import InProcessSystem
from tests.actors.test_predicted_modes import for_services
from tests.predictor_layers import constant_layer
from tests.tiny_checkpoint import Tiny, TinyCheckpoint


def buckets_of(ids: np.ndarray, ffn_size: int) -> np.ndarray:
    """How many of `ids` are in each of equally long runs of neighbours."""
    found = [0] * NUM_BUCKETS
    for neuron in ids:
        found[int(neuron) * NUM_BUCKETS // ffn_size] += 1
    return np.array(found)


def watch_of(system: InProcessSystem) -> NeuronWatch:
    return NeuronWatch(system.config, system.exchange.buffers, system.topology)


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


def test_neurons_that_fire_are_counted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny("llama-relu")
    ids = checkpoint.ids[:6]
    fires = firing(monkeypatch, checkpoint, ids)
    with InProcessSystem(checkpoint.path, num_services=2, num_threads=2) as system:
        watch, engine, size = watch_of(system), system.engine("exact"), system.config.ffn_size
        watch.watch(60)
        for position, token_id in enumerate(ids.tolist()):
            engine.step([token_id], [position], [0])
        found = watch.read()
    assert found.num_steps == len(ids)
    assert engine.times.num_neurons == sum(fired.sum() for fired in fires)
    for layer, fired in enumerate(fires):
        by_token = [buckets_of(np.flatnonzero(row), size) for row in fired]
        np.testing.assert_array_equal(found.last_computed[layer], by_token[-1])
        np.testing.assert_allclose(found.mean_computed[layer], np.mean(by_token, axis=0))
        np.testing.assert_array_equal(found.last_gates[layer], buckets_of(np.arange(size), size))
        assert found.num_neurons[layer].sum() == size
    assert not found.num_hot.any()


def test_neurons_that_a_predictor_chose_are_counted(tiny: Tiny) -> None:
    with InProcessSystem(tiny("llama-relu").path, num_services=2, num_threads=2) as system:
        width, size = system.config.hidden_size, system.config.ffn_size
        chosen, order = np.arange(size) % 3 == 0, np.concatenate(system.shards())
        layers = [constant_layer(chosen[order], width)] * system.config.num_layers
        watch, engine = watch_of(system), system.engine("sign", for_services(system, layers))
        watch.watch(60)
        engine.step([5], [0], [0])
        found = watch.read()
    for gates in found.last_gates:
        np.testing.assert_array_equal(gates, buckets_of(np.flatnonzero(chosen), size))


def test_a_driver_tells_what_its_steps_computed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hotcold.actors.telemetry.snapshot._RECENT_S", 600
    )  # steps may wait for a compiler
    with batching(tiny("llama-relu"), context=128, num_slots=2) as (_, driver):
        assert driver.telemetry(600).speed.tokens_per_s == 0
        for prompt_ids in ([5, 6, 7], list(range(30))):  # the last one's steps alone are told
            result = complete(driver, greedy(prompt_ids, 20))
        shown, steps = driver.telemetry(), list(driver._scheduler.recent)[-19:]
    neurons, speed = shown.neurons, shown.speed
    assert neurons.num_steps == len(steps) == 19  # without the one that held the whole prompt
    computed = sum(step.times.num_neurons for step in steps)
    assert neurons.mean_computed.sum() * len(steps) == pytest.approx(computed)
    assert neurons.last_computed.sum() == steps[-1].times.num_neurons
    share = computed / neurons.num_neurons.sum() / len(steps)
    assert speed.neurons_computed == result.neurons_computed == pytest.approx(share)
    assert speed.tokens_per_s == pytest.approx(result.decode_tokens_per_s)
    assert speed.per_step_ms["total"] == pytest.approx(result.per_token_ms["total"])
    assert (shown.num_running, shown.num_waiting, shown.kv_pages_used) == (0, 0, 0)
    assert shown.mode == "exact"
