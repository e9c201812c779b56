"""What only some commands need is an extra, and a missing one is named in a line."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from hotcold.jobs.support import extras
from hotcold.jobs.support.extras import EXTRAS
from tests.e2e.commands import run_main

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_extras_are_those_of_the_project() -> None:
    for name, packages in EXTRAS.items():
        installed = " ".join(PROJECT["optional-dependencies"][name]).replace("-", "_")
        assert all(package in installed for package in packages)


def test_the_test_extra_has_all_others_that_commands_use() -> None:
    (own,) = (one for one in PROJECT["optional-dependencies"]["test"] if "hotcold[" in one)
    assert {*EXTRAS, "cluster"} == set(own.removeprefix("hotcold[").rstrip("]").split(","))


@pytest.mark.parametrize("has_pip", [True, False])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["serve"], "serve needs fastapi, uvicorn, prometheus_client, which are"),
        (["fleet"], "fleet needs watchfiles, simpy, which are"),
        (["plan"], "plan needs scipy, which is"),
        (["profile", "--plot", "a.png"], "--plot needs matplotlib, which is"),
    ],
)
def test_a_missing_extra_is_named(
    line: list[str], told: str, has_pip: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = {package for packages in EXTRAS.values() for package in packages}
    needed |= set() if has_pip else {"pip"}
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> object:
        return None if name in needed else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    extra = {"serve": "ui", "fleet": "fleet", "plan": "plan", "profile": "plot"}[line[0]]
    python = shlex.quote(sys.executable)
    pip = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    expected = f"hotcold: error: {told} not installed; {pip} 'hotcold[{extra}]'"
    assert run_main(*line).refusal == expected


def test_another_version_of_gradio_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = extras.version
    monkeypatch.setattr(
        extras, "version", lambda name: "6.2.0" if name == "gradio" else found(name)
    )
    lines = PROJECT["optional-dependencies"]["ui"]
    monkeypatch.setattr(extras, "requires", lambda name: lines)
    (asked,) = (one for one in lines if "gradio" in one)
    told = run_main("serve").refusal
    assert told.startswith(f"hotcold: error: the chat page needs {asked}, and 6.2.0 is installed; ")
    assert told.endswith("or --no-page does without")
