"""A whole system on a real Ray with a GPU service, on a device made of NumPy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

import numpy as np
import pytest

from hotcold.actors.attention.cuda.fit import LATE_BYTES, work_bytes
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.actors.setup.account import GpuParts
from hotcold.actors.system import System
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.sampling import SamplingParams
from hotcold.predictors.predictor_file import Predictors, write_predictors
from tests.actors.batching import Background, random_sign
from tests.actors.numpy_device import NumpyDevice
from tests.actors.stand_in_host import start_stand_in
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint

pytestmark = pytest.mark.usefixtures("local_ray")
Tiny = Callable[..., TinyCheckpoint]


@pytest.fixture(scope="module")
def checkpoint(tiny: Tiny) -> TinyCheckpoint:
    return tiny("llama-gqa")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device") / "broken"


@pytest.fixture(scope="module", params=[-2, 1], ids=["half, listed", "all"])
def share(request: pytest.FixtureRequest) -> int:
    """One neuron of so many fits on the device; negative: beside sign predictors."""
    return int(request.param)


@pytest.fixture(scope="module")
def predictors(checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """They expect that all neurons fire."""
    config, path = read_config(checkpoint.path), tmp_path_factory.mktemp("signs") / "all"
    layers = [random_sign(np.random.default_rng(1), config) for _ in range(config.num_layers)]
    for layer in layers:
        layer.thresholds[:] = -1e9
    write_predictors(path, ModelIdentity.of(checkpoint.path), Predictors(layers, "ffn_input"))
    return path


@pytest.fixture(scope="module")
def system(
    checkpoint: TinyCheckpoint, broken: Path, share: int, predictors: Path
) -> Iterator[System]:
    config = read_config(checkpoint.path)
    asked = SystemConfig(
        str(checkpoint.path),
        num_cpu_actors=1,
        num_threads=2,
        context_length=256,
        max_batch=4,
        kv_positions=1024,
        kv_dtype="float32",
        prefill_chunk=64,
        device="cuda",
        mode="sign" if share < 0 else "exact",
        predictors_path=str(predictors) if share < 0 else "",
    )
    parts, work = GpuParts.of(asked, config), work_bytes(asked, config, NumpyDevice())
    whole = config.num_layers * parts.layer + parts.head + work + LATE_BYTES
    budget = whole + config.num_neurons // abs(share) * parts.neuron
    budget += parts.predictors
    with start_stand_in(SystemConfig(**vars(asked) | {"gpu_memory_bytes": budget}), broken) as it:
        yield it


def request(checkpoint: TinyCheckpoint, size: int = 10) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=np.resize(checkpoint.ids, size).tolist())


def test_the_same_tokens_and_what_it_says_of_itself(
    system: System, checkpoint: TinyCheckpoint, share: int
) -> None:
    assert system.complete(request(checkpoint)).ids[:20] == checkpoint.greedy_ids[:20]
    found: SystemConfig = system.call("describe")
    config = read_config(checkpoint.path)
    total = config.num_neurons
    assert found.device == "cuda"
    assert any(found.gpu_predicts) == (share < 0)
    assert total // (2 * abs(share)) < found.num_hot_neurons <= total // abs(share)
    assert system.call("driver_load").device == "cuda (a stand-in)"
    assert system.call("telemetry").neurons.num_hot.sum() == found.num_hot_neurons
    assert system.call("device_report", True)["used_bytes"] <= found.gpu_memory_bytes
    system.complete(request(checkpoint))
    report = system.call("device_report", False)
    assert report.keys() == {"used_bytes", "copies", "head", "layers"}
    assert all(value > 0 for value in report.values())


def test_a_gpu_that_fails_is_replaced(
    system: System, checkpoint: TinyCheckpoint, broken: Path
) -> None:
    """With the neurons that it had; running requests go on, a long prompt among them."""
    requests = [request(checkpoint, size) for size in (10, 100, 33)]
    expected = [system.complete(each).ids for each in requests]
    pids = system.call("processes")
    asked = [Background(partial(system.complete, each)) for each in requests]
    broken.touch()
    assert [one.end().ids for one in asked] == expected
    if broken.exists():  # they were faster
        assert system.complete(requests[0]).ids == expected[0]
    assert not broken.exists()
    new = system.call("processes")
    assert new["gpu"] != pids["gpu"] and new["cpu0"] == pids["cpu0"]
    assert system.complete(requests[1]).ids == expected[1]


@pytest.mark.parametrize("faults", [(SIGKILL,), (SIGSTOP, SIGCONT)], ids=["killed", "paused"])
@pytest.mark.parametrize("name", ["cpu0", "gpu"])
@pytest.mark.parametrize("share", [-2], indirect=True, ids=["half, listed"])
def test_a_service_that_is_lost_amid_shared_layers(
    system: System, checkpoint: TinyCheckpoint, name: str, faults: tuple[Signals, ...]
) -> None:
    """Three times, each at another moment of an answer: none is lost, and no token is another."""
    asked = request(checkpoint)
    expected = system.complete(asked).ids
    for turn in range(3):
        running = Background(partial(system.complete, asked))
        for fault in faults:
            time.sleep(0.05 + turn * 0.7)  # the device waits for one second at most
            with suppress(ProcessLookupError):
                os.kill(system.call("processes")[name], fault)
        assert running.end().ids == expected
        assert system.complete(asked).ids == expected


def test_another_number_of_services_leaves_the_gpu_its_neurons(
    system: System, checkpoint: TinyCheckpoint
) -> None:
    before = system.call("telemetry").neurons.num_hot
    pids = system.call("processes")
    system.call("scale", 2)
    assert system.complete(request(checkpoint)).ids[:20] == checkpoint.greedy_ids[:20]
    assert system.call("processes")["gpu"] == pids["gpu"]
    assert (system.call("telemetry").neurons.num_hot == before).all()
