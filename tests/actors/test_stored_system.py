"""A system whose neurons are on storage, on a real Ray; and what is decided before it starts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.processes import host_setup
from hotcold.actors.processes.host_setup import HostSetup
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup import account as accounts
from hotcold.actors.setup import storage_shares
from hotcold.actors.setup.account import account as need_of
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.actors.setup.storage import offloaded_share, pack_model
from hotcold.actors.system import System
from hotcold.jobs.profile.plot import plot_offload
from hotcold.jobs.support.offload_plan import offload_plans, offload_text
from hotcold.model.bundles.bundle_file import bundle_path, read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, MemoryBudgetError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.placement.profile import PROFILE_FILE, ActivationProfile, write_profile
from hotcold.placement.storage import least_in_memory
from tests.actors import batching
from tests.actors.kept_system import config_of, greedy
from tests.actors.test_gguf_mixtures import quantized
from tests.tiny_checkpoint import Tiny
from tests.tiny_models import make_tiny


@pytest.mark.usefixtures("local_ray")
def test_the_same_tokens_also_after_a_service_was_lost(tiny: Tiny) -> None:
    checkpoint = tiny("llama-relu")
    file = pack_model(checkpoint.path, read_model(checkpoint.path))
    own = config_of(checkpoint, 2, "arena")
    config = replace(own, storage=NeuronStorage(str(file), 1000, 147))
    with System.start(config, name="stored") as running:
        for _ in range(2):
            result = running.complete(greedy(checkpoint))
            assert result.ids == checkpoint.greedy_ids
            assert result.reads["bytes_read"] > 0 and 0 < result.reads["hit_rate"] < 1
            os.kill(running.call("processes")["cpu1"], signal.SIGKILL)
        assert running.complete(greedy(checkpoint)).ids == checkpoint.greedy_ids
        with pytest.raises(UsageError, match="cannot be scaled"):
            running.call("scale", 1)


@pytest.mark.thorough
@pytest.mark.usefixtures("local_ray")
def test_down_rows_that_are_an_output_also_after_a_service_was_lost(tmp_path: Path) -> None:
    path = quantized("Q4_0", tmp_path)
    system, config = prepare_system(path, SystemOptions(context_length=64, num_cpu_actors=1))
    assert system.down_transposed
    kept = least_in_memory(config)
    kept_storage = NeuronStorage(str(pack_model(path, config)), kept, kept)
    request = batching.greedy([3, 1, 4, 1, 5, 9], 20)
    with System.start(replace(system, storage=kept_storage), name="stored") as running:
        first = running.complete(request)
        assert first.reads["bytes_read"] > 0
        os.kill(running.call("processes")["cpu0"], signal.SIGKILL)
        assert running.complete(request).ids == first.ids


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model beside whose neurons the buffers of reads are small."""
    monkeypatch.setattr(storage_shares, "READ_BYTES", 4096)
    path = make_tiny("llama-relu", tmp_path / "m", dtype="float32")
    return path


def kept_bytes(system: SystemConfig, config: ModelConfig, kept: NeuronStorage) -> int:
    """Of what stays in memory alone."""
    return storage_shares.bytes_in_memory(config, kept)


def _neuron_bytes(config: ModelConfig) -> int:
    """A neuron's three rows, and the tables of its two slots."""
    return 3 * 4 * config.hidden_size + 48


def test_what_fits_stays_in_memory(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "offloaded_ffn_bytes", kept_bytes)
    monkeypatch.setattr(accounts, "more_process_bytes", lambda system, config: 0)
    config = read_model(wide)
    total = need_of(choose_system(wide, config, SystemOptions()), config).total_bytes
    assert prepare_system(wide, SystemOptions(cpu_memory_bytes=total))[0].storage is None
    assert prepare_system(wide, SystemOptions())[0].storage is None
    system, _ = prepare_system(wide, SystemOptions(cpu_memory_bytes=total - 1))
    assert system.storage is not None
    with pytest.raises(UsageError, match="--plan places neurons in memory"):
        prepare_system(wide, SystemOptions(cpu_memory_bytes=total - 1, plan=Path("p")))
    least = config.ffn_size * _neuron_bytes(config)
    need = need_of(choose_system(wide, config, SystemOptions()), config)
    rest = need.total_bytes - need.ffn_bytes
    system, _ = prepare_system(wide, SystemOptions(cpu_memory_bytes=rest + least))
    assert system.storage is not None
    assert system.storage.num_gates == system.storage.num_up_downs == config.ffn_size
    with pytest.raises(MemoryBudgetError, match=rf"at least .* \({rest + least} bytes\) with its"):
        prepare_system(wide, SystemOptions(cpu_memory_bytes=rest + least - 1))

    def of_size(num_bytes: int) -> tuple[SystemConfig, ModelConfig]:
        return prepare_system(wide, SystemOptions(cpu_memory_bytes=num_bytes))

    plans = offload_plans(of_size, rest + least, None, 0.5)
    slots = [plan.num_gates + 2 * plan.num_up_downs for plan in plans]
    read = [plan.read_bytes for plan in plans]
    assert slots == sorted(slots) and read == sorted(read, reverse=True) and read[0] > read[-1]
    assert offload_text(plans).count("tokens/s") == len(plans) == 5
    assert "as no profile says how often this one's neurons fire" in offload_text(plans)
    assert all(plan.tokens_per_s <= min(2.0, plan.most_tokens_per_s) for plan in plans)
    assert offload_plans(of_size, total, None, 0.5) == []
    more = offload_plans(of_size, rest + least, None, 0.5, 9)
    assert len(more) == 9 and more[::2] == plans
    plot_offload(wide / "plan.svg", more, "wide")
    assert "that the disk allows" in (wide / "plan.svg").read_text()
    with pytest.raises(UsageError, match="cannot be written"):
        plot_offload(wide / "plan.svg" / "plan.svg", more, "wide")
    bundle_path(wide, BundleGeometry.of(config)).parent.mkdir()
    bundle_path(wide, BundleGeometry.of(config)).write_bytes(b"not this")
    with pytest.raises(ArtifactError, match="no bundle file"):
        prepare_system(wide, SystemOptions(cpu_memory_bytes=rest + least))


def test_memory_is_that_of_each_host(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts hold half of the neurons each, and as many processes as one with half of both."""
    monkeypatch.setattr(accounts, "offloaded_ffn_bytes", kept_bytes)
    monkeypatch.setattr(accounts, "more_process_bytes", lambda system, config: 0)
    config, two = read_model(wide), SystemOptions(hosts=("a", "b"), num_cpu_actors=4)
    need = need_of(choose_system(wide, config, two), config)
    alone = need_of(choose_system(wide, config, SystemOptions(num_cpu_actors=2)), config)
    assert need.process_bytes == alone.process_bytes and 2 * need.ffn_bytes == alone.ffn_bytes
    slots = config.ffn_size * _neuron_bytes(config)
    least = need.total_bytes - need.ffn_bytes + slots // 2
    with pytest.raises(
        MemoryBudgetError, match=rf"on each host, or at least .* \({least} bytes\) with its"
    ):
        prepare_system(wide, replace(two, cpu_memory_bytes=least - 1))
    for more in (0, 10_000):
        system, _ = prepare_system(wide, replace(two, cpu_memory_bytes=least + more))
        kept = system.storage
        assert kept is not None
        unused = slots + 2 * more - kept_bytes(system, config, kept)
        assert 0 <= unused < _neuron_bytes(config) and (more == 0) == (unused == 0)
        assert need_of(system, config).total_bytes == least + more - unused // 2
        own = [spec.storage for spec in service_specs(system, config)[1:]]
        shares = [(each.num_gates, each.num_up_downs) for each in own if each is not None]
        assert shares == [(kept.num_gates // 4, kept.num_up_downs // 4)] * 4
    assert prepare_system(wide, replace(two, cpu_memory_bytes=need.total_bytes))[0].storage is None


def test_a_host_makes_the_file_that_it_lacks_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two systems that start at once too; what cannot be made is one line."""
    path = tmp_path / "m"
    shutil.copytree(tiny("llama-relu").path, path, ignore=shutil.ignore_patterns("hotcold"))
    config = read_model(path)
    precompiled: list[SystemConfig] = []
    file, geometry = bundle_path(path, BundleGeometry.of(config)), BundleGeometry.of(config)
    kept = NeuronStorage(str(file), 1, 1, predictors=str(tmp_path / "none"))
    system = SystemConfig(str(path), mode="sign", num_cpu_actors=4, hosts=("a", "b"), storage=kept)
    monkeypatch.setattr(host_setup, "precompile_once", precompiled.append)
    file.parent.write_text("in the way")
    with pytest.raises(ArtifactError, match=r"was not made: .*cannot be written") as caught:
        HostSetup().run(system, is_home=False)
    assert "\n" not in str(caught.value)
    file.parent.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "no-python"))
        with pytest.raises(ArtifactError, match="was not made: no process can be started here"):
            HostSetup().run(system, is_home=True)
    with ThreadPoolExecutor(2) as pool:
        notes = list(pool.map(lambda is_home: HostSetup().run(system, is_home), (True, False)))
    assert all("nothing is read ahead there" in note for note in notes)
    content = file.read_bytes()
    assert len(content) == geometry.file_bytes and [p.name for p in file.parent.iterdir()] == [
        file.name
    ]
    file.unlink()
    assert pack_model(path, config).read_bytes() == content
    made = file.stat().st_mtime_ns
    HostSetup().run(system, is_home=True)
    assert file.stat().st_mtime_ns == made
    assert {part.mode for part in precompiled} == {"sign", "exact"}
    assert {(part.num_cpu_actors, part.hosts) for part in precompiled} == {(2, ())}


def test_a_profile_decides_who_stays_and_who_stands_first(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path / "m", dtype="float32")
    config, identity = read_model(path), ModelIdentity.of(path)
    counts = np.random.default_rng(1).permutation(config.num_neurons)
    profile = ActivationProfile(
        counts.reshape(config.num_layers, -1).astype(np.int64), counts.size, "t", "t"
    )
    write_profile(artifact_path(path, PROFILE_FILE), identity, profile)
    file = read_bundle_file(pack_model(path, config), BundleGeometry.of(config), identity)
    ordered = np.take_along_axis(profile.counts, np.array(file.order), axis=1)
    assert (np.diff(ordered, axis=1) < 0).all() and file.order_name == profile.digest
    ids = [
        np.arange(config.ffn_size - 8 * layer, dtype=np.int32)[::-1].copy() for layer in range(3)
    ]
    kept = NeuronStorage(str(file.path), 170, 130)
    spec = ServiceSpec("cpu0", 1, 1, SystemConfig(str(path)), neuron_ids=ids, storage=kept)
    share = offloaded_share(spec, config)
    assert (share.num_gates, share.num_up_downs) == (170, 130)
    own = np.concatenate([layer[n] for layer, n in zip(profile.counts, ids, strict=True)])
    np.testing.assert_allclose(share.rates, own / counts.size, rtol=1e-6)
