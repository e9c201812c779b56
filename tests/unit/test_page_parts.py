"""Parts of the page that no browser is needed for, but gradio, which takes seconds to import."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
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
from tests.placement_cases import make_machine


@pytest.fixture(scope="module", autouse=True)
def gradio() -> None:
    pytest.importorskip("gradio")


def test_settings_are_checked() -> None:
    import gradio as gr

    from hotcold.ui.page.chat_settings import settings_form

    with gr.Blocks():
        form = settings_form(DEMO_DIRECTORY, 100, True)
    names = [str(each.elem_id).replace("-", "_").removesuffix("_texts") for each in form.inputs]
    shown = {name: each.value for name, each in zip(names, form.inputs, strict=True)}
    defaults = SamplingParams.defaults(DEMO_DIRECTORY)

    def read(**changed: Any) -> tuple[str, SamplingParams]:
        assert not changed.keys() - shown.keys()
        return form.read(tuple((shown | changed).values()))

    assert read() == ("", replace(defaults, max_tokens=100))
    assert read(system_prompt=" Be brief. ", seed=" 7 ", top_k=3) == (
        "Be brief.", replace(defaults, max_tokens=100, seed=7, top_k=3),
    )  # fmt: skip
    assert read(stop="a\n\nb c")[1].stop == ("a", "b c")
    assert read(temperature=None, max_tokens=None)[1] == defaults
    # As in the API, these two count the answer alone where nothing says what is counted.
    assert not read(presence_penalty=0.5)[1].penalize_prompt
    assert read(presence_penalty=0.5, repeat_last_n=32)[1].penalize_prompt
    for name, value in (
        ("temperature", -1), ("top_k", 2.5), ("top_p", 2), ("seed", "x"), ("seed", "²"),
        ("max_tokens", 0), ("repeat_penalty", 0), ("mirostat", 3), ("min_tokens", 101),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=name):
            read(**{name: value})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"so \(a<b\) and $c$", "so \ue000a&lt;b\ue001 and \ue000c\ue001"),
        ("\\[\na\n\\]\n$$b$$", "\ue002\na\n\ue003\n\ue002b\ue003"),
        ("it costs $5 or $10, or $5/$6; $HOME:$PATH", None),
        (r"an escaped \$a$ and a lone $ and a$b$", None),
        ("`$a$` and ``\\(`b`\\)``", None),
        ("```sh\necho $a$ \\(b\\)\n```", None),
        ("~~~\n$a$\n", None),  # a block that is still being written
        ("```\n$a$\n```\n$b$", "```\n$a$\n```\n\ue000b\ue001"),
        ("```$a$``` and $b$\n$c$", "```$a$``` and \ue000b\ue001\n\ue000c\ue001"),
        (r"\[ a \\[2pt] \left[ x \] y", "\ue002 a \\\\[2pt] \\left[ x \ue003 y"),
        (r"\( a \( \(c\\\)", "\\( a \\( \ue000c\\\\\ue001"),
    ],
)
def test_formulas_are_found_outside_code(text: str, shown: str | None) -> None:
    from hotcold.ui.page.maths import with_formulas

    assert with_formulas(text) == (text if shown is None else shown)


def test_text_of_openings_alone_is_searched_fast() -> None:
    from hotcold.ui.page.maths import with_formulas

    for opening in (
        "\\(", "\\[", "\\\\[", "$$ ", "$a ", "`a ``b ", "```\n~~~\n", "`", "~", "\n```a`", "\n  ",
    ):  # fmt: skip
        text = opening * (200_000 // len(opening)) + "$"
        began = time.process_time()
        assert with_formulas(text)
        assert time.process_time() - began < 2


def test_what_a_plan_file_says_is_shown_as_words() -> None:
    """It lies beside the model, and comes with it from somewhere else."""
    from hotcold.ui.page.placement_tab import Placement, device_shares, placement_html

    mode, owner = "<img src=x onerror=alert(1)>", np.zeros((1, 4), np.int16)
    request, here = PlanRequest(mode, None, None, 64, "float16", 1, "", "", ""), make_machine()
    shares = device_shares(["<b>cpu0"], owner, None)
    for speed in (7.4, "<b>", None):
        said = {"tokens_per_s": speed}
        plan = PlacementPlan(request, ("cpu0",), owner, owner[:, 0], 0, here, said)
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
        visitor: Any = SimpleNamespace(session_hash="a", headers={}, client=None)
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


def test_an_answer_is_rewritten_where_there_is_room() -> None:
    from hotcold.ui.page.chat import Chat

    async def written(text: str) -> tuple[Any, list[Any], str]:
        """What is put into the question's field, the messages, and what went wrong."""
        backend: Any = None  # nobody asks it
        visitor: Any = SimpleNamespace(session_hash="a", headers={}, client=None)
        chat = Chat(backend, "model", True)
        history = chat._history(visitor)
        history.restore([{"id": "one", "messages": turns}])
        history.show("one")
        event: Any = SimpleNamespace(id="one", index=1, text=text)
        views = [view async for view in chat._again(event, visitor, [], {})]
        return views[-1][-1], history.open.messages, history.open.error

    turns = [{"role": "user", "content": "really?"}, {"role": "assistant", "content": "yes"}]
    _, messages, error = asyncio.run(written("no"))
    assert [one.content for one in messages[0].replies] == ["yes", "no"]
    assert (messages[1].content, error) == ("no", "")
    long = "no" * (1 << 19)
    unwritten, messages, error = asyncio.run(written(long))
    assert unwritten == long and messages[1].content == "yes" and "too long to keep" in error


def test_an_event_that_comes_late_is_of_its_own_conversation() -> None:
    from hotcold.ui.page.chat import Chat

    async def written() -> list[list[str]]:
        backend: Any = None  # nobody asks it
        visitor: Any = SimpleNamespace(session_hash="a", headers={}, client=None)
        chat = Chat(backend, "model", True)
        history = chat._history(visitor)
        history.restore([{"id": name, "messages": turns} for name in ("one", "two")])
        history.show("two")  # after the click, before its event came
        for name, text in (("one", "no"), ("gone", "never")):
            async for _ in chat._again(
                SimpleNamespace(id=name, index=1, text=text), visitor, [], {}
            ):
                pass
        found = [item for name in ("one", "two") if (item := history.find(name))]
        said = [[item.messages[1].content for item in found]]
        await chat._step(SimpleNamespace(id="one", index=1, place=0), visitor, [], {})
        await chat._step(SimpleNamespace(id="gone", index=1, place=0), visitor, [], {})
        assert history.open is found[1]
        return [*said, [item.messages[1].content for item in found]]

    turns = [{"role": "user", "content": "really?"}, {"role": "assistant", "content": "yes"}]
    assert asyncio.run(written()) == [["no", "yes"], ["yes", "yes"]]


def test_a_retry_that_is_refused_can_be_pressed_again() -> None:
    from hotcold.ui.page.chat import Chat

    def read(values: Any) -> Any:
        raise UsageError("top_p is 7")

    async def retried() -> tuple[Any, ...]:
        backend: Any = None  # nobody asks it
        visitor: Any = SimpleNamespace(session_hash="a", headers={}, client=None)
        event: Any = SimpleNamespace(id="one", index=1, text=None)
        settings: Any = SimpleNamespace(read=read)
        chat = Chat(backend, "model", True)
        chat._settings = settings
        history = chat._history(visitor)
        history.restore([{"id": "one", "messages": turns}])
        history.show("one")
        return [view async for view in chat._again(event, visitor, [], {})][-1]

    turns = [{"role": "user", "content": "really?"}, {"role": "assistant", "content": "yes"}]
    thread, _, state, _ = asyncio.run(retried())
    assert thread[:2] == turns
    told = thread[2]["content"]
    assert "Not sent: top_p is 7." in told and "press Retry" in told and "below" not in told
    assert (state["state"], state["refused"]) == ("error", False)


def test_the_table_of_a_placement_has_a_row_of_each_device_with_its_bars() -> None:
    from hotcold.ui.page.placement_tab import placement_html, placement_of

    system = SystemConfig(str(DEMO_DIRECTORY), num_cpu_actors=3, num_threads=3)
    config = read_config(DEMO_DIRECTORY)
    found = placement_of(
        system, config, neuron_owners(config, Topology(tuple(service_specs(system, config))))
    )
    root = ElementTree.fromstring(f"<div>{placement_html(found)}</div>")
    assert len(root.findall(".//tbody/tr")) == 3
    bars = root.findall(".//td[@style]")
    assert len(bars) == 6 and all(bar.get("style") == f"--share:{bar.text}" for bar in bars)


def test_no_visitor_crowds_out_the_others() -> None:
    """Whatever sessions it says it has."""
    from hotcold.ui.page.chat import MAX_VISITORS, Chat

    chat = Chat(None, "", True)  # type: ignore[arg-type]

    def history(session: str, address: str) -> Any:
        visitor = SimpleNamespace(host=address)
        asked: Any = SimpleNamespace(session_hash=session, client=visitor, headers={})
        return chat._history(asked)

    mine = history("mine", "192.0.2.1")
    for number in range(3 * MAX_VISITORS):
        history(f"s{number}", "192.0.2.2")
        history(f"t{number}", f"2001:db8::{number:x}")  # of one network
    assert history("mine", "192.0.2.1") is mine
    assert len(chat._histories) == len(chat._clients) == MAX_VISITORS
    networks = [network for _, network in chat._clients.values()]
    assert abs(networks.count("192.0.2.2") - networks.count("2001:db8::/64")) <= 1
