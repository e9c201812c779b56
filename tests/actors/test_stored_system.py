"""A system whose neurons are on storage, on a real Ray; and what is decided before it starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.protocol.messages import ServiceSpec
from actors.protocol.stored_neurons import NeuronStorage
from actors.setup import storage, storage_shares
from actors.setup.preflight import SystemOptions, choose_system, prepare_system, read_model
from actors.setup.preflight import system_need as need_of
from actors.setup.storage import pack_model, stored_share
from actors.setup.storage_shares import reads_whole
from actors.system import System
from jobs.profile.plot import plot_stored
from jobs.support.stored_model import stored_plans, stored_text
from model.bundles.bundle_file import bundle_path, read_bundle_file
from model.bundles.geometry import BundleGeometry
from model.errors import ArtifactError, MemoryBudgetError, UsageError
from model.files.artifact import ModelIdentity, artifact_path
from placement.profile import PROFILE_FILE, ActivationProfile, write_profile
from tests.actors.kept_system import config_of, greedy
from tests.conftest import TinyCheckpoint
from tests.tiny_models import make_tiny

Tiny = Callable[..., TinyCheckpoint]


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("local_ray")
def test_the_same_tokens_also_after_a_service_was_lost(tiny: Tiny) -> None:
    checkpoint = tiny("llama-relu")
    file = pack_model(checkpoint.path, read_model(checkpoint.path))
    own = config_of(checkpoint, 2, "arena")
    config = replace(own, storage=NeuronStorage(str(file), 60_000, has_gates=True))
    with System.start(config, name="stored") as running:
        for _ in range(2):
            result = running.complete(greedy(checkpoint))
            assert result.ids == checkpoint.greedy_ids
            assert result.reads["bytes_read"] > 0 and 0 < result.reads["hit_rate"] < 1
            os.kill(running.call("processes")["cpu1"], signal.SIGKILL)
        assert running.complete(greedy(checkpoint)).ids == checkpoint.greedy_ids
        with pytest.raises(UsageError, match="cannot be scaled"):
            running.call("scale", 1)


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model beside whose neurons the buffers of reads are small."""
    monkeypatch.setattr(storage_shares, "READ_BYTES", 4096)
    path = make_tiny("llama-relu", tmp_path / "m", dtype="float32")
    return path


def test_what_fits_stays_in_memory(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (storage, storage_shares):
        monkeypatch.setattr(module, "stored_bytes", lambda system, config, kept: kept.cache_bytes)
    monkeypatch.setattr(storage, "more_process_bytes", lambda system: 0)
    config = read_model(wide)
    total = need_of(choose_system(wide, config, SystemOptions()), config).total_bytes
    assert prepare_system(wide, SystemOptions(cpu_memory_bytes=total))[0].storage is None
    assert prepare_system(wide, SystemOptions())[0].storage is None
    system, _ = prepare_system(wide, SystemOptions(cpu_memory_bytes=total - 1))
    assert system.storage is not None
    with pytest.raises(UsageError, match="--plan places neurons in memory"):
        prepare_system(wide, SystemOptions(cpu_memory_bytes=total - 1, plan=Path("p")))
    least = config.ffn_size * (3 * 4 * config.hidden_size + 24)
    need = need_of(choose_system(wide, config, SystemOptions()), config)
    rest = need.total_bytes - need.ffn_bytes
    system, _ = prepare_system(wide, SystemOptions(cpu_memory_bytes=rest + least))
    assert system.storage is not None and system.storage.cache_bytes == least
    with pytest.raises(MemoryBudgetError, match=rf"at least .* \({rest + least} bytes\) with its"):
        prepare_system(wide, SystemOptions(cpu_memory_bytes=rest + least - 1))
    plans = stored_plans(wide, SystemOptions(cpu_memory_bytes=rest + least), 0.5)
    slots = [plan.num_slots for plan in plans]
    read = [plan.read_bytes for plan in plans]
    assert slots == sorted(slots) and read == sorted(read, reverse=True) and read[0] > read[-1]
    assert stored_text(plans).count("tokens/s") == len(plans) == 5
    assert all(plan.tokens_per_s <= min(2.0, plan.most_tokens_per_s) for plan in plans)
    assert stored_plans(wide, SystemOptions(cpu_memory_bytes=total), 0.5) == []
    more = stored_plans(wide, SystemOptions(cpu_memory_bytes=rest + least), 0.5, 9)
    assert len(more) == 9 and more[::2] == plans
    plot_stored(wide / "plan.svg", more, "wide")
    assert "that the disk allows" in (wide / "plan.svg").read_text()
    with pytest.raises(UsageError, match="cannot be written"):
        plot_stored(wide / "plan.svg" / "plan.svg", more, "wide")
    bundle_path(wide, BundleGeometry.of(config)).parent.mkdir()
    bundle_path(wide, BundleGeometry.of(config)).write_bytes(b"not this")
    with pytest.raises(ArtifactError, match="no bundle file"):
        prepare_system(wide, SystemOptions(cpu_memory_bytes=rest + least))


def test_a_profile_decides_who_stays_and_who_stands_first(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path / "m", dtype="float32")
    config, identity = read_model(path), ModelIdentity.of(path)
    counts = np.random.default_rng(1).permutation(config.num_layers * config.ffn_size)
    profile = ActivationProfile(
        counts.reshape(config.num_layers, -1).astype(np.int64), counts.size, "t", "t"
    )
    write_profile(artifact_path(path, PROFILE_FILE), identity, profile)
    file = read_bundle_file(pack_model(path, config), BundleGeometry.of(config), identity)
    ordered = np.take_along_axis(profile.counts, file.order, axis=1)
    assert (np.diff(ordered, axis=1) < 0).all() and file.order_name == profile.digest
    ids = [
        np.arange(config.ffn_size - 8 * layer, dtype=np.int32)[::-1].copy() for layer in range(3)
    ]
    kept = NeuronStorage(str(file.path), 130 * (3 * 48 * 4 + 24), has_gates=False)
    spec = ServiceSpec("cpu0", 1, 1, str(path), neuron_ids=ids, storage=kept)
    share = stored_share(spec, config)
    assert share.num_slots == 130
    own = np.concatenate([layer[n] for layer, n in zip(profile.counts, ids, strict=True)])
    np.testing.assert_allclose(share.rates, own / counts.size, rtol=1e-6)


def test_gates_are_read_first_where_few_of_those_listed_fire() -> None:
    """The llama-7b shape in float16: a neuron's rest takes longer to read than its gate."""
    geometry = BundleGeometry(2, 100, "float16", "float16", 8192, 8192, 8192)
    often, rarely = np.full(200, 0.4), np.r_[np.full(40, 0.4), np.full(160, 0.02)]
    assert reads_whole(geometry, often, 40) and not reads_whole(geometry, rarely, 40)
    assert reads_whole(geometry, np.empty(0), 40)  # nothing is known
    four_bits = replace(geometry, gate_dtype="q4")
    assert not reads_whole(four_bits, often, 40)
