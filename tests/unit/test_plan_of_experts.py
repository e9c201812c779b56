"""Profiles and plans of mixtures: experts of several sizes, dense layers among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.lanes import output_lanes, output_shard
from hotcold.actors.setup.assignment import (
    cold_shards,
    hottest_neurons,
    require_partition,
    service_lanes,
)
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, ServiceError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.weights.sizes import ffn_bytes
from hotcold.numba_kernels.formats import WeightDtype
from hotcold.placement.plan import PlacementPlan, PlanRequest, read_plan, write_plan
from hotcold.placement.planner import make_plan
from hotcold.placement.profile import (
    ActivationProfile,
    Rates,
    rates_of,
    read_profile,
    stated_profile,
    write_profile,
)
from hotcold.placement.solver.cost import RowBytes, hotness, make_groups, read_bytes
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES
from tests.placement_cases import llama_config, make_machine, mixture_config

IDENTITY = ModelIdentity("tiny", "ab" * 32)
TOKENS = 1000
REQUEST = PlanRequest("exact", None, None, 128, "float16", 2, "", "", "")
SPARSE = mixture_config(num_experts=6, size=128, shared_size=200, dense_layers=(1,))
SILU = replace(SPARSE, activation_fn="silu")


def blocks_of(config: ModelConfig, layer: int) -> list[np.ndarray]:
    """The neuron ids of each block."""
    sizes = config.layers[layer].ffn.block_sizes
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def profile_of(config: ModelConfig, seed: int = 0) -> ActivationProfile:
    """Experts chosen ever more rarely; of their tokens each neuron fires for some."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((config.num_layers, max(config.ffn_sizes)), np.int64)
    chosen = np.zeros((config.num_layers, 7), np.int64)
    for layer in range(config.num_layers):
        for block, ids in enumerate(blocks_of(config, layer)):
            has_router = config.layers[layer].ffn.router is not None
            times = TOKENS if block == 6 or not has_router else 600 // (block + 1)
            chosen[layer, block] = times
            fired = rng.integers(0, times + 1, ids.size) if config.is_sparse else times
            counts[layer, ids] = fired
    return ActivationProfile(counts, TOKENS, "made up", "00", chosen)


def test_arrays_of_neurons() -> None:
    assert neurons.shape(SPARSE) == (3, 1000)
    assert neurons.exists(SPARSE).sum(axis=1).tolist() == [968, 1000, 968]
    assert neurons.most_blocks(SPARSE) == 7 and neurons.most_blocks(llama_config()) == 1
    found = neurons.blocks(SPARSE)
    assert found[0].tolist() == [*np.repeat(range(6), 128), *[6] * 200, *[-1] * 32]
    assert not found[1].any()


@pytest.mark.parametrize("config", [SPARSE, SILU], ids=["relu", "silu"])
def test_a_profile_comes_back_as_written(config: ModelConfig, tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.safetensors", profile_of(config)
    write_profile(path, IDENTITY, profile)
    again = read_profile(path, IDENTITY, config)
    assert again.chosen is not None and profile.chosen is not None
    np.testing.assert_array_equal(again.chosen, profile.chosen)
    np.testing.assert_array_equal(again.counts, profile.counts)
    assert again.digest == profile.digest
    assert replace(profile, chosen=profile.chosen + 0 - 1).digest != profile.digest
    with pytest.raises(ArtifactError, match="from 0 to 1001, not from 0 to the 1000 tokens"):
        write_profile(path, IDENTITY, replace(profile, chosen=profile.chosen * 1001 // 1000))
    with pytest.raises(ArtifactError):  # of a model without experts
        write_profile(path, IDENTITY, replace(profile, chosen=None))
        read_profile(path, IDENTITY, config)


def test_distances_come_back_and_may_be_missing(tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.safetensors", profile_of(SPARSE)
    write_profile(path, IDENTITY, profile)
    assert read_profile(path, IDENTITY, SPARSE).distances is None  # as of earlier versions
    assert SPARSE.num_experts == 12  # of two layers
    distances = np.arange(12)
    write_profile(path, IDENTITY, replace(profile, distances=distances))
    again = read_profile(path, IDENTITY, SPARSE)
    np.testing.assert_array_equal(again.distances, distances)
    assert again.digest == profile.digest  # no plan depends on them
    with pytest.raises(ArtifactError, match="distances of experts are counted below 0"):
        write_profile(path, IDENTITY, replace(profile, distances=distances - 1))
    write_profile(path, IDENTITY, replace(profile, distances=distances[1:]))
    with pytest.raises(ArtifactError, match=r"distances' is int64 \(11,\), not int64 \(12,\)"):
        read_profile(path, IDENTITY, SPARSE)


def test_rates_by_hand() -> None:
    profile = profile_of(SPARSE)
    found = rates_of(SPARSE, profile)
    assert profile.chosen is not None
    for layer in range(SPARSE.num_layers):
        for block, ids in enumerate(blocks_of(SPARSE, layer)):
            assert (found.chosen[layer, ids] == profile.chosen[layer, block] / TOKENS).all()
    assert not found.chosen[0, 968:].any() and not found.fired[0, 968:].any()
    np.testing.assert_array_equal(found.fired, profile.counts / TOKENS)
    unknown = rates_of(SPARSE, None)
    assert unknown.chosen is unknown.fired
    assert set(unknown.chosen[0, :768]) == {2 / 6} and set(unknown.chosen[0, 768:968]) == {1.0}
    assert (unknown.chosen[1] == 1).all()
    assert (rates_of(llama_config(), None).fired == 1).all()


def test_bytes_that_a_token_reads() -> None:
    """Of a neuron whose expert is chosen by half of the tokens, and that fires for a tenth."""
    rows, rates = RowBytes(100, 80, 120), Rates(np.array([[0.5]]), np.array([[0.1]]))
    assert [float(part[0, 0]) for part in read_bytes(rows, rates, "dense")] == [50, 100]
    assert [float(part[0, 0]) for part in read_bytes(rows, rates, "exact")] == [50, 20]


def test_a_stated_profile() -> None:
    found = stated_profile(SPARSE, 0.2, "said so")
    rates = rates_of(SPARSE, found)
    assert rates.fired[0, :968].sum() == pytest.approx(0.2 * (6 * 128 / 3 + 200), rel=0.01)
    assert rates.fired[1].mean() == pytest.approx(0.2, rel=0.01)
    assert (rates.fired <= rates.chosen + 1e-6).all()
    assert stated_profile(llama_config(), 0.2, "").chosen is None


@pytest.mark.parametrize("config", [SPARSE, SILU], ids=["relu", "silu"])
def test_groups_lie_within_experts(config: ModelConfig) -> None:
    hot = hotness(config, rates_of(config, profile_of(config)))
    groups = make_groups(config, hot)
    for layer, sizes in enumerate(groups.sizes):
        size = config.ffn_sizes[layer]
        assert np.sort(groups.order[layer]).tolist() == list(range(config.largest_ffn))
        assert np.sort(groups.order[layer, :size]).tolist() == list(range(size))
        parts = np.split(groups.order[layer, :size], np.cumsum(sizes[sizes > 0])[:-1])
        assert all(np.unique(neurons.blocks(config)[layer, ids]).size == 1 for ids in parts)
        means = [hot[layer, ids].mean() for ids in parts]
        assert np.all(np.diff(means) <= 1e-12)
        if layer != 1 and not config.is_sparse:
            assert sorted(sizes[sizes > 0].tolist()) == [128] * 6 + [200]
    found = groups.sums(hot)
    assert found.shape == groups.sizes.shape
    np.testing.assert_allclose(found.sum(axis=1), hot.sum(axis=1))


def plan_of(config: ModelConfig, neurons_on_gpu: float, num_cpus: int = 2) -> PlacementPlan:
    """A plan whose GPU has room for attention, the head, and a share of the neurons."""
    request = replace(REQUEST, num_cpu_actors=num_cpus)
    whole = make_plan(config, make_machine(), profile_of(config), request)
    (gpu,) = [device for device in whole.report["devices"] if device["name"] == "gpu0"]
    parts = gpu["used_bytes"] - gpu["bytes"]["neurons"]
    room = parts + int(ffn_bytes(config, config.num_neurons) * neurons_on_gpu)
    request = replace(request, gpu_memory_bytes=GPU_RESERVE_BYTES + room)
    return make_plan(config, make_machine(), profile_of(config), request)


@pytest.mark.parametrize("num_cpus", [1, 2, 3])
@pytest.mark.parametrize("config", [SPARSE, SILU], ids=["relu", "silu"])
def test_a_plan_places_every_neuron(config: ModelConfig, num_cpus: int, tmp_path: Path) -> None:
    plan = plan_of(config, 0.5, num_cpus)
    path = tmp_path / "plan.safetensors"
    write_plan(path, IDENTITY, plan)
    again = read_plan(path, IDENTITY, config, plan.request)
    np.testing.assert_array_equal(again.neuron_device, plan.neuron_device)
    exists = neurons.exists(config)
    assert ((plan.neuron_device >= 0) == exists).all()
    held = [plan.neurons_of(name) for name in plan.device_names]
    require_partition(config, held)
    for device, layers in zip(plan.report["devices"], held, strict=True):
        assert device["neurons"] == sum(ids.size for ids in layers)
        assert device["left_bytes"] >= 0
    assert sum(device["active_share"] for device in plan.report["devices"]) == pytest.approx(1)
    part = next(part for part in plan.report["parts"] if part["name"] == "neurons")
    assert part["count"] == config.num_neurons
    broken = plan.neuron_device.copy()
    broken[0, 967] = -1
    write_plan(path, IDENTITY, replace(plan, neuron_device=broken))
    with pytest.raises(ArtifactError, match="1 neurons are on no device, the first is neuron 967"):
        read_plan(path, IDENTITY, config, plan.request)


@pytest.mark.parametrize("config", [SPARSE, SILU], ids=["relu", "silu"])
def test_the_gpu_has_what_is_read_most(config: ModelConfig) -> None:
    plan, profile = plan_of(config, 0.5), profile_of(config)
    hot = hotness(config, rates_of(config, profile))
    on_gpu, exists = plan.neuron_device == 0, neurons.exists(config)
    assert on_gpu.sum() > 0.35 * config.num_neurons
    assert hot[on_gpu].mean() > 1.5 * hot[exists & ~on_gpu].mean()
    if not config.is_sparse:  # experts are whole: all on the GPU, or none of it
        for layer in (0, 2):
            for ids in blocks_of(config, layer):
                assert len(set(on_gpu[layer, ids])) == 1
        assert on_gpu[0, 768:968].all() and not on_gpu[0, 5 * 128 : 768].any()


@pytest.mark.parametrize("config", [SPARSE, SILU], ids=["relu", "silu"])
@pytest.mark.parametrize("num_cpus", [2, 3])
def test_cold_experts_are_divided_evenly(config: ModelConfig, num_cpus: int) -> None:
    """In proportion to the devices' speed: two actors of one node have half of its bandwidth."""
    plan = plan_of(config, 0.3, num_cpus)
    speeds = np.array([50.0, 50.0] if num_cpus == 2 else [25.0, 50.0, 25.0])
    for layer in (0, 2):
        for ids in blocks_of(config, layer):
            places = plan.neuron_device[layer, ids]
            counts = np.bincount(places, minlength=1 + num_cpus)[1:]
            share = counts.sum() * speeds / speeds.sum()
            assert np.abs(counts - share).max() <= 1 + (places >= 0).size // 64


def test_division_within_little_memory() -> None:
    """A node that is as fast as another but has room for a tenth gets that, and no more."""
    need = ffn_bytes(SILU, SILU.num_neurons)
    machine = make_machine((), (need // 10, 16 << 30))
    plan = make_plan(SILU, machine, profile_of(SILU), REQUEST)
    first, second = plan.report["devices"]
    assert first["left_bytes"] >= 0 and second["left_bytes"] >= 0
    assert 0.08 < first["neurons"] / SILU.num_neurons <= 0.1


def test_shards_of_threads_have_a_part_of_every_expert() -> None:
    plan = plan_of(SPARSE, 0.3)
    planned = [plan.neurons_of(name) for name in ("cpu0", "cpu1")]
    none = [np.zeros(0, np.int32)] * SPARSE.num_layers
    shards = cold_shards(SPARSE, planned, none, service_lanes(SPARSE, [2, 3], planned))
    require_partition(SPARSE, [plan.neurons_of("gpu0"), *shards])
    for shard in shards:
        for layer, ids in enumerate(shard):
            assert (np.diff(neurons.blocks(SPARSE)[layer, ids]) >= 0).all()
    with pytest.raises(ServiceError, match="of the 968 neurons of layer 0"):
        require_partition(SPARSE, shards)


def test_hottest_experts_stay_whole() -> None:
    """Without any count, a GPU that holds some experts holds all of their neurons."""
    from hotcold.actors.setup.assignment import _ranks

    config = replace(SILU, experts=replace(SILU.experts, shared_size=0, dense_layers=()))  # type: ignore[type-var]
    hot = hotness(config, rates_of(config, None))
    found = hottest_neurons(hot.shape, 5 * 128, hot, neurons.exists(config), _ranks(config))
    assert sum(ids.size for ids in found) == 5 * 128
    assert max(ids.size for ids in found) - min(ids.size for ids in found) == 128
    for ids in found:
        assert set(np.bincount(ids // 128, minlength=6).tolist()) <= {0, 128}


@pytest.mark.parametrize(
    ("name", "sizes"), [("q4", {384}), ("mxfp4", {384}), ("q4_k", {256, 512}), ("q8", {256, 512})]
)
def test_two_services_share_each_expert(name: WeightDtype, sizes: set[int]) -> None:
    """Evenly where a block is a group; of blocks of 256 each has the larger part in turn."""
    config = mixture_config(num_experts=16, size=768)
    config = replace(config, down_formats=tuple((name,) * 16 for _ in config.layers))
    lanes = output_lanes(config, [2, 2], expert_pieces=2)
    shards = [output_shard(config, own)[0] for own in lanes]
    parts = [[np.isin(ids, shard).sum() for ids in blocks_of(config, 0)] for shard in shards]
    assert {int(part) for of_service in parts for part in of_service} == sizes
    assert (np.sum(parts, axis=0) == 768).all() and sum(parts[0]) == sum(parts[1])


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("threads", [[1], [2, 2], [3, 1], [1, 1, 1, 1]])
def test_lanes_of_experts(threads: list[int], pieces: int) -> None:
    """A service has its share of experts, whole or in pieces, and pieces of wide ones."""
    config = mixture_config(num_experts=8, size=768, shared_size=5000, dense_layers=(1,))
    lanes = output_lanes(config, threads, pieces)
    shards = [output_shard(config, own) for own in lanes]
    require_partition(config, shards)
    for shard in shards:
        for layer in (0, 2):
            for ids in blocks_of(config, layer):
                own = np.sort(shard[layer][np.isin(shard[layer], ids)]) - ids[0]
                of_experts = (0, 768) if pieces == 1 else (0, 256, 512, 768)
                sizes = of_experts if ids.size == 768 else (0, 2560, 2440, 5000)
                assert own.size in sizes
    experts = np.array([(shard[0] < 8 * 768).sum() for shard in shards])
    if len(set(threads)) == 1:
        assert experts.max() == experts.min()
