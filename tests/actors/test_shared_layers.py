"""Layers that a GPU shares with CPU services are one request: the bits of the same one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.attention.cuda import shared
from hotcold.actors.cpu.cpu_service import CpuService
from hotcold.actors.driver import engine
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.scoring import AuditedEngine
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.failures import AnswerFailed
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.numba_kernels.ffn.ffn_loop import ffn_request
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    END_LAYER,
    FFN,
    GIVER,
    LAYER,
    LAYERS,
    NO_COUNTERS,
    OPERATION,
    await_input,
    finish_request,
    give_output,
    next_share,
)
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor import PredictorInput
from hotcold.predictors.predictor_file import Predictors, write_predictors
from hotcold.predictors.stacked import AnyLayer
from tests.actors.batching import random_sign
from tests.actors.cuda_in_process import CudaInProcess, a_third, emulated_devices
from tests.actors.in_process import InProcessSystem
from tests.actors.numpy_device import NumpyDevice, NumpyKernels
from tests.actors.test_cuda_whole_layers import SIZES, WHOLE_STEPS, asked, counts_of, steps
from tests.conftest import TinyCheckpoint
from tests.reference import relative_difference

Tiny = Callable[..., TinyCheckpoint]
# Parallel layers with biases, a factor of the residual, mixtures, normed FFN outputs, up to 5 CPU
# services.
CASES = [
    *(("llama-gqa", 1, 1), ("falcon-bias", 2, 1), ("minicpm", 3, 2), ("opt-postnorm", 5, 1)),
    *(("qwen2-moe", 2, 2), ("gpt-oss", 3, 1), ("gemma2", 2, 1), ("olmo2", 3, 2)),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits as long as services may take to compile."""
    monkeypatch.setattr(shared, "LIMIT_NS", 300_000_000_000)


def assert_shared(system: CudaInProcess, tokens: np.ndarray, sizes: list[int]) -> None:
    """Logits and counts of steps whose layers are shared, and of the same by the exchange."""
    ids, requests = np.resize(tokens, sum(sizes)).tolist(), asked(system)
    for mode in ("exact", "dense"):
        found, counts = [], []
        for shares in (False, True):
            engine = system.engine(mode)
            engine.shares_layers = shares
            requests.clear()
            found.append(steps(engine, ids, sizes))
            counts.append(counts_of(engine))
            operations = [operation for operation, _ in requests]
            # A request a token, instead of two a layer.
            assert not shares or operations == [LAYERS] * len(sizes)
            assert shares or {ATTENTION, FFN} < set(operations)
        for one_by_one, together in zip(*found, strict=True):
            np.testing.assert_array_equal(together, one_by_one)
        assert counts[0] == counts[1]


@pytest.mark.parametrize(("variant", "num_services", "num_threads"), CASES)
def test_the_same_bits(tiny: Tiny, variant: str, num_services: int, num_threads: int) -> None:
    checkpoint = tiny(variant)
    with CudaInProcess(checkpoint.path, num_services, num_threads, hot=a_third) as system:
        assert_shared(system, checkpoint.ids, SIZES)


@pytest.mark.parametrize(
    ("variant", "num_services"), [("falcon-bias", 3), ("minicpm", 1), ("gemma2", 2)]
)
def test_the_same_bits_of_cudas_own_kernels(tiny: Tiny, variant: str, num_services: int) -> None:
    checkpoint, device = tiny(variant), emulated_devices()()
    with CudaInProcess(checkpoint.path, num_services, hot=a_third, device=device) as system:
        assert_shared(system, checkpoint.ids, WHOLE_STEPS)


def a_share(share: float) -> Callable[[int, int], list[np.ndarray]]:
    """Hot neurons: this share of each layer."""
    return lambda layers, size: [np.arange(round(share * size), dtype=np.int32)] * layers


def token_takes(system: CudaInProcess, shares: bool) -> list[int]:
    """Requests to the GPU, the host's waits for it, copies and launches of one token."""
    requests, device, engine = asked(system), system.device, system.engine("exact")
    engine.joins_layers = engine.shares_layers = shares
    for at in range(3):
        before = [device.num_waits, device.num_copies, device.num_launches]
        requests.clear()
        engine.step([5], [at], [0])
    after = [device.num_waits, device.num_copies, device.num_launches]
    return [len(requests), *(b - a for a, b in zip(before, after, strict=True))]


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_what_a_token_takes(tiny: Tiny, share: float) -> None:
    """One request, one wait and a handful of copies, where each layer took two, two and four."""
    with CudaInProcess(tiny("llama-gqa").path, 2, hot=a_share(share)) as system:
        num_layers = system.config.num_layers
        requests, waits, copies, launches = token_takes(system, shares=False)
        assert (requests, waits) == (2 * num_layers + 1, 2 * num_layers + 1)
        assert copies == 5 * num_layers + 1 + 2
        one = token_takes(system, shares=True)
        assert one[:2] == [1, 1] and one[2] <= 6
        assert one[3] == launches + (3 * num_layers if share < 1 else 0)


def test_sums_that_the_device_has_no_room_for(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are asked for one by one, as of services that pass on many outputs."""
    checkpoint = tiny("falcon-bias")
    with CudaInProcess(checkpoint.path, 3, hot=a_third) as system:
        ids, requests = checkpoint.ids[:4].tolist(), asked(system)
        expected = logits_of(system, ids)
        assert LAYERS in {operation for operation, _ in requests}
        requests.clear()
        monkeypatch.setattr(engine, "MOST_KEPT", 1)
        np.testing.assert_array_equal(logits_of(system, ids), expected)
        assert LAYERS not in {operation for operation, _ in requests}


def test_memory_that_the_device_cannot_map(tiny: Tiny) -> None:
    """Layers are asked for one by one, and whether it can is not asked with every step."""
    checkpoint, device = tiny("llama-gqa"), NumpyDevice(refuses_registration=True)
    with CudaInProcess(checkpoint.path, 2, hot=a_third, device=device) as system:
        requests, ids = asked(system), checkpoint.ids[:9].tolist()
        expected = logits_of(system, ids, shares=False)
        requests.clear()
        np.testing.assert_array_equal(logits_of(system, ids), expected)
        assert [operation for operation, _ in requests].count(LAYERS) == 1


@dataclass
class Predicted:
    """A model's random predictors, and their file."""

    predictors: Predictors
    path: str

    def engine(self, system: InProcessSystem, shares: bool) -> Engine:
        """An engine that computes what they choose."""
        engine = system.engine("exact", self.predictors.arranged(system.topology.shards))
        engine.joins_layers = engine.shares_layers = shares
        return engine


def random_lowrank(random: np.random.Generator, config: ModelConfig) -> LowRankLayer:
    """A predictor of bytes that chooses about half of the neurons, others for every input."""
    down, up = (
        random.integers(-127, 128, shape).astype(np.int8)
        for shape in ((22, config.hidden_size), (22, config.ffn_size))
    )
    return LowRankLayer(down, np.ones(22, np.float32), up, np.zeros(config.ffn_size, np.float32))


SIGN, LOWRANK = [random_sign], [random_lowrank]


def random_predictors(
    checkpoint: TinyCheckpoint,
    folder: Path,
    without: int = -1,
    kinds: Sequence[Callable[[np.random.Generator, ModelConfig], AnyLayer]] = SIGN,
    input_name: PredictorInput = "ffn_input",
) -> Predicted:
    """Of these kinds by turns; layer `without` has none."""
    random, config = np.random.default_rng(8), read_config(checkpoint.path)
    layers = [
        None if layer == without else kinds[layer % len(kinds)](random, config)
        for layer in range(config.num_layers)
    ]
    found = Predicted(Predictors(layers, input_name), str(folder / "predictors.safetensors"))
    write_predictors(Path(found.path), ModelIdentity.of(checkpoint.path), found.predictors)
    return found


LISTED: list[Any] = [
    ("llama-gqa", 1, 1, 1, SIGN, "ffn_input"),
    ("llama-relu", 3, 2, 1, SIGN + LOWRANK, "ffn_input"),
    ("llama-gqa", 2, 1, 0, LOWRANK, "residual"),
    ("opt-postnorm", 2, 1, 1, LOWRANK, "residual"),
    ("falcon-relu", 2, 1, -1, LOWRANK + SIGN, "residual"),
]


def of_each_layer(num_layers: int, ffn_size: int) -> list[np.ndarray]:
    """Hot neurons: a third of the first layers, all of the last."""
    ids = np.arange(ffn_size, dtype=np.int32)
    return [*[ids[::3]] * (num_layers - 1), ids]


def forget_attention(system: CudaInProcess) -> None:
    """Of a request for an FFN the device has nothing: the service may be another one."""
    service: Any = system.services[0]
    compute = service._hot

    def alone(*request: Any) -> None:
        for array in (service._work.hidden, service._work.residual_and_input):
            array[...] = np.nan
        compute(*request)

    service._hot = alone


@pytest.mark.parametrize(
    ("variant", "num_services", "num_threads", "without", "kinds", "reads"), LISTED
)
def test_neurons_that_the_gpu_lists(
    tiny: Tiny, variant: str, num_services: int, num_threads: int, without: int,
    kinds: Any, reads: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """The same as by the driver's predictors, and on the CPU alone, but for the last bits.

    A layer without a predictor is a request of its own.
    """
    checkpoint, found, counts = tiny(variant), [], []
    predicted = random_predictors(checkpoint, tmp_path, without, kinds, reads)
    is_emulated = without < 0
    device = emulated_devices()() if is_emulated else NumpyDevice()
    sizes = WHOLE_STEPS if is_emulated else SIZES
    ids = np.resize(checkpoint.ids, sum(sizes)).tolist()
    options: dict[str, Any] = {"device": device, "predictors_path": predicted.path}
    services = num_services, num_threads
    with CudaInProcess(checkpoint.path, *services, hot=of_each_layer, **options) as system:
        requests = asked(system)
        forget_attention(system)
        for shares in (False, True):
            engine = predicted.engine(system, shares)
            requests.clear()
            found.append(steps(engine, ids, sizes))
            counts.append(counts_of(engine))
            joined = [layer for operation, layer in requests if operation == LAYERS]
            of_token = [0] if without < 0 else sorted({0, without, without + 1})
            assert joined == (of_token * len(sizes) if shares else [])
        everything = steps(system.engine("exact"), ids, sizes)
    with InProcessSystem(checkpoint.path) as system:
        on_cpu = steps(predicted.engine(system, False), ids, sizes)
    assert relative_difference(np.concatenate(found[1]), np.concatenate(on_cpu)) < 1e-3
    for one_by_one, together, unchosen in zip(*found, everything, strict=True):
        np.testing.assert_array_equal(together, one_by_one)
        assert (together != unchosen).any()
    assert counts[0] == counts[1]


def test_what_predictors_list_is_audited(tiny: Tiny, tmp_path: Path) -> None:
    """With a GPU that predicts its own neurons, as on the CPU alone."""
    checkpoint, found = tiny("llama-relu"), []
    predicted = random_predictors(checkpoint, tmp_path)
    options: dict[str, Any] = {"hot": of_each_layer, "predictors_path": predicted.path}
    for system in (CudaInProcess(checkpoint.path, 2, **options), InProcessSystem(checkpoint.path)):
        with system:
            audited = AuditedEngine(predicted.engine(system, shares=True))
            for at, token in enumerate(checkpoint.ids[:6].tolist()):
                audited.step([token], [at], [0])
            found.append(audited.counts)
    for name, on_cpu in vars(found[1]).items():
        np.testing.assert_array_equal(vars(found[0])[name], on_cpu, name)


@dataclass
class KeptGpu(CudaInProcess):
    """With the GPU service of another system."""

    gpu: Service | None = None

    def _gpu(self) -> Service:
        return self.gpu or super()._gpu()


@pytest.mark.parametrize("kinds", [SIGN, LOWRANK])
def test_another_number_of_services(tiny: Tiny, tmp_path: Path, kinds: Any) -> None:
    """The GPU's predictors stay, in another order, though the neurons' may be the same.

    Their file is read no more.
    """
    checkpoint, options = tiny("llama-gqa"), dict[str, Any]()
    predicted = random_predictors(checkpoint, tmp_path, kinds=kinds)
    ids = checkpoint.ids[:5].tolist()
    file, away = Path(predicted.path), tmp_path / "away"
    for num_services in (2, 3, 1):
        options["predictors_path"], found = predicted.path, []
        with KeptGpu(checkpoint.path, num_services, hot=a_third, **options) as system:
            options["gpu"] = system.services[0]
            file.rename(away)
            for shares in (False, True):
                found.append(np.concatenate(steps(predicted.engine(system, shares), ids, [1] * 5)))
            away.rename(file)
        np.testing.assert_array_equal(found[1], found[0])


@dataclass
class Schedule:
    """Sleeps at random within the layers of services and of the device, by a seed."""

    seed: int = 0
    sleeps: bool = True
    pause: tuple[int, float] = -1, 0.0  # before the output of this layer, in seconds, once
    is_careless: bool = False  # outputs are given before they are there

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def sleep(self) -> None:
        """Up to half a millisecond, mostly not at all."""
        if self.sleeps and self._random.random() < 0.3:
            time.sleep(self._random.random() / 2000)

    def before_output(self, layer: int) -> None:
        """As `sleep`; the pause where it is due."""
        self.sleep()
        at, seconds = self.pause
        if layer == at:
            self.pause = -1, 0.0
            time.sleep(seconds)


@dataclass
class ScheduledSystem(CudaInProcess):
    """Its CPU services' layers are those of the compiled loop, with sleeps between the parts."""

    schedule: Schedule = field(default_factory=Schedule)

    def _cpus(self) -> list[Service]:
        services = super()._cpus()
        for service in services:
            assert isinstance(service, CpuService)
            service.serve_few = partial(self._serve, service, service.serve_few)  # type: ignore[method-assign]
        return services

    def _serve(
        self, service: CpuService, compiled: Callable[[int, int], int], thread: int, seen: int
    ) -> int:
        cells, index = service.buffers.cells, service.index
        request = service.buffers.requests[index]
        while True:
            number, team = next_share(cells, index, thread, service.num_threads, np.int32(seen))
            if request[OPERATION] != LAYERS:
                return compiled(thread, seen)
            for layer in range(request[LAYER], request[END_LAYER]):
                if not await_input(cells, index, request[GIVER], np.int32(number), layer, thread):
                    break
                self.schedule.sleep()
                if self.schedule.is_careless:
                    give_output(cells, index, np.int32(number), layer, team)
                    self.schedule.before_output(layer)
                ffn_request(
                    thread, team, index, layer, service.buffers, service.source, service._scratch,
                    service.predictors, None, service._buckets, service.function,
                )  # fmt: skip
                if not self.schedule.is_careless:
                    self.schedule.before_output(layer)
                    give_output(cells, index, np.int32(number), layer, team)
            finish_request(
                cells, service.buffers.requests, service.buffers.replies, NO_COUNTERS, index,
                np.int32(number), team, 0,
            )  # fmt: skip
            seen = number


class SleepingKernels(NumpyKernels):
    """With sleeps before what others see, and before others are awaited."""

    def __init__(self, device: NumpyDevice, schedule: Schedule) -> None:
        super().__init__(device)
        self._schedule = schedule

    def give_input(self, *given: Any) -> None:
        self._device.run(self._schedule.sleep)
        super().give_input(*given)

    def await_outputs(self, *given: Any) -> None:
        self._device.run(self._schedule.sleep)
        super().await_outputs(*given)


def scheduled(path: Any, schedule: Schedule) -> ScheduledSystem:
    """Two CPU services of two threads each."""
    device = NumpyDevice(make_kernels=lambda device: SleepingKernels(device, schedule))
    return ScheduledSystem(path, 2, 2, hot=a_third, device=device, schedule=schedule)


def logits_of(system: CudaInProcess, ids: list[int], shares: bool = True) -> np.ndarray:
    """Of a step for each."""
    engine = system.engine("exact")
    engine.shares_layers = shares
    return np.concatenate(steps(engine, ids, [1] * len(ids)))


def test_random_schedules(tiny: Tiny) -> None:
    """A hundred of them."""
    checkpoint, schedule = tiny("llama-gqa"), Schedule()
    ids = checkpoint.ids[:4].tolist()
    with scheduled(checkpoint.path, schedule) as system:
        found = [logits_of(system, ids)]
        for seed in range(100):
            schedule._random.seed(seed)
            found.append(logits_of(system, ids))
        expected = logits_of(system, ids, shares=False)
    for each in found:
        np.testing.assert_array_equal(each, expected)


def test_the_schedules_find_a_race(tiny: Tiny) -> None:
    """Of services that say too early that their outputs are there."""
    checkpoint, schedule = tiny("llama-gqa"), Schedule(is_careless=True)
    with scheduled(checkpoint.path, schedule) as system:
        ids = checkpoint.ids[:4].tolist()
        found = [logits_of(system, ids) for _ in range(10)]
        expected = logits_of(system, ids, shares=False)
    assert any((each != expected).any() for each in found)


@pytest.mark.parametrize("layer", range(3))
def test_a_service_that_comes_late(tiny: Tiny, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device does not wait: the step is computed by the exchange, which does."""
    checkpoint, schedule = tiny("llama-gqa"), Schedule(sleeps=False)
    with scheduled(checkpoint.path, schedule) as system:
        ids, requests = checkpoint.ids[:3].tolist(), asked(system)
        logits_of(system, ids)  # everything is compiled
        expected = logits_of(system, ids)
        memory = system.services[0]._shared.memory  # type: ignore[attr-defined]
        system.services[0]._shared.memory = memory._replace(limit_ns=50_000_000)  # type: ignore[attr-defined]
        system.services[0]._graphs.clear()  # type: ignore[attr-defined]
        schedule.pause, engine = (layer, 0.5), system.engine("exact")
        requests.clear()
        np.testing.assert_array_equal(np.concatenate(steps(engine, ids, [1] * 3)), expected)
        operations = [operation for operation, _ in requests]
        assert operations[0] == LAYERS and operations[1] == ATTENTION
        assert operations.count(LAYERS) == 1
        system.services[0]._shared.memory = memory  # type: ignore[attr-defined]
        system.services[0]._graphs.clear()  # type: ignore[attr-defined]
        np.testing.assert_array_equal(logits_of(system, ids), expected)


@pytest.mark.parametrize("launch", [3, 15, 30])
def test_a_device_that_fails_amid_layers_keeps_nobody_waiting(tiny: Tiny, launch: int) -> None:
    """The CPU services have answered when the error is raised."""
    checkpoint = tiny("llama-gqa")
    with CudaInProcess(checkpoint.path, 2, hot=a_third) as system:
        device, engine = system.device, system.engine("exact")
        for at in range(3):
            engine.step([5], [at], [0])
        fails_at = device.num_launches + launch
        device.fails_at = lambda launch: launch == fails_at
        with pytest.raises(AnswerFailed, match="the GPU failed"):
            engine.step([5], [3], [0])
