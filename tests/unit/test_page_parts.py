"""Parts of the page that no browser is needed for, but gradio, which takes seconds to import."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.assignment import neuron_owners
from hotcold.actors.setup.shards import service_specs
from hotcold.model.config.build import read_config
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from hotcold.placement.plan import PlacementPlan, PlanRequest


@pytest.fixture(scope="module", autouse=True)
def gradio() -> None:
    pytest.importorskip("gradio")


def test_settings_are_checked() -> None:
    from hotcold.ui.page.chat_settings import read_settings

    good = (" Be brief. ", 0.5, 3, 0.9, 0.1, " 7 ", 12)
    assert read_settings(good) == ("Be brief.", SamplingParams(12, 0.5, 3, 0.9, 0.1, seed=7))
    assert read_settings((None, 0.5, 3, 0.9, 0.1, "", 12))[1].seed is None
    for index, value in ((1, -1), (1, None), (2, 2.5), (3, 2), (5, "x"), (5, "²"), (6, 0)):
        with pytest.raises(UsageError):
            read_settings((*good[:index], value, *good[index + 1 :]))


def test_what_a_plan_file_says_is_shown_as_words() -> None:
    """It lies beside the model, and comes with it from somewhere else."""
    from hotcold.ui.page.placement_picture import Placement, device_shares
    from hotcold.ui.page.placement_tab import placement_html

    mode, owner = "<img src=x onerror=alert(1)>", np.zeros((1, 4), np.int16)
    request = PlanRequest(mode, None, None, 64, "float16", 1, "", "", "")
    shares = device_shares(["<b>cpu0"], owner, None)
    for speed in (7.4, "<b>", None):
        plan = PlacementPlan(request, ("cpu0",), owner, owner[:, 0], 0, {"tokens_per_s": speed})
        found = placement_html(Placement(shares, 0, plan))
        assert "<img" not in found and "<b>" not in found and "&lt;img src=x" in found
        assert ("expects 7 tokens/s" in found) == (speed == 7.4)


def test_a_page_loses_no_conversation_with_its_connection_or_its_server() -> None:
    """The browser keeps what it is told: that must hold what it kept before."""
    from hotcold.ui.page.chat import Chat

    def kept(name: str) -> dict[str, Any]:
        turns = [("user", name), ("assistant", "yes")]
        return {"id": name, "messages": [{"role": role, "content": text} for role, text in turns]}

    def names(saved: list[dict[str, Any]]) -> set[str]:
        return {item["id"] for item in saved}

    async def visit() -> None:
        backend: Any = None  # nobody asks it
        visitor: Any = SimpleNamespace(session_hash="a", headers={})
        chat = Chat(backend, "model", True)
        await chat._restore([kept("one"), kept("two")], visitor)
        chat._history(visitor).remove("two")
        saved = await chat._save([kept("one"), kept("two")], visitor)
        assert names(saved) == {"one"}
        await chat._leave(visitor)  # the connection was lost for a moment
        chat._history(visitor).restore([kept("three")])
        saved = await chat._save(saved, visitor)
        assert names(saved) == {"one", "three"}
        another = Chat(backend, "model", True)  # the server began anew, and the page stays open
        another._history(visitor).restore([kept("four")])
        assert names(await another._save(saved, visitor)) == {"one", "three", "four"}

    asyncio.run(visit())


def test_the_picture_of_a_placement_has_a_line_and_a_row_of_each_device() -> None:
    from hotcold.ui.page.placement_picture import placement_of
    from hotcold.ui.page.placement_tab import placement_html

    system = SystemConfig(str(DEMO_DIRECTORY), num_cpu_actors=3, num_threads=3)
    config = read_config(DEMO_DIRECTORY)
    found = placement_of(
        system, config, neuron_owners(config, Topology(tuple(service_specs(system, config))))
    )
    root = ElementTree.fromstring(f"<div>{placement_html(found)}</div>")
    assert len(root.findall(".//polyline")) == len(root.findall(".//tbody/tr")) == 3
