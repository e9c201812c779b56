"""Tools of 130 MCP servers, in the shapes that their documentation shows, through every route.

`tests/mcp_tools.json` has them by server. Calls are drawn token by token from those that may come,
with no model, and have to fit the tools' own schemas.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from hotcold.model.text.tools import TAGGED
from hotcold.ui.api.tools.grammar import Callable, Function, calls_grammar
from hotcold.ui.api.tools.json_schema import enforced
from hotcold.ui.api.tools.reader import ArgumentsPart, CallPart, CallReader
from tests.documents import ROOT
from tests.unit.ollama_routes import HELLO, Recording, post, server
from tests.unit.test_enforced_schemas import drawn, matcher_of

SERVERS: dict[str, list[dict[str, Any]]] = json.loads(
    (ROOT / "tests/mcp_tools.json").read_text(encoding="utf-8")
)
ALL = [tool for tools in SERVERS.values() for tool in tools]
# What an answer is not held to, of all these tools.
NOT_ENFORCED = {
    "dependencies": 1, "dependentRequired": 1, "format": 10, "if": 1, "pattern": 4,
    "propertyNames": 3, "required": 3, "then": 1, "uniqueItems": 13,
}  # fmt: skip


@pytest.fixture(autouse=True)
def enough_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model's is shorter than many of these lists."""
    monkeypatch.setattr(server()[0].prompts, "context_length", 1 << 20)


def as_chat(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": tool} for tool in tools]


def grammar_of(path: str, **body: Any) -> str:
    """What the answer to a request is held to; the request is not refused."""
    client = Recording()
    answer = post(client, path, **body)
    assert answer.status_code == 200, answer.text
    ((grammar,),) = [[request.grammar for request in client.requests]]
    assert grammar is not None and grammar.kind == "calls"
    return grammar.text


def test_no_list_of_tools_is_refused() -> None:
    """All servers' at once, by every route; a request may have 1,024 tools."""
    assert len(SERVERS) >= 100
    unique = list({tool["name"]: tool for tool in ALL}.values())
    for tools in (unique[:128], unique[-128:]):
        chat = grammar_of("/v1/chat/completions", messages=HELLO, tools=as_chat(tools))
        functions = [{"type": "function", **tool} for tool in tools]
        assert grammar_of("/v1/responses", input="Hello", tools=functions) == chat
        ollama = {"messages": HELLO, "tools": as_chat(tools), "stream": False}
        assert grammar_of("/api/chat", **ollama) == chat
        matcher_of(LLMatcher.grammar_from_lark(chat))


def enforceable(schema: Any, lost: tuple[str, ...]) -> Any:
    """A schema without what is lost, wherever it stands."""
    if isinstance(schema, list):
        return [enforceable(one, lost) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        "anyOf" if key == "oneOf" else key: {} if key == "properties" and one == [] else one
        for key, one in schema.items()
        if key not in lost or key == "oneOf" or (isinstance(one, dict | str) and key == "format")
    }
    return {key: enforceable(one, lost) for key, one in kept.items()}


def call_of(grammar: str, rng: np.random.Generator) -> tuple[str, Any] | None:
    """The name and the arguments of a call that was drawn; None for one without end."""
    text = drawn(matcher_of(LLMatcher.grammar_from_lark(grammar)), rng)
    if text is None:
        return None
    called, *argued = CallReader(TAGGED).push(text, is_last=True)
    assert isinstance(called, CallPart)
    arguments = "".join(part.text for part in argued if isinstance(part, ArgumentsPart))
    return called.name, json.loads(arguments)


def validator(tool: dict[str, Any]) -> Any:
    schema = enforceable(tool["parameters"], enforced(tool["parameters"], is_object=True).lost)
    is_draft_4 = re.search('"exclusive(Min|Max)imum": (true|false)', json.dumps(schema))
    found = jsonschema.Draft4Validator if is_draft_4 else jsonschema.Draft202012Validator
    return found(schema)


def test_a_call_of_each_tool_fits_its_own_schema() -> None:
    rng = np.random.default_rng(1)
    num_whole, lost = 0, Counter[str]()
    for tool in ALL:
        lost.update(enforced(tool["parameters"], is_object=True).lost)
        wanted = Callable(
            [Function(tool["name"], tool["parameters"])], is_required=True, may_be_several=False
        )
        if (call := call_of(calls_grammar(wanted, TAGGED, None).text, rng)) is not None:
            num_whole += 1
            assert call[0] == tool["name"]
            validator(tool).validate(call[1])
    assert num_whole > 0.9 * len(ALL)
    assert lost == NOT_ENFORCED


def test_strict_tools_are_refused_by_name_and_keyword() -> None:
    refused = 0
    for tool in ALL:
        lost = enforced(tool["parameters"], is_object=True).lost
        body = {"messages": HELLO, "tools": as_chat([{**tool, "strict": True}])}
        if lost and (refused := refused + 1) <= 20:
            answer = post(Recording(), "/v1/chat/completions", **body)
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert f"the tool '{tool['name']}'" in message and lost[0] in message
            assert "Lark" not in message
    assert refused > 10
