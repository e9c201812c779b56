"""Plans and profiles: nothing is lost, and what their files may not be.

Those of mixtures too, whose experts are of several sizes, with dense layers among them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.stripes import output_shard, output_stripes
from hotcold.actors.setup.assignment import require_partition
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes, kv_cache_bytes
from hotcold.numba_kernels.formats import WeightDtype
from hotcold.placement.plan import PlacementPlan, PlanRequest, read_plan, write_plan
from hotcold.placement.profile import ActivationProfile, rates_of, read_profile, write_profile
from hotcold.placement.solver.cost import hotness
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES
from tests.placement_cases import llama_config, make_machine, make_plan, mixture_config

IDENTITY = ModelIdentity("tiny", "ab" * 32)
OTHER = ModelIdentity("another", "cd" * 32)
MIB = 1 << 20
REQUEST = PlanRequest(
    mode="exact",
    gpu_memory_bytes=GPU_RESERVE_BYTES + 2 * MIB,
    cpu_memory_bytes=None,
    context_length=128,
    kv_dtype="float16",
    num_cpu_actors=2,
    machine="EPYC, node0 of 8 cores",
    profile_digest="",
    predictor_digest="",
)


def make_profile(config: ModelConfig, seed: int = 0) -> ActivationProfile:
    rng = np.random.default_rng(seed)
    shape = (config.num_layers, config.ffn_size)
    counts = np.minimum(1000, 100 * rng.pareto(1.2, shape)).astype(np.int64)
    return ActivationProfile(counts, 1000, "made up", "00")


@pytest.mark.parametrize("context", [16, 128])
def test_all_bytes_of_the_model_are_somewhere(context: int) -> None:
    config = llama_config()
    request = replace(REQUEST, context_length=context)
    plan = make_plan(config, make_machine(), make_profile(config), request)
    devices = plan.report["devices"]
    weights = attention_bytes(config) + head_bytes(config)
    weights += ffn_bytes(config, config.num_neurons)
    cache = kv_cache_bytes(config, context, "float16")
    assert sum(device["used_bytes"] for device in devices) == weights + cache
    assert sum(device["bytes"]["kv_cache"] for device in devices) == pytest.approx(cache, abs=10)
    for device in devices:
        assert device["left_bytes"] >= 0
        assert device["left_bytes"] == device["budget_bytes"] - device["used_bytes"]
        assert device["used_bytes"] == sum(device["bytes"].values())
    assert devices[0]["budget_bytes"] == 2 * MIB
    assert sum(device["active_share"] for device in devices) == pytest.approx(1)
    assert sum(part["ms"] for part in plan.report["parts"]) == pytest.approx(
        plan.report["token_s"] * 1e3
    )
    assert plan.report["tokens_per_s"] == pytest.approx(1 / plan.report["token_s"])


@pytest.mark.parametrize("counts", ["zero", "none"])
@pytest.mark.parametrize("gpu_memory", [0, None])
def test_profiles_that_say_nothing(counts: str, gpu_memory: int | None) -> None:
    layers = 12
    config = llama_config(num_hidden_layers=layers, intermediate_size=300)
    profile = None
    if counts == "zero":
        profile = ActivationProfile(np.zeros((layers, 300), np.int64), 10, "", "")
    request = replace(REQUEST, gpu_memory_bytes=gpu_memory)
    plan = make_plan(config, make_machine(), profile, request)
    assert plan.neuron_device.shape == (layers, 300)
    assert ("gpu0" in plan.device_names) == (gpu_memory is None)
    if gpu_memory == 0:
        assert plan.head_device == -1
        assert (plan.attention_device == -1).all()
        count = np.bincount(plan.neuron_device.ravel(), minlength=2)
        assert abs(int(count[0]) - int(count[1])) <= 64 * layers


def a_plan(config: ModelConfig) -> PlacementPlan:
    return make_plan(config, make_machine(), make_profile(config), REQUEST)


def refusal(path: Path, identity: ModelIdentity, request: PlanRequest = REQUEST) -> str:
    with pytest.raises(ArtifactError) as error:
        read_plan(path, identity, llama_config(), request)
    text = str(error.value)
    assert str(path) in text
    assert "hotcold plan" in text
    assert "\n" not in text
    return text


def test_other_plans_are_refused(tmp_path: Path) -> None:
    config = llama_config()
    path = tmp_path / "plan.safetensors"
    assert "no plan file" in refusal(path, IDENTITY)
    write_plan(path, IDENTITY, a_plan(config))
    assert "'another'" in refusal(path, OTHER)
    other = replace(REQUEST, gpu_memory_bytes=8 << 30, mode="dense", profile_digest="123456789abc")
    text = refusal(path, IDENTITY, other)
    assert "was made for --mode exact, --gpu-memory 1.002 GiB, no profile" in text
    assert "not --mode dense, --gpu-memory 8 GiB, profile 123456789abc" in text
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refusal(path, IDENTITY)


@pytest.mark.parametrize("change", [{"mode": 3}, {"kv_dtype": None}, {"more": 1}])
def test_a_plan_must_say_what_it_is_for(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "plan.safetensors"
    write_plan(path, IDENTITY, a_plan(llama_config()))
    artifact = read_artifact(path, "plan", IDENTITY)
    facts = artifact.facts | {"request": artifact.facts["request"] | change}
    write_artifact(path, "plan", IDENTITY, artifact.tensors, facts)
    assert "does not say what it was made for" in refusal(path, IDENTITY)


@pytest.mark.parametrize(
    ("counts", "num_tokens", "text"),
    [
        (np.zeros((3, 1000), np.int64), 0, "profile of 0 tokens"),
        (np.full((3, 1000), 11, np.int64), 10, "from 11 to 11"),
        (np.zeros((3, 1000), np.int32), 10, "int32"),
    ],
)
def test_an_impossible_profile_is_refused(
    tmp_path: Path, counts: np.ndarray, num_tokens: int, text: str
) -> None:
    path = tmp_path / "profile.safetensors"
    profile = ActivationProfile(counts, num_tokens, "", "")
    with pytest.raises(ArtifactError) as error:
        write_profile(path, IDENTITY, profile)
    assert text in str(error.value)
    facts = {"num_tokens": num_tokens, "text_name": "", "text_digest": ""}
    write_artifact(path, "profile", IDENTITY, {"counts": counts}, facts)
    with pytest.raises(ArtifactError, match="make it again"):
        read_profile(path, IDENTITY, llama_config())


TOKENS = 1000
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


def plan_of(config: ModelConfig, neurons_on_gpu: float, num_cpus: int = 2) -> PlacementPlan:
    """A plan whose GPU has room for attention, the head, and a share of the neurons."""
    request = replace(REQUEST, gpu_memory_bytes=None, num_cpu_actors=num_cpus)
    whole = make_plan(config, make_machine(), profile_of(config), request)
    (gpu,) = [device for device in whole.report["devices"] if device["name"] == "gpu0"]
    parts = gpu["used_bytes"] - gpu["bytes"]["neurons"]
    room = parts + int(ffn_bytes(config, config.num_neurons) * neurons_on_gpu)
    request = replace(request, gpu_memory_bytes=GPU_RESERVE_BYTES + room)
    return make_plan(config, make_machine(), profile_of(config), request)


@pytest.mark.parametrize("num_cpus", [1, 3])
@pytest.mark.parametrize("config", [SPARSE, SILU], ids=["relu", "silu"])
def test_a_plan_places_every_neuron(config: ModelConfig, num_cpus: int, tmp_path: Path) -> None:
    plan = plan_of(config, 0.5, num_cpus)
    path = tmp_path / "plan.safetensors"
    write_plan(path, IDENTITY, plan)
    again = read_plan(path, IDENTITY, config, plan.request)
    for name, value in vars(plan).items():
        np.testing.assert_equal(getattr(again, name), value)
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


@pytest.mark.parametrize(("name", "sizes"), [("q4", {384}), ("q4_k", {256, 512})])
def test_two_services_share_each_expert(name: WeightDtype, sizes: set[int]) -> None:
    """Evenly where a block is a group; of blocks of 256 each has the larger part in turn."""
    config = mixture_config(num_experts=16, size=768)
    config = replace(config, block_formats=(((name,) * 3,) * 16,) * config.num_layers)
    stripes = output_stripes(config, [2, 2], expert_pieces=2)
    shards = [output_shard(config, own)[0] for own in stripes]
    parts = [[np.isin(ids, shard).sum() for ids in blocks_of(config, 0)] for shard in shards]
    assert {int(part) for of_service in parts for part in of_service} == sizes
    assert (np.sum(parts, axis=0) == 768).all() and sum(parts[0]) == sum(parts[1])


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("threads", [[2, 2], [3, 1]])
def test_stripes_of_experts(threads: list[int], pieces: int) -> None:
    """A service has its share of experts, whole or in pieces, and pieces of wide ones."""
    config = mixture_config(num_experts=8, size=768, shared_size=5000, dense_layers=(1,))
    stripes = output_stripes(config, threads, pieces)
    shards = [output_shard(config, own) for own in stripes]
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
