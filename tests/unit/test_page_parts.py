"""Parts of the page that no browser is needed for, but gradio, which takes seconds to import."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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
from hotcold.ui.page.conversations import ChatHistory
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
        (r"so \(a<b\) and $c$", r"so |\(a< b\)| and |$c$|"),
        ("\\[\na\n\\]\n$$b$$", "|\\[\na\n\\]|\n|$$b$$|"),
        ("it costs $5 or $10, or $5/$6; $HOME:$PATH", None),
        (r"an escaped \$a$ and a lone $ and a$b$", None),
        ("`$a$` and ``\\(`b`\\)``", None),
        ("```sh\necho $a$ \\(b\\)\n```", None),
        ("~~~\n$a$\n", None),  # a block that is still being written
        ("```\n$a$\n```\n$b$", "```\n$a$\n```\n|$b$|"),
        ("```$a$``` and $b$\n$c$", "```$a$``` and |$b$|\n|$c$|"),
        (r"\[ a \\[2pt] \left[ x \] y", r"|\[ a \\[2pt] \left[ x \]| y"),
        (r"\( a \( \(c\\\)", r"\( a \( |\(c\\\)|"),
    ],
)
def test_formulas_are_found_outside_code(text: str, shown: str | None) -> None:
    from hotcold.ui.page.maths import with_formulas, without_marks

    marked = with_formulas(text)
    assert marked.replace("\u2063", "|") == (text if shown is None else shown)
    assert without_marks(marked).replace("< ", "<") == text


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
    from hotcold.ui.page.placement_tab import sentence

    owner = np.zeros((1, 4), np.int16)
    request = PlanRequest("<img src=x>", None, None, 64, "float16", 1, "", "", "")
    for speed in (7.4, "<b>", None):
        said = {"tokens_per_s": speed}
        told = sentence(
            PlacementPlan(request, ("cpu0",), owner, owner[:, 0], 0, make_machine(), said)
        )
        assert "<img" not in told and "<b>" not in told and "&lt;img src=x" in told
        assert ("expects 7 tokens/s" in told) == (speed == 7.4)


def test_each_device_has_its_share() -> None:
    """What a smaller layer lacks is nobody's."""
    from hotcold.ui.page.placement_tab import placement_of, shares_table

    def cells(table: str) -> list[list[str]]:
        rows = table.partition("<tbody>")[2].split("<tr>")[1:]
        return [re.sub(r" style=[^>]*|</?table>", "", row).split("<td>")[1:] for row in rows]

    owner = np.array([[0, 0, 1, -1], [0, 1, 1, 1]], np.int16)
    counts = np.array([[30, 20, 5, 0], [30, 5, 9, 1]])
    assert cells(shares_table(["<b>", "cpu0", "cpu1"], owner, counts)) == [
        ["&lt;b&gt;", "3", "42.9%", "80.0%"],
        ["cpu0", "4", "57.1%", "20.0%"],
        ["cpu1", "0", "0.0%", "0.0%"],
    ]
    assert cells(shares_table(["cpu0"], owner[:, :1], None)) == [["cpu0", "2", "100.0%", "–"]]
    system = SystemConfig(str(DEMO_DIRECTORY), num_cpu_actors=3, num_threads=3)
    config = read_config(DEMO_DIRECTORY)
    dealt = neuron_owners(config, Topology(tuple(service_specs(system, config))))
    told = placement_of(system, config, dealt)
    assert "No plan was made" in told and "counted over" in told
    shown = cells(told)
    assert [row[0] for row in shown] == ["cpu0", "cpu1", "cpu2"]
    assert sum(int(row[1].replace(",", "")) for row in shown) == 4 * config.ffn_size
    assert sum(float(row[3].rstrip("%")) for row in shown) == pytest.approx(100, abs=0.2)


TURNS = [{"role": "user", "content": "really?"}, {"role": "assistant", "content": "yes"}]


class Visited:
    """A chat without a system, and a visitor of it who has conversations."""

    def __init__(self, *names: str) -> None:
        from hotcold.ui.page.chat import Chat

        backend: Any = None  # nobody asks it
        self.chat = Chat(backend, "model", True)
        self.request: Any = SimpleNamespace(session_hash="a", headers={}, client=None)
        self.chat._settings = SimpleNamespace(read=lambda values: ("", None))  # type: ignore
        for part in ("_saved", "_chatbot", "_state", "_rows", "_undo", "_question", "_name"):
            setattr(self.chat, part, part)
        self.kept = [{"id": name, "messages": TURNS} for name in names]
        if names:
            self.history.take_over(self.kept)

    @property
    def history(self) -> ChatHistory:
        return self.chat._history(self.request)

    def do(self, act: Any, shown: str, *given: Any, **event: Any) -> dict[Any, Any]:
        """What is shown at last, once `act` is done on a page that shows a conversation."""

        async def done() -> dict[Any, Any]:
            handle = self.chat._handler(act)
            found = SimpleNamespace(**event)
            views = handle(found, self.request, self.kept, {"id": shown}, *given)
            at_last: dict[Any, Any] = {}
            async for view in views:
                at_last |= view
            return at_last

        return asyncio.run(done())

    def said(self, name: str) -> str:
        found = self.history.find(name)
        assert found is not None
        return found.messages[1].content


def test_a_page_loses_no_conversation_with_its_connection_or_its_server() -> None:
    """The browser keeps what it is told: that must hold what it kept before."""

    def names(saved: list[dict[str, Any]]) -> set[str]:
        return {item["id"] for item in saved}

    def saved(visited: Visited, before: list[Any]) -> list[Any]:
        visited.kept = before
        found: list[Any] = visited.do(lambda visit: None, "")["_saved"]
        return found

    first = Visited("one", "two")
    first.do(lambda visit: visit.history.remove("two"), "one")
    kept = saved(first, first.kept)
    assert names(kept) == {"one"}
    asyncio.run(first.chat._leave(first.request))  # the connection was lost for a moment
    first.history.restore([{"id": "three", "messages": TURNS}])
    kept = saved(first, kept)
    assert names(kept) == {"one", "three"}
    another = Visited()  # the server began anew, and the page stays open
    another.history.restore([{"id": "four", "messages": TURNS}])
    assert names(saved(another, kept)) == {"one", "three", "four"}


def test_an_answer_is_rewritten_where_there_is_room() -> None:
    visited = Visited("one")
    visited.do(visited.chat._edit, "one", index=1, value="no")
    found = visited.history.find("one")
    assert found is not None
    assert [one.content for one in found.messages[0].replies] == ["yes", "no"]
    long = "no" * (1 << 19)
    shown = visited.do(visited.chat._edit, "one", index=1, value=long)
    assert shown["_question"] == long and visited.said("one") == "no"
    assert "too long to keep" in shown["_state"]["text"] and shown["_state"]["state"] == "error"


def test_an_event_that_comes_late_is_of_its_own_conversation() -> None:
    from hotcold.ui.page.chat import _delete, _step

    visited = Visited("one", "two")
    visited.history.show("two")  # after the click, before its event came
    for name, text in (("one", "no"), ("gone", "never")):
        visited.do(visited.chat._edit, name, index=1, value=text)
    assert [visited.said(name) for name in ("one", "two")] == ["no", "yes"]
    for name, index in (("one", 1), ("one", 7), ("gone", 1)):
        visited.do(_step, name, index=index, place=0)
    assert [visited.said(name) for name in ("one", "two")] == ["yes", "yes"]
    assert visited.history.open_id == "two"
    visited.do(_delete, "two", "one")  # the row that is chosen, though not yet shown
    assert visited.history.find("one") is None and visited.history.open_id == "two"


def test_what_is_refused_changes_nothing_and_is_told() -> None:
    from hotcold.ui.page.chat import _import

    def read(values: Any) -> Any:
        raise UsageError("top_p is 7")

    visited = Visited("one")
    visited.history.show("one")
    visited.chat._settings = SimpleNamespace(read=read)  # type: ignore[assignment]
    shown = visited.do(visited.chat._retry, "one", index=0)
    assert shown["_state"]["text"] == "Not done: top_p is 7." and visited.said("one") == "yes"
    assert visited.do(visited.chat._ask, "one", " more? ")["_question"] == "more?"
    for text in ("{", "[" * 100_000):
        assert "not JSON" in visited.do(_import, "one", text=text)["_state"]["text"]
    kept = json.dumps([*visited.kept, {"id": "two", "messages": TURNS}])
    for told in ("1 conversation imported.", "nothing imported"):
        assert told in visited.do(_import, "one", text=kept)["_state"]["text"]


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
