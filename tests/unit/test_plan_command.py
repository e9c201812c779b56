"""`hotcold plan`: what it prints and writes, and what it refuses.

Of a model that is here, and of a named shape or a config.json, with a stated sparsity.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.jobs.support import planning
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import ARTIFACTS, artifact_path
from hotcold.model.synthetic.shape import DTYPES, SHAPES, config_json
from hotcold.placement.machine.description import Machine, write_machine
from hotcold.placement.profile import ActivationProfile, write_profile
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES
from tests.documents import ROOT
from tests.e2e.commands import Outcome, run_main
from tests.placement_cases import layout_of, make_machine

Plan = Callable[..., Outcome]
BUDGET = str(GPU_RESERVE_BYTES + 100_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    assert run_main("make-model", "--context", "64", path).status == 0
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    write_machine(path, make_machine())
    return path


@pytest.fixture
def plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Run the command on the model, on a stand-in for this machine; nothing is measured."""
    monkeypatch.setattr(planning, "this_machine", lambda **_: make_machine())
    monkeypatch.setattr(planning, "read_layout", lambda: layout_of(make_machine()))
    return lambda *arguments: run_main("plan", model, *arguments)


def add_profile(model: Path) -> Path:
    config = read_config(model)
    counts = np.random.default_rng(0).integers(0, 10, (config.num_layers, config.ffn_size))
    path = artifact_path(model, "named.safetensors")
    profile = ActivationProfile(counts.astype(np.int64), 10, "", "")
    write_profile(path, ModelIdentity.of(model), profile)
    return path


def test_what_is_known_without_speeds_is_refused_before_they_are_measured(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(**_options: Any) -> Machine:
        raise AssertionError("measured")

    monkeypatch.setattr(planning, "this_machine", measured)
    (tmp_path / "file").touch()
    for arguments, text in (
        (("--cpu-actors", 17), "--cpu-actors is 17"),
        (("--mode", "sign"), "make one with `hotcold train-predictors`"),
        (("--out", tmp_path / "file" / "plan"), "cannot be written"),
        (("--gpu-memory", 0, "--cpu-memory", "99MB"), "allowed by --cpu-memory"),
        (("--plot", tmp_path / "plot.svg"), "all of this model fits"),
    ):
        assert text in plan(*arguments).refusal


def test_the_json_says_what_the_tables_say(plan: Plan, model: Path) -> None:
    done = plan("--gpu-memory", BUDGET, "--json")
    report, config = done.report, read_config(model)
    assert done.err == ""
    assert 0.05 < config.firing_share < 0.2  # what make-model made
    said = f"{config.firing_share:.3g} of the neurons fire at a token, all as often (as its config"
    assert any(text.startswith(said) for text in report["assumed"])
    assert [device["name"] for device in report["devices"]] == ["gpu0", "cpu0"]
    assert sum(device["neurons"] for device in report["devices"]) == config.num_neurons
    assert 0 <= report["gap"] <= 1
    assert report["seconds"] > 0
    parts = {"attention", "head", "neurons", "exchanges"}
    assert {part["name"] for part in report["parts"]} == parts
    for text in (
        *(f"assumed: {text}" for text in report["assumed"]),
        f"expect {report['tokens_per_s']:.3g} tokens/s",
        *("gpu0", "cpu0", "KV cache", "bytes over bandwidth", "optimal within"),
    ):
        assert text in done.out
    assert Path(report["path"]).parent == model / "hotcold"


def test_another_budget_is_another_file(plan: Plan, model: Path) -> None:
    changes = [
        *("", "--gpu-memory 0", f"--gpu-memory {BUDGET}", "--cpu-memory 4GiB", "--mode dense"),
        *("--context 16", "--kv-dtype float32", "--dtype q8", "--dtype q4"),
        f"--profile {add_profile(model)}",
    ]
    paths = {plan(*change.split(), "--json").report["path"] for change in changes}
    assert len(paths) == 10
    assert all(path and Path(path).exists() for path in paths)


def test_another_machine_is_written_only_where_told(
    plan: Plan, machine: Path, tmp_path: Path
) -> None:
    report = plan("--machine", machine, "--json").report
    assert report["path"] is None
    assert [device["name"] for device in report["devices"]] == ["gpu0", "cpu0", "cpu1"]
    target = tmp_path / "there.safetensors"
    told = ("--machine", machine, "--out", target, "--cpu-actors", 3, "--json")
    report = plan(*told).report
    assert report["path"] == str(target) and target.exists()
    assert len(report["devices"]) == 4


def test_it_says_where_the_plan_is_and_how_to_choose(
    plan: Plan, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that cannot be written is shown all the same, unless --out asked for the file."""
    before = sorted(model.rglob("*"))
    monkeypatch.setenv(ARTIFACTS, str(tmp_path / "elsewhere"))
    arguments = ("--mode", "exact", "--context", "48", "--json")
    done = plan(*arguments)
    path = Path(done.report["path"])
    assert done.err == "" and path.exists() and tmp_path / "elsewhere" in path.parents
    told = (
        f"plan: {path} (systems of these options load by it; another place: --out or {ARTIFACTS})"
    )
    assert told in done.out.splitlines()
    (tmp_path / "file").touch()
    monkeypatch.setenv(ARTIFACTS, str(tmp_path / "file"))
    done = plan(*arguments)
    assert (done.err, done.report["path"]) == ("", None) and "expect " in done.out
    assert "cannot be written (Not a directory); give another place" in done.out
    refusal = plan(*arguments, "--out", tmp_path / "file" / "plan").refusal
    assert "cannot be written" in refusal
    assert sorted(model.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--cpu-actors 0", "--cpu-actors is 0"),
        ("--threads 17", "--threads is 17"),
        ("--cpu-actors 3 --threads 2", "--cpu-actors is 3"),
        ("--context 1", "--context is 1"),
    ],
)
def test_what_cannot_be_planned(plan: Plan, machine: Path, arguments: str, text: str) -> None:
    assert text in plan("--machine", machine, *arguments.split()).refusal


MACHINE = str(ROOT / "benchmarks/machines/pc-high.json")


def planned(*arguments: str) -> dict[str, Any]:
    done = run_main("plan", *arguments, "--context", "128", "--json")
    return done.report | {"said": done.out}


def refusal(*arguments: str) -> str:
    return run_main("plan", *arguments).refusal


def test_a_shape_alone_is_planned() -> None:
    arguments = ("--shape", "llama-7b", "--machine", MACHINE, "--gpu-memory", "2GiB")
    exact = planned(*arguments, "--density", "0.1")
    assert exact["path"] is None
    assert "no plan file: the model's weights are not here" in exact["said"]
    assumed = "\n".join(exact["assumed"])
    for words in ("0.1 of the neurons fire", "(--density)", "description", "half full"):
        assert words in assumed
    weights = sum(device["used_bytes"] for device in exact["devices"])
    assert weights == pytest.approx(13.2e9, rel=0.02)  # 6.6 G weights in float16
    lowrank = planned(*arguments, "--density", "0.1", "--mode", "lowrank")
    q4 = planned(*arguments, "--density", "0.1", "--dtype", "q4")
    speeds = [each["tokens_per_s"] for each in (exact, lowrank)]
    assert speeds == sorted(speeds)
    assert q4["tokens_per_s"] > 2 * exact["tokens_per_s"]
    assert any("as on random weights" in text for text in lowrank["assumed"])


def test_what_was_published_is_used() -> None:
    report = planned("--shape", "tiny", "--machine", MACHINE)
    assert any("0.3 of the neurons" in each and "published" in each for each in report["assumed"])
    assert "state a share" in refusal("--shape", "afm-4.5b", "--machine", MACHINE)
    silu = planned("--shape", "qwen3-8b", "--machine", MACHINE)
    assert any("every neuron fires" in each for each in silu["assumed"])


def test_what_no_gpu_computes_is_planned_without_one(tmp_path: Path) -> None:
    values = config_json(SHAPES["tiny"], DTYPES["bf16"])
    hunyuan = {"model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values | hunyuan | {"hidden_act": "silu"}))
    report = planned("--config", str(tmp_path), "--machine", MACHINE)
    assert all(device["name"].startswith("cpu") for device in report["devices"])


def test_a_config_alone_is_planned(tmp_path: Path) -> None:
    text = json.dumps(config_json(SHAPES["tiny"], DTYPES["bf16"]))
    (tmp_path / "config.json").write_text(text)
    found = [
        planned("--config", str(source), "--machine", MACHINE)["tokens_per_s"]
        for source in (tmp_path, tmp_path / "config.json")
    ]
    assert found[0] == found[1] > 0
    assert "give a config.json" in refusal("--config", "nothing", "--machine", MACHINE)
    assert "each name a model" in refusal("--config", str(tmp_path), "--shape", "tiny")


def test_a_shape_larger_than_memory_is_planned_from_storage() -> None:
    """As a model that is here is: what stays in memory, by size, and what a token reads."""
    arguments = ("--shape", "llama-7b", "--gpu-memory", "2GiB", "--machine", MACHINE)
    report = planned(*arguments, "--cpu-memory", "8GiB")
    sizes = report["storage"]
    assert all(size["num_on_gpu"] > 0 for size in sizes)
    speeds = [size["tokens_per_s"] for size in sizes]
    assert speeds == sorted(speeds) and len(speeds) == 5
    assert "--cpu-memory 8.00GiB: " in report["said"]
    assert "with --dtype q8 all of it fits in memory" in report["said"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shape", "none"), "known are tiny"),
        (("--shape", "tiny", "--out", "x"), "--out writes a plan"),
        (("--shape", "tiny", "--profile", "x"), "--profile is of a model"),
        (
            ("--shape", "llama-13b", "--gpu-memory", "0", "--cpu-memory", "10GB", "--context=64"),
            "or --dtype q4_1, which fits",
        ),
        (("--density", "0.1"), "--density states what is not known"),
    ],
)
def test_what_cannot_be_planned_without_weights(arguments: tuple[str, ...], says: str) -> None:
    assert says in refusal(*arguments, "--machine", MACHINE)
