"""Neurons on storage beside a GPU: the bits of the same neurons in memory, and what is decided."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hotcold.actors.attention.cuda.load import CudaLoading
from hotcold.actors.protocol.messages import THRESHOLD, ServiceSpec, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup import account as accounts
from hotcold.actors.setup import gpu_share, storage_shares
from hotcold.actors.setup.account import account, expected_gpu
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.actors.setup.storage import storage_beside_gpu
from hotcold.jobs.support.offload_plan import offload_plans, offload_text
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import MemoryBudgetError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.numba_kernels.loops.mailbox import BYTES_READ
from hotcold.placement.profile import PROFILE_FILE, ActivationProfile, write_profile
from hotcold.predictors.predictor_file import read_predictors
from tests import tiny_models
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.numpy_device import NumpyDevice
from tests.actors.test_stored_neurons import IDS, StoredSystem, assert_same_bits, packed, two_bits
from tests.actors.test_stored_system import kept_bytes
from tests.tiny_checkpoint import Tiny
from tests.tiny_models import make_tiny
from tests.unit.test_page_cache import cached_bytes, emptied

pytestmark = pytest.mark.sweep
GATE_BYTES = 48 * 4  # of llama-relu
NEURON_BYTES, SLOT_BYTES = 3 * GATE_BYTES + 4, 3 * GATE_BYTES + 48


@dataclass
class StoredBesideGpu(StoredSystem, CudaInProcess):
    """Attention, head and hot neurons on a device made of NumPy, cold neurons in a file."""

    def gpu_spec(self) -> ServiceSpec:
        """Of a system that promised how much memory it takes."""
        return replace(super().gpu_spec(), storage=NeuronStorage("file", 0, 0))


def a_layer_and_more(num_layers: int, ffn_size: int) -> list[np.ndarray]:
    """Hot neurons: none of layer 0, all of layer 1, the second half of others."""
    ids = np.arange(ffn_size, dtype=np.int32)
    return [ids[:0], ids, *[ids[ffn_size // 2 :]] * (num_layers - 2)]


STORES: list[dict[str, Any]] = [
    {},
    {"reads_whole": False, "more_gates": 1000, "more_slots": 13, "has_rates": True},
]


@pytest.mark.parametrize(
    ("variant", "hot", "modes", "has_norms"),
    [
        ("llama-gqa", a_third, ["exact", "dense"], False),
        ("opt-postnorm", a_layer_and_more, ["exact"], False),
        ("llama-silu", a_third, [THRESHOLD], True),
    ],
)
def test_the_same_bits_as_in_memory(
    tiny: Tiny, variant: str, hot: Callable, modes: list[str], has_norms: bool
) -> None:
    path = tiny(variant).path
    packed(path)
    options: dict[str, Any] = {"hot": hot, "has_down_norms": has_norms}
    stores = [StoredBesideGpu(path, 2, 2, **options, **store) for store in STORES]
    assert_same_bits(CudaInProcess(path, 2, 2, **options), stores, modes)


def test_the_same_bits_where_a_predictor_chooses(tiny: Tiny, tmp_path: Path) -> None:
    """Which also says what is read ahead, of the cold neurons alone."""
    path = tiny("llama-relu").path
    packed(path)
    file = two_bits(path, tmp_path / "p.safetensors")
    store: dict[str, Any] = {"more_gates": 1000, "more_slots": 40, "predictors": file}
    plain, stored = (
        CudaInProcess(path, 2, 2, hot=a_layer_and_more),
        StoredBesideGpu(path, 2, 2, hot=a_layer_and_more, **store),
    )
    np.testing.assert_array_equal(signed(stored, file), signed(plain, file))


def signed(system: CudaInProcess, file: Path) -> np.ndarray:
    """Logits of the mode `sign`, of single tokens, of several, and of a long prompt."""
    predictors = read_predictors(file, ModelIdentity.of(system.path), system.config)
    with system:
        predictor = predictors.arranged(system.layer_shards())
        ways = ([1], [2, 7, 4], [35, 1, 1])
        found = [system.logits("sign", IDS, way, predictor=predictor) for way in ways]
        is_stored = isinstance(system, StoredSystem)
        assert (system.exchange.buffers.replies[:, BYTES_READ].sum() > 0) == is_stored
    return np.concatenate(found)


@pytest.fixture
def roomy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, SystemOptions]:
    """A model, and a GPU's budget in which its attention and head fit, and 100 of its neurons.

    What is counted beside a model's parts would be larger than all of this one.
    """
    path = make_tiny("llama-relu", tmp_path / "m", dtype="float32")
    monkeypatch.setattr(gpu_share, "first_gpu", lambda: ("a GPU", 8 << 30))
    monkeypatch.setattr(accounts, "GPU_RESERVE_BYTES", 1000)
    monkeypatch.setattr(storage_shares, "READ_BYTES", 4096)
    monkeypatch.setattr(accounts, "more_process_bytes", lambda system, config: 7)
    monkeypatch.setattr(accounts, "offloaded_ffn_bytes", kept_bytes)
    alone, config = prepare_system(path, SystemOptions(device="cpu"))
    need = account(alone, config)
    budget = 1000 + need.attention_bytes + need.kv_cache_bytes + need.head_bytes
    return path, SystemOptions(gpu_memory_bytes=budget + 100 * NEURON_BYTES)


def test_what_the_gpu_does_not_hold_stays_in_memory_as_far_as_that_goes(
    roomy: tuple[Path, SystemOptions],
) -> None:
    path, options = roomy
    config = read_model(path)
    num_cold = config.num_neurons - 100
    uploads, _ = prepare_system(path, options)
    assert uploads.storage is None and uploads.neuron_upload_tokens > 0
    system = replace(uploads, neuron_upload_tokens=0)
    need = account(system, config, is_sure=True)
    assert need.attention_bytes == need.kv_cache_bytes == need.head_bytes == 0
    assert need.ffn_bytes == num_cold * NEURON_BYTES

    def prepared(num_bytes: int, **changes: Any) -> SystemConfig:
        return prepare_system(path, replace(options, cpu_memory_bytes=num_bytes, **changes))[0]

    assert prepared(account(uploads, config, is_sure=True).total_bytes) == uploads
    assert prepared(need.total_bytes) == system  # what is uploaded takes room in the arena
    least = need.total_bytes - need.ffn_bytes + 7 + config.ffn_size * SLOT_BYTES
    for limit in (need.total_bytes - 1, least):
        found = prepared(limit)
        assert found.storage is not None and found.storage.memory_bytes == limit
        assert found.device == "cuda" and found.neuron_upload_tokens == 0 and not found.plan_path
        assert limit - SLOT_BYTES < account(found, config).total_bytes <= limit
    with pytest.raises(MemoryBudgetError, match=rf"at least .* \({least} bytes\) with its"):
        prepared(least - 1)

    def of_size(num_bytes: int) -> tuple[SystemConfig, ModelConfig]:
        return prepare_system(path, replace(options, cpu_memory_bytes=num_bytes))

    plans = offload_plans(of_size, least, None, 0.5)
    assert [plan.num_on_gpu for plan in plans] == [100] * 5
    assert plans[-1].num_up_downs < num_cold and plans[0].read_bytes > plans[-1].read_bytes > 0
    assert offload_text(plans).count("% on the GPU") == 5
    with pytest.raises(UsageError, match="--plan places neurons in memory"):
        prepared(least, plan=Path("p"))
    with pytest.raises(MemoryBudgetError, match="allowed by --cpu-memory") as refused:
        prepared(least, hosts=("10.0.0.1",))  # on several hosts beside a GPU all is in memory
    assert "at least" not in str(refused.value)


def test_memory_is_divided_anew_when_the_gpu_has_been_filled(
    roomy: tuple[Path, SystemOptions],
) -> None:
    """Whatever it came to hold, all that was promised is used, and no more."""
    path, options = roomy
    config = read_model(path)
    every = config.num_neurons
    system = replace(prepare_system(path, options)[0], neuron_upload_tokens=0)
    whole = account(system, config, is_sure=True).total_bytes
    options = replace(options, cpu_memory_bytes=whole - 50 * NEURON_BYTES)
    system, _ = prepare_system(path, options)
    sizes = []
    for num_hot in (90, 100, 110, every):
        fitted = replace(system, num_hot_neurons=num_hot)
        fitted = replace(fitted, storage=storage_beside_gpu(fitted, config))
        assert fitted.storage is not None
        assert options.cpu_memory_bytes is not None
        unused = options.cpu_memory_bytes - account(fitted, config).total_bytes
        assert 0 <= unused < SLOT_BYTES or num_hot == every
        shards = [spec.storage for spec in service_specs(fitted, config)[1:]]
        assert (None in shards) == (num_hot == every)  # nothing is read where no neuron is cold
        sizes.append(storage_shares.bytes_in_memory(config, fitted.storage))
    assert max(sizes[:3]) - min(sizes[:3]) < SLOT_BYTES
    head = replace(system, num_hot_neurons=0, head_on_host=True, num_host_layers=1)
    assert account(head, config).head_bytes > 0
    plain = replace(system, storage=NeuronStorage("file", 1000, 100))
    assert storage_beside_gpu(plain, config) is plain.storage  # nothing was promised


def test_a_gpu_that_was_tried_in_vain_costs_memory(roomy: tuple[Path, SystemOptions]) -> None:
    """Its libraries stay in the service's process: the line says what is enough with them."""
    path, options = roomy
    config = read_model(path)
    system, _ = prepare_system(path, options)
    limit = account(replace(system, neuron_upload_tokens=0), config, is_sure=True).total_bytes - 1
    system, _ = prepare_system(path, replace(options, cpu_memory_bytes=limit))
    no_gpu = replace(system, device="cpu")
    with pytest.raises(MemoryBudgetError, match="with its neurons on storage") as refused:
        storage_beside_gpu(no_gpu, config)
    told = re.search(r"at least .* \((\d+) bytes\)", str(refused.value))
    assert told is not None and no_gpu.storage is not None
    for more in (0, 1000):
        kept = replace(no_gpu.storage, memory_bytes=int(told[1]) + more)
        found = replace(no_gpu, storage=storage_beside_gpu(replace(no_gpu, storage=kept), config))
        need = account(found, config).total_bytes
        unused = kept.memory_bytes - accounts.CUDA_BYTES - need
        assert 0 <= unused < SLOT_BYTES and (more == 0) == (unused == 0)


def test_what_a_gpu_holds_is_not_read(roomy: tuple[Path, SystemOptions]) -> None:
    """By a profile: the GPU has the hottest, slots those after them."""
    path, options = roomy
    config, identity = read_model(path), ModelIdentity.of(path)
    shape = config.num_layers, config.ffn_size
    counts = np.arange(shape[0] * shape[1]).reshape(shape)
    profile = ActivationProfile(counts.astype(np.int64), counts.size, "t", "t")
    write_profile(artifact_path(path, PROFILE_FILE), identity, profile)
    system, _ = prepare_system(path, options)
    fitted = replace(system, num_hot_neurons=100)
    kept = NeuronStorage("file", counts.size - 100, 30)
    reads = storage_shares.token_reads(profile, fitted, config, kept)
    assert np.isclose(reads.number, np.arange(counts.size - 130).sum() / counts.size)
    fitted = replace(system, num_hot_neurons=counts.size)
    assert storage_shares.token_reads(profile, fitted, config, kept).num_bytes == 0


@pytest.mark.parametrize("stored", [True, False])
def test_what_a_gpu_has_read_is_let_go_of(tmp_path: Path, stored: bool) -> None:
    wide = {"wide": tiny_models.Variant(tiny_models._llama, intermediate_size=4000)}
    with mock.patch.dict(tiny_models.VARIANTS, wide):
        path = make_tiny("wide", tmp_path / "m", dtype="float32")
    file = emptied(path / "model.safetensors")
    config = read_config(path)
    kept = NeuronStorage("file", 1, 1) if stored else None
    system = SystemConfig(str(path), device="cuda", num_hot_neurons=6000, storage=kept)
    loading = CudaLoading(NumpyDevice(), config, service_specs(system, config)[0])
    loading.fill(lambda num_bytes: None)
    most = file.stat().st_size
    assert cached_bytes(file) < most // 4 if stored else cached_bytes(file) > most // 2


def test_no_more_is_expected_of_a_gpu_than_it_has(
    roomy: tuple[Path, SystemOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget above its memory is one of all of it; where it is not seen here, as it was given."""
    path, options = roomy
    config, budget = read_model(path), options.gpu_memory_bytes
    assert budget is not None
    system, _ = prepare_system(path, replace(options, gpu_memory_bytes=4 << 30))
    assert expected_gpu(system, config).num_hot_neurons == config.num_neurons
    monkeypatch.setattr(gpu_share, "first_gpu", lambda: ("a GPU", budget))
    assert expected_gpu(system, config).num_hot_neurons == 100
    beside = account(replace(system, neuron_upload_tokens=0), config, is_sure=True).total_bytes
    asked = replace(options, gpu_memory_bytes=4 << 30, cpu_memory_bytes=beside - 1)
    assert prepare_system(path, asked)[0].storage is not None
    monkeypatch.setattr(gpu_share, "first_gpu", lambda: "no driver")
    seen = replace(system, gpu_memory_bytes=budget)
    assert expected_gpu(seen, config).num_hot_neurons == 100
