"""A fleet of two models on a node that has memory for one: loaded when asked for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hotcold.model.errors import MemoryBudgetError
from hotcold.model.files.locate import DEMO_DIRECTORY
from tests.e2e.page_visit import QUESTION, ask, wait_for_answer

pytest.importorskip("ray.serve")
from ray import serve

from hotcold.ui.fleet.application import NAME, application
from hotcold.ui.fleet.arguments import FleetArgs
from tests.e2e.fleet.doors import ON_DEMAND, asked, until


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two copies of the embedded model."""
    folder = tmp_path_factory.mktemp("models")
    return [str(shutil.copytree(DEMO_DIRECTORY, folder / name)) for name in ("one", "two")]


@pytest.fixture(scope="module")
def args(models: list[str]) -> FleetArgs:
    return ON_DEMAND.model_copy(update={"models": models})


@pytest.fixture(scope="module")
def address(deployed: Callable[..., str], args: FleetArgs) -> str:
    return f"{deployed(lambda: application(args))}/"


@pytest.fixture(scope="module")
def door(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=600) as client:
        yield client


def loaded(door: httpx.Client) -> list[str]:
    return [one["name"].removesuffix(":latest") for one in door.get("/api/ps").json()["models"]]


def text_of(door: httpx.Client, model: str, **fields: Any) -> str:
    body = asked("def total(values):", model=model, temperature=0.0, **fields)
    found = door.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    text: str = found.json()["choices"][0]["text"]
    return text


def test_a_model_is_loaded_when_it_is_asked_for(door: httpx.Client) -> None:
    """Nothing before; the other one leaves for it, as there is no room for both."""
    assert loaded(door) == []
    assert door.get("/health").json()["status"] == "ok"
    assert [one["id"] for one in door.get("/v1/models").json()["data"]] == ["one", "two"]
    first = text_of(door, "one")
    assert loaded(door) == ["one"]
    assert text_of(door, "two") == first
    assert loaded(door) == ["two"]


def test_a_model_in_use_stays(door: httpx.Client) -> None:
    """Who asks for the other one waits; all are answered."""
    alone = text_of(door, "two")
    with ThreadPoolExecutor() as pool:
        using = [pool.submit(text_of, door, "two") for _ in range(3)]
        time.sleep(0.5)
        other = pool.submit(text_of, door, "one")
        assert [one.result() for one in using] == [alone] * 3
        assert other.result() == alone


def test_the_page_answers(open_page: Any, door: httpx.Client) -> None:
    """The model that its bar shows, which is loaded for it."""
    page = open_page()
    choice = page.get_by_label("Model", exact=True)
    assert choice.locator("option").all_inner_texts() == ["one", "two"]
    ask(page, QUESTION)
    assert len(wait_for_answer(page)) > 10
    assert loaded(door) == ["one"]


def test_one_that_is_idle_leaves(door: httpx.Client, args: FleetArgs) -> None:
    serve.run(application(args.model_copy(update={"stay": 1.0})), name=NAME)
    text_of(door, "one", max_tokens=5)
    until(lambda: loaded(door) == [])


def test_what_fits_no_node_is_refused(
    address: str,
    args: FleetArgs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless an autoscaler may bring one, which is told."""
    monkeypatch.setattr("hotcold.actors.processes.cluster._FIRST_REPORT_S", 0.0)
    large = args.model_copy(update={"options": {**args.options, "kv-tokens": 1 << 22}})
    with pytest.raises(MemoryBudgetError, match=r"no room on a node with .* for one: .* a smaller"):
        application(large)
    kept = args.model_copy(update={"replicas": 1})
    with pytest.raises(MemoryBudgetError, match=r"no room .* or --replicas 0, which loads"):
        application(kept)
    monkeypatch.setattr("hotcold.ui.fleet.models.can_grow", lambda: True)
    assert application(large) is not None
    assert "waiting for a node with" in capsys.readouterr().err
