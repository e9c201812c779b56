"""`hotcold plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.jobs.cli import main
from hotcold.jobs.support import planning
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import ARTIFACTS, artifact_path
from hotcold.placement.machine.description import Machine, write_machine
from hotcold.placement.profile import ActivationProfile, write_profile
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES
from tests.placement_cases import layout_of, make_machine

Plan = Callable[..., tuple[int, str, str]]
BUDGET = str(GPU_RESERVE_BYTES + 100_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    assert main(["make-model", "--context", "64", str(path)]) == 0
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    write_machine(path, make_machine())
    return path


@pytest.fixture
def plan(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Run the command on the model, on a stand-in for this machine; nothing is measured."""

    def described(**_options: Any) -> Machine:
        return make_machine()

    monkeypatch.setattr(planning, "this_machine", described)
    monkeypatch.setattr(planning, "read_layout", lambda: layout_of(described()))

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["plan", str(model), *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def add_profile(model: Path, name: str = "named.safetensors") -> Path:
    config = read_config(model)
    counts = np.random.default_rng(0).integers(0, 10, (config.num_layers, config.ffn_size))
    path = artifact_path(model, name)
    write_profile(
        path, ModelIdentity.of(model), ActivationProfile(counts.astype(np.int64), 10, "", "")
    )
    return path


def test_what_is_known_without_speeds_is_refused_before_they_are_measured(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(**_options: Any) -> Machine:
        raise AssertionError("measured")

    monkeypatch.setattr(planning, "this_machine", measured)
    (tmp_path / "file").touch()
    for arguments, text in (
        (("--cpu-actors", "17"), "--cpu-actors is 17"),
        (("--mode", "sign"), "make one with `hotcold train-predictors`"),
        (("--out", str(tmp_path / "file" / "plan")), "cannot be written"),
        (("--gpu-memory", "0", "--cpu-memory", "99MB"), "allowed by --cpu-memory"),
        (("--plot", str(tmp_path / "plot.svg")), "all of this model fits"),
    ):
        refused(plan(*arguments), text)


def test_the_json_says_what_the_tables_say(plan: Plan, model: Path) -> None:
    status, out, err = plan("--gpu-memory", BUDGET, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    share = read_config(model).firing_share
    assert 0.05 < share < 0.2  # what make-model made
    said = f"{share:.3g} of the neurons fire at a token, all as often (as its config.json says;"
    assert any(text.startswith(said) for text in report["assumed"])
    assert all(f"assumed: {text}" in out for text in report["assumed"])
    assert [device["name"] for device in report["devices"]] == ["gpu0", "cpu0"]
    config = read_config(model)
    neurons = sum(device["neurons"] for device in report["devices"])
    assert neurons == config.num_neurons
    assert f"expect {report['tokens_per_s']:.3g} tokens/s" in out
    assert 0 <= report["gap"] <= 1
    assert report["seconds"] > 0
    assert {part["name"] for part in report["parts"]} == {
        "attention",
        "head",
        "neurons",
        "exchanges",
    }
    for text in ("gpu0", "cpu0", "KV cache", "bytes over bandwidth", "optimal within"):
        assert text in out
    written = Path(report["path"])
    assert written.parent == model / "hotcold"


def written(out: str) -> str | None:
    path: str | None = json.loads(out.splitlines()[-1])["path"]
    return path


def test_another_budget_is_another_file(plan: Plan, model: Path) -> None:
    paths = {
        written(plan(*arguments, "--json")[1])
        for arguments in [
            (),
            ("--gpu-memory", "0"),
            ("--gpu-memory", BUDGET),
            ("--cpu-memory", "4GiB"),
            ("--mode", "dense"),
            ("--context", "16"),
            ("--kv-dtype", "float32"),
            ("--dtype", "q8"),
            ("--dtype", "q4"),
            ("--profile", str(add_profile(model))),
        ]
    }
    assert len(paths) == 10
    assert all(path and Path(path).exists() for path in paths)


def test_another_machine_is_written_only_where_told(
    plan: Plan, machine: Path, tmp_path: Path
) -> None:
    status, out, _err = plan("--machine", str(machine), "--json")
    assert (status, written(out)) == (0, None)
    names = [device["name"] for device in json.loads(out.splitlines()[-1])["devices"]]
    assert names == ["gpu0", "cpu0", "cpu1"]
    target = tmp_path / "there.safetensors"
    status, out, _err = plan(
        "--machine", str(machine), "--out", str(target), "--cpu-actors", "3", "--json"
    )
    assert (status, written(out)) == (0, str(target))
    assert target.exists()
    assert len(json.loads(out.splitlines()[-1])["devices"]) == 4


def test_it_says_where_the_plan_is_and_how_to_choose(
    plan: Plan, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that cannot be written is shown all the same, unless --out asked for the file."""
    before = sorted(model.rglob("*"))
    monkeypatch.setenv(ARTIFACTS, str(tmp_path / "elsewhere"))
    arguments = ("--mode", "exact", "--context", "48", "--json")
    status, out, err = plan(*arguments)
    path = Path(written(out) or "")
    assert (status, err, path.exists()) == (0, "", True)
    assert tmp_path / "elsewhere" in path.parents
    told = (
        f"plan: {path} (systems of these options load by it; another place: --out or {ARTIFACTS})"
    )
    assert told in out.splitlines()
    (tmp_path / "file").touch()
    monkeypatch.setenv(ARTIFACTS, str(tmp_path / "file"))
    status, out, err = plan(*arguments)
    assert (status, err, written(out)) == (0, "", None)
    assert "expect " in out and "cannot be written (Not a directory); give another place" in out
    refused(plan(*arguments, "--out", str(tmp_path / "file" / "plan")), "cannot be written")
    assert sorted(model.rglob("*")) == before


def refused(result: tuple[int, str, str], *texts: str) -> None:
    status, out, err = result
    assert (status, out) == (1, "")
    assert err.startswith("hotcold: error: ")
    assert err.count("\n") == 1
    for text in texts:
        assert text in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--cpu-actors", "0"), "--cpu-actors is 0"),
        (("--threads", "17"), "--threads is 17"),
        (("--cpu-actors", "3", "--threads", "2"), "--cpu-actors is 3"),
        (("--context", "1"), "--context is 1"),
    ],
)
def test_what_cannot_be_planned(
    plan: Plan, machine: Path, arguments: tuple[str, ...], text: str
) -> None:
    refused(plan("--machine", str(machine), *arguments), text)
