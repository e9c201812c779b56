"""What a GPU takes of a model: within its budget, as much as fits, and said where it is less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hotcold.actors.attention.cuda import fit as cuda_fit
from hotcold.actors.attention.cuda.fit import fit_system
from hotcold.actors.attention.cuda.load import CudaLoading
from hotcold.actors.attention.cuda.service import CudaAttentionService
from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.messages import Fitted, SystemConfig
from hotcold.actors.setup import gpu_share
from hotcold.actors.setup.account import GpuParts, account
from hotcold.actors.setup.gpu_share import choose_device
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.setup.shards import served_config, service_specs
from hotcold.cuda_kernels.device import DeviceMemoryError
from hotcold.model.config import neurons
from hotcold.model.config.build import read_config
from hotcold.model.errors import MemoryBudgetError, ServiceError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.model.weights.sizes import ffn_bytes
from hotcold.placement.profile import PROFILE_FILE, ActivationProfile, write_profile
from hotcold.placement.solver import plan_devices
from hotcold.placement.solver.plan_devices import make_plan_devices
from hotcold.predictors.predictor_file import Predictors, write_predictors
from tests import tiny_models
from tests.actors.batching import random_sign
from tests.actors.numpy_device import NumpyDevice
from tests.mxfp4_models import make_mxfp4
from tests.placement_cases import llama_config, make_machine
from tests.tiny_models import make_tiny

CONTEXT_BYTES = 10_000


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemConfig:
    """A small model; what is left aside of a real GPU would be larger than all of it."""
    monkeypatch.setattr(plan_devices, "RESERVE_BYTES", 0)
    for name in ("LATE_BYTES", "BLOCK_BYTES"):
        monkeypatch.setattr(cuda_fit, name, 0)
    wide = {"wide": tiny_models.Variant(tiny_models._opt, ffn_dim=1500)}
    with mock.patch.dict(tiny_models.VARIANTS, wide):
        path = make_tiny("wide", tmp_path / "model")
    return SystemConfig(
        str(path),
        num_cpu_actors=2,
        num_threads=2,
        context_length=64,
        max_batch=1,
        prefill_chunk=4,
        device="cuda",
    )


def fit(
    system: SystemConfig, memory_bytes: int = 1 << 40
) -> tuple[NumpyDevice, Fitted, CudaLoading]:
    config = read_config(system.model_path)
    device = NumpyDevice(memory_bytes, CONTEXT_BYTES)
    loading, fitted = fit_system(device, system, config)
    assert loading.spec.on_gpu
    return device, fitted, loading


def bytes_of_all(system: SystemConfig) -> int:
    """What a GPU with room for everything gives."""
    device, _, loading = fit(system)
    assert loading
    return device.used_bytes()


def test_the_budget_is_kept_and_used(system: SystemConfig) -> None:
    """Less and less memory: first fewer neurons, then no head, then fewer layers, then an error."""
    found, whole = [], bytes_of_all(system)
    for budget in np.linspace(whole, CONTEXT_BYTES, 25).astype(int).tolist():
        for limited in (replace(system, gpu_memory_bytes=budget), system):
            memory = 1 << 40 if limited.gpu_memory_bytes else budget
            try:
                device, fitted, loading = fit(limited, memory)
            except MemoryBudgetError as error:
                assert "give --gpu-memory" in str(error) and "\n" not in str(error)
                found.append((-1, 0, 0))
                continue
            assert loading and device.used_bytes() <= budget
            new = fitted.system
            assert bool(fitted.note) == bool(new.num_host_layers or new.head_on_host)
            found.append((new.num_hot_neurons, -new.num_host_layers, -new.head_on_host))
    assert found[::2] == found[1::2]  # a budget is as good as a smaller GPU
    assert found == sorted(found, key=lambda entry: (entry[0] >= 0, *entry[1:], entry[0]))[::-1]
    hot = {entry[0] for entry in found}
    assert len(hot) > 5 and -1 in hot
    assert {entry[2] for entry in found} == {0, -1} and len({entry[1] for entry in found}) > 1


def test_predictors_come_before_neurons(system: SystemConfig, tmp_path: Path) -> None:
    """Unless all neurons fit without them; where memory is too short the driver predicts."""
    config, whole = read_config(system.model_path), bytes_of_all(system)
    layers = [random_sign(np.random.default_rng(1), config) for _ in range(config.num_layers)]
    path, identity = tmp_path / "predictors", ModelIdentity.of(system.model_path)
    write_predictors(path, identity, Predictors(layers, "ffn_input"))
    predicted = replace(system, mode="sign", predictors_path=str(path))
    every = fit(predicted)[1].system
    assert all(every.gpu_predicts) and every.num_hot_neurons == config.num_neurons
    parts = GpuParts.of(predicted, served_config(predicted, config))
    listing, neurons = parts.predictors, config.num_neurons * parts.neuron
    of_all = config.num_layers * parts.layer + parts.head + neurons
    for num_bytes in (of_all, of_all + listing - 1, of_all + listing):
        wanted = replace(predicted, num_hot_neurons=config.num_neurons)
        found = parts.within(num_bytes, wanted, config)
        assert found.num_hot_neurons == config.num_neurons
        assert bool(found.gpu_predicts) == (num_bytes == of_all + listing)
    least = whole - neurons + listing
    for budget, lists in ((whole - neurons // 2, True), (least - listing // 2, False)):
        device, fitted, loading = fit(replace(predicted, gpu_memory_bytes=budget))
        assert loading and bool(fitted.system.gpu_predicts) == lists
        assert device.used_bytes() <= budget
        without = fit(replace(system, gpu_memory_bytes=budget))[1].system
        assert (fitted.system.num_hot_neurons < without.num_hot_neurons) == lists


@pytest.mark.parametrize("share", [1, 3])
def test_parts_are_counted_as_they_are_allocated(
    share: int, system: SystemConfig, tmp_path: Path
) -> None:
    """Beside the workspace, which is an upper bound; of float and of padded quantized rows."""
    quantized = replace(system, model_path=str(make_mxfp4(tmp_path / "mxfp4")))
    for one in (system, quantized):
        config = served_config(one, read_config(one.model_path))
        parts, work = GpuParts.of(one, config), cuda_fit.work_bytes(one, config, NumpyDevice())
        budget = bytes_of_all(one) - config.num_neurons * parts.neuron * (share - 1) // share
        device, fitted, loading = fit(replace(one, gpu_memory_bytes=budget))
        held = fitted.system
        num_bytes = (config.num_layers - held.num_host_layers) * parts.layer
        num_bytes += parts.head * (not held.head_on_host) + held.num_hot_neurons * parts.neuron
        assert loading and held.num_hot_neurons > 0
        beside, aligned = device.used_bytes() - CONTEXT_BYTES - num_bytes, num_bytes // 100
        assert -aligned <= beside <= work + aligned


class NoGpuService(ServiceActor):
    """A service's process on a machine whose GPU cannot be opened."""

    def _open_device(self) -> NumpyDevice:
        raise RuntimeError("the GPU cannot be used: cudaErrorInsufficientDriver\nmore")


def test_a_gpu_that_cannot_be_opened(system: SystemConfig) -> None:
    """The CPU does it, unless the GPU was asked for."""
    config = read_config(system.model_path)
    host = NoGpuService(replace(service_specs(system, config)[0], share=None))
    fitted = host.fit(system)
    assert fitted.system == replace(system, device="cpu")
    assert fitted.note.endswith("cudaErrorInsufficientDriver")
    assert service_specs(fitted.system, config)[0].gpu_layout is None
    with pytest.raises(ServiceError, match=r"cudaErrorInsufficientDriver$"):
        host.fit(replace(system, requires_gpu=True))


@pytest.mark.parametrize(("gpu_memory_bytes", "scale"), [(0, 2), (12 << 30, 1)])
def test_a_plan_counts_on_no_more_memory_than_there_is(gpu_memory_bytes: int, scale: int) -> None:
    """Less than what is left beside a context of 400 MiB, for models of 7 and some 50 billion."""
    free, context_bytes = 24 << 30, 400 << 20
    config = llama_config(
        hidden_size=4096 * scale,
        intermediate_size=11008 * scale,
        num_hidden_layers=32 * scale,
        num_attention_heads=32 * scale,
        num_key_value_heads=8,
        vocab_size=32000 * scale,
    )
    system = SystemConfig("", device="cuda", gpu_memory_bytes=gpu_memory_bytes)
    budget = plan_devices.gpu_budget(gpu_memory_bytes or None, free)
    work = cuda_fit.work_bytes(system, config, NumpyDevice(free, context_bytes))
    there = budget - context_bytes - cuda_fit.LATE_BYTES - work
    (gpu, _) = make_plan_devices(
        make_machine((free,)), num_cpu_actors=1, gpu_memory_bytes=gpu_memory_bytes or None
    )
    assert gpu.budget_bytes <= there


def test_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_share, "first_gpu", lambda: "no NVIDIA driver on this machine")
    assert choose_device("auto", None) == choose_device("auto", 0) == "cpu"
    for device, memory in (("cuda", None), ("auto", 1 << 30)):
        with pytest.raises(UsageError, match=r"no NVIDIA driver .*leave it out"):
            choose_device(device, memory)
    for device, memory in (("cpu", 1 << 30), ("cuda", 0)):
        with pytest.raises(UsageError, match="leave one of them out"):
            choose_device(device, memory)
    monkeypatch.setattr(gpu_share, "first_gpu", lambda: ("a GPU", 8 << 30))
    assert choose_device("auto", None) == choose_device("cuda", 1 << 30) == "cuda"
    assert choose_device("auto", 0) == choose_device("cpu", None) == "cpu"
    assert choose_device("auto", None, only_on_cpu="experts with predictors") == "cpu"
    for device, memory in (("cuda", None), ("auto", 1 << 30)):
        with pytest.raises(
            UsageError, match="was given, but experts with predictors; leave it out"
        ):
            choose_device(device, memory, only_on_cpu="experts with predictors")


def test_which_mixtures_use_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those with predictors of their own; their cold experts are never uploaded."""
    monkeypatch.setattr(gpu_share, "first_gpu", lambda: ("a GPU", 8 << 30))
    system, config = prepare_system(make_tiny("qwen3-moe", tmp_path / "m"), SystemOptions())
    assert system.device == "cuda" and system.neuron_upload_tokens == 0
    assert account(system, config).ffn_bytes == 0
    turbosparse = make_tiny("turbosparse-mixtral", tmp_path / "t")
    assert prepare_system(turbosparse, SystemOptions())[0].device == "cpu"
    with pytest.raises(UsageError, match="--device cuda was given, but experts with predictors"):
        prepare_system(turbosparse, SystemOptions(device="cuda"))


@pytest.mark.parametrize(
    "error",
    [
        DeviceMemoryError("no room"),
        RuntimeError("cudaErrorMemoryAllocation: out of memory"),
        RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_less_is_tried_whoever_says_that_there_is_no_room(
    system: SystemConfig, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, graphs and products take memory too, and say so in words of their own."""
    try_out, failures = CudaAttentionService.try_out, [error]

    def fail_once(service: CudaAttentionService) -> None:
        if failures:
            raise failures.pop()
        try_out(service)

    monkeypatch.setattr(CudaAttentionService, "try_out", fail_once)
    device, fitted, _ = fit(system)
    assert fitted.system.device == "cuda" and not failures and device.used_bytes() > 0
    failures.append(RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        fit(system)


def test_hot_neurons_are_those_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which depend on how many bytes rows have in the formats that are loaded: here down rows have
    more than the others.
    """
    monkeypatch.setattr(plan_devices, "RESERVE_BYTES", 0)
    for name in ("LATE_BYTES", "BLOCK_BYTES"):
        monkeypatch.setattr(cuda_fit, name, 0)
    path = make_mxfp4(tmp_path)
    system = SystemConfig(
        str(path), context_length=64, max_batch=1, prefill_chunk=4, device="cuda", num_threads=2
    )
    config, rng = read_config(path), np.random.default_rng(3)
    blocks, shape = neurons.blocks(config), neurons.shape(config)
    chosen = rng.integers(500, 1000, (shape[0], neurons.most_blocks(config)))
    counts = rng.random(shape) * np.take_along_axis(chosen, blocks, axis=1)
    profile = ActivationProfile(counts.astype(np.int64), 1000, "t", "t", chosen)
    write_profile(artifact_path(path, PROFILE_FILE), ModelIdentity.of(path), profile)
    whole = bytes_of_all(system)
    _, fitted, loading = fit(
        replace(system, gpu_memory_bytes=whole - ffn_bytes(config, config.num_neurons) // 16)
    )
    served = served_config(system, config)
    assert 0 < fitted.system.num_hot_neurons < config.num_neurons
    assert loading.is_of(service_specs(fitted.system, served)[0])
    assert not loading.is_of(service_specs(fitted.system, config)[0])
