"""Plans and profiles: nothing is lost, and what their files may not be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes, kv_cache_bytes
from hotcold.placement.plan import PlacementPlan, PlanRequest, read_plan, write_plan
from hotcold.placement.profile import ActivationProfile, read_profile, write_profile
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES
from tests.placement_cases import llama_config, make_machine, make_plan

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


def test_a_plan_comes_back_as_written(tmp_path: Path) -> None:
    config = llama_config()
    plan, path = a_plan(config), tmp_path / "plan.safetensors"
    write_plan(path, IDENTITY, plan)
    again = read_plan(path, IDENTITY, config, REQUEST)
    assert again.request == REQUEST
    assert again.device_names == plan.device_names
    assert again.head_device == plan.head_device
    assert again.report == plan.report
    for name in ("neuron_device", "attention_device"):
        np.testing.assert_array_equal(getattr(again, name), getattr(plan, name))


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
