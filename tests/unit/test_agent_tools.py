"""Tools and histories of coding agents on /v1/responses and in chats, read by OpenAI's client.

And tools of 130 MCP servers (`tests/mcp_tools.json`, by server), in the shapes that their
documentation shows, through every route: calls are drawn token by token from those that may come,
with no model, and have to fit the tools' own schemas.
"""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from hotcold.actors.driver.grammars.argument_grammars import argument_rules
from hotcold.actors.driver.grammars.grammar import Callable, Function, calls_grammar
from hotcold.actors.driver.grammars.json_schema import enforced
from hotcold.actors.protocol.messages import TokenEvent
from hotcold.model.text.call_syntax import TAGGED, syntax_of
from hotcold.ui.api.tools.lark_regex import regex_of
from hotcold.ui.api.tools.reader import AnswerReader, InputReader
from hotcold.ui.api.tools.schemas import arguments_of, pattern_of
from tests.documents import ROOT
from tests.unit.ollama_routes import (
    HELLO,
    RESULT,
    Recording,
    create,
    post,
    prompt_of,
    server,
    with_openai,
)
from tests.unit.test_enforced_schemas import drawn, matcher_of, takes_text

# As Codex declares it.
PATCH_GRAMMAR = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = """\
*** Begin Patch
*** Update File: a.py
@@ f():
-    x = "\\n"
+    x = "\U0001f600"
*** End Patch
"""
FORMAT = {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}
APPLY_PATCH: dict[str, Any] = {
    "type": "custom", "name": "apply_patch", "description": "Edits files.", "format": FORMAT,
}  # fmt: skip
LOG = {"type": "function", "name": "log", "parameters": {"type": "object", "properties": {}}}
GIT = {"type": "namespace", "name": "mcp__git", "description": "Of git.", "tools": [LOG]}
TOOLS = [GIT, APPLY_PATCH]
CHAT_LOG = {"type": "function", "function": {"name": "log"}}


def written(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ANSWER = "Well." + written("mcp__git__log", "{}") + written("apply_patch", arguments_of(PATCH))


@pytest.fixture(autouse=True)
def enough_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model's is shorter than these tools."""
    monkeypatch.setattr(server()[0].prompts, "context_length", 1 << 20)


def answering(text: str = ANSWER) -> Recording:
    return Recording(*(TokenEvent(char, None, 1) for char in text), TokenEvent("", RESULT, 1))


def streamed(client: Recording, **fields: Any) -> tuple[list[Any], Any]:
    """The events of a response, and what OpenAI's client makes of them."""

    async def read(one: Any) -> tuple[list[Any], Any]:
        async with one.responses.stream(model="demo", **fields) as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_response()

    found: tuple[list[Any], Any] = with_openai(client, read)
    return found


def test_calls_come_back_in_the_shape_of_their_tools() -> None:
    whole = create(answering(), input="Hello", tools=TOOLS)
    events, final = streamed(answering(), input="Hello", tools=TOOLS)
    for response in (whole, final):
        said, log, patch = response.output
        assert said.content[0].text == "Well."
        assert (log.type, log.namespace, log.name) == ("function_call", "mcp__git", "log")
        assert (log.arguments, log.status) == ("{}", "completed")
        assert (patch.type, patch.name) == ("custom_tool_call", "apply_patch")
        assert patch.input == PATCH and log.call_id != patch.call_id
        assert [tool.type for tool in response.tools] == ["namespace", "custom"]
        assert response.tools[0].tools[0].name == "log"
    told = [event for event in events if "custom_tool_call_input" in event.type]
    *deltas, done = told
    assert {event.type for event in deltas} == {"response.custom_tool_call_input.delta"}
    assert len(deltas) > 50 and "".join(event.delta for event in deltas) == PATCH == done.input
    assert done.type == "response.custom_tool_call_input.done"
    assert {event.item_id for event in told} == {final.output[2].id}
    assert {event.output_index for event in told} == {2}
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert added[1].namespace == "mcp__git" and (added[2].type, added[2].input) == (
        "custom_tool_call", "",
    )  # fmt: skip


def test_a_patch_of_a_chat() -> None:
    custom = {"name": "apply_patch", "format": {"type": "grammar", "grammar": {
        "syntax": "lark", "definition": PATCH_GRAMMAR}}}  # fmt: skip
    body: dict[str, Any] = {
        "model": "demo", "messages": HELLO, "tools": [{"type": "custom", "custom": custom}],
        "tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}},
    }  # fmt: skip
    client = answering(written("apply_patch", arguments_of(PATCH)))

    async def ask(one: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        whole = await one.chat.completions.create(**body)
        chunks = await one.chat.completions.create(**body, stream=True)
        return whole, [chunk async for chunk in chunks]

    whole, chunks = with_openai(client, ask)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "apply_patch", PATCH)
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    told = [call for one in chunks for call in one.choices[0].delta.tool_calls or ()]
    assert (told[0].type, told[0].custom["name"]) == ("custom", "apply_patch")
    assert "".join(one.custom["input"] for one in told) == PATCH
    # The next turn of that chat, and the same of a response.
    said = whole.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    post(client, "/v1/chat/completions", **body | {"messages": [*HELLO, said, result]})
    items = [
        *HELLO,
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ]
    tool = {**APPLY_PATCH, "description": None}
    create(client, input=items, tools=[tool])
    assert prompt_of(client.requests[-1]) == prompt_of(client.requests[-2])
    assert json.dumps(PATCH, ensure_ascii=False) in prompt_of(client.requests[-1])


def test_histories_call_tools_by_their_flat_names() -> None:
    client = answering()
    call = {"type": "function_call", "call_id": "c", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    for named in ({"namespace": "mcp__git", "name": "log"}, {"name": "mcp__git__log"}):
        create(client, input=[*HELLO, call | named, result], tools=TOOLS)
    first, second = map(prompt_of, client.requests)
    assert first == second and first.count("mcp__git__log") == 2  # offered, and called
    assert "Of git." in first and json.dumps(PATCH_GRAMMAR)[1:-1] in first


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fs.read/it", "fs.read/it"), ('a"b\n\u00e9', "a_b__"), ("", "_"), ("x" * 500, "x" * 128),
    ],
)  # fmt: skip
def test_a_session_goes_on_whatever_another_model_called(name: str, told: str) -> None:
    """No tool may have such a name; calls of it are read so that they can be written."""
    client = answering()
    items = [{"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"},
             {"type": "custom_tool_call", "call_id": "d", "name": name, "input": "x"}]  # fmt: skip
    create(client, input=[*HELLO, *items], tools=TOOLS)
    calls = [
        {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}},
        {"id": "d", "type": "custom", "custom": {"name": name, "input": "x"}},
    ]
    talk = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    assert post(client, "/v1/chat/completions", messages=talk, tools=[CHAT_LOG]).status_code == 200
    functions = [{"function": {"name": name, "arguments": {}}}]
    talk = [*HELLO, {"role": "assistant", "content": "", "tool_calls": functions}]
    assert post(client, "/api/chat", messages=talk, tools=[CHAT_LOG]).status_code == 200
    for prompt, number in zip(map(prompt_of, client.requests), (2, 2, 1), strict=True):
        assert prompt.count(f'<tool_call>\n{{"name": "{told}", "arguments"') == number


CHOSEN: list[tuple[dict[str, Any], str]] = [
    ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
    ({"type": "function", "name": "log"}, "mcp__git__log"),
    ({"type": "function", "name": "mcp__git__log"}, "mcp__git__log"),
    ({"type": "function", "name": "log", "namespace": "mcp__git"}, "mcp__git__log"),
]


@pytest.mark.parametrize(("choice", "name"), CHOSEN)
def test_a_tool_is_chosen_by_either_name(choice: dict[str, Any], name: str) -> None:
    other = {**choice, "name": "log", "namespace": "other"}
    client = answering(written(name, "{}"))
    create(client, input="Hello", tools=TOOLS, tool_choice=choice)
    grammar = client.requests[0].grammar
    assert grammar is not None and "head" not in grammar.text
    assert re.findall(r'"name\\"[^"]*"(\w+)', grammar.text) == [name]
    with pytest.raises(openai.BadRequestError, match="is no tool"):
        create(answering(), input="Hello", tools=TOOLS, tool_choice=other)


GRAMMARS = [
    PATCH_GRAMMAR,
    'start: "x"+',
    'start: ["a" "b"]~1..3 "c" ["d"]+',
    'start: A~2..3 ["b"i] // ends\nA: /[a\\/]/i | "0".."9"\n',
    '?start: pair ("," pair)* | "[]"\n!pair: NAME "=" (INT | ESCAPED_STRING)\nNAME: /[a-c]+/\n'
    "%import common.INT\n%import common.ESCAPED_STRING",
    'start: a?\n?a: "(" b ")"\n?b: "\\u00e9\\n.*[" | "]"',
]


@pytest.mark.parametrize("grammar", GRAMMARS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_grammar_without_recursion_is_one_regex(grammar: str, data: st.DataObject) -> None:
    """It matches what llguidance takes by the grammar, and nothing else."""
    pattern = regex_of(grammar)
    assert pattern is not None
    text = data.draw(st.from_regex(pattern, fullmatch=True))
    assert takes_text(grammar, text)
    at = data.draw(st.integers(0, len(text)))
    for changed in (text[:at] + text[at + 1 :], text[:at] + "+" + text[at:]):
        assert takes_text(grammar, changed) == bool(re.fullmatch(pattern, changed))


@pytest.mark.parametrize(
    "grammar",
    ['start: "(" start? ")"', "start: x", "", "start: (", '%ignore " "\nstart: "a"', "start: @",
     'start: %json {"type": "object"}', 'start: "a"~2..', "start: " + "(" * 100_000,
     "start: " + "a " * 3000 + "\na: " + '"b"' * 3000, 'start: "a"\n' + "// \n" * (1 << 15)],
)  # fmt: skip
def test_other_grammars_hold_nothing(grammar: str) -> None:
    """The input is any text then, and the request is answered."""
    assert pattern_of("lark", grammar) is None
    tool = {**APPLY_PATCH, "format": {**FORMAT, "definition": grammar}}
    client = answering(written("apply_patch", '{"input": "any"}'))
    (call,) = create(client, input="Hello", tools=[tool]).output
    assert call.input == "any"


@pytest.mark.parametrize("uses", ["a " * 2000, "a | " * 2000 + "a"])
def test_a_grammar_of_long_rules_costs_no_more_than_its_own_length(uses: str) -> None:
    grammar = f"start: {uses}\na: /{'x' * 4900}/"
    tracemalloc.start()
    try:
        assert regex_of(grammar) is None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_an_answer_is_held_to_the_tools_grammar() -> None:
    client = answering()
    create(client, input="Hello", tools=[APPLY_PATCH], tool_choice="required")
    grammar = client.requests[0].grammar
    assert grammar is not None
    for text in (PATCH, PATCH.removesuffix("\n")):
        assert takes_text(grammar.text, written("apply_patch", arguments_of(text)))
    for text in ("", PATCH[1:], PATCH.replace("+", "*"), PATCH + "x"):
        assert not takes_text(grammar.text, written("apply_patch", arguments_of(text)))


@given(st.text(), st.booleans(), st.lists(st.integers(0, 200), max_size=6))
def test_an_input_comes_in_any_pieces(text: str, is_ascii: bool, cuts: list[int]) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=is_ascii)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    reader = InputReader()
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    assert "".join(map(reader.push, pieces)) == text


@pytest.mark.parametrize("half", ["\\udc00", "\\ud800", "\\ud800\\u0061", "\\ud800\\n"])
def test_half_a_pair_of_surrogates_is_no_character(half: str) -> None:
    """Nothing could send it on; what follows it is read."""
    reader = InputReader()
    text = "".join(map(reader.push, f'{{"input": "a{half}b"}}'))
    assert text.encode() and "\ufffd" in text and text[0] == "a" and text[-1] == "b"


SERVERS: dict[str, list[dict[str, Any]]] = json.loads(
    (ROOT / "tests/mcp_tools.json").read_text(encoding="utf-8")
)
ALL = [tool for tools in SERVERS.values() for tool in tools]
# What an answer is not held to, of all these tools.
NOT_ENFORCED = {
    "dependencies": 1, "dependentRequired": 1, "format": 10, "if": 1, "pattern": 4,
    "propertyNames": 3, "required": 3, "then": 1, "uniqueItems": 13,
}  # fmt: skip


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
    reader = AnswerReader(TAGGED)
    list(reader.push(TokenEvent(text, RESULT)))
    (called,) = reader.calls
    return called.name, json.loads(called.arguments)


def validator(tool: dict[str, Any], lost: tuple[str, ...] | None = None) -> Any:
    if lost is None:
        lost = enforced(tool["parameters"], is_object=True).lost
    schema = enforceable(tool["parameters"], tuple(lost))
    is_draft_4 = re.search('"exclusive(Min|Max)imum": (true|false)', json.dumps(schema))
    found = jsonschema.Draft4Validator if is_draft_4 else jsonschema.Draft202012Validator
    return found(schema)


def test_a_call_of_each_tool_fits_its_own_schema() -> None:
    rng = np.random.default_rng(1)
    num_whole, lost = 0, Counter[str]()
    for number, tool in enumerate(ALL):
        lost.update(enforced(tool["parameters"], is_object=True).lost)
        if number % 3:
            continue
        wanted = Callable(
            [Function(tool["name"], tool["parameters"])], is_required=True, may_be_several=False
        )
        if (call := call_of(calls_grammar(wanted, TAGGED, None).text, rng)) is not None:
            num_whole += 1
            assert call[0] == tool["name"]
            validator(tool).validate(call[1])
    assert num_whole > 0.3 * len(ALL)
    assert lost == NOT_ENFORCED


# Mixed forms of arguments: between tags, Gemma 4's, Python's.
@pytest.mark.parametrize(
    "template",
    ["<tool_call> <function= <parameter=", "<|tool_call>call:", "<|tool_call_start|>"],
)
def test_calls_without_json_fit_as_well(template: str) -> None:
    rng, syntax, num_whole = np.random.default_rng(1), syntax_of(template), 0
    assert syntax is not None
    for tool in ALL[::7]:
        parameters = tool["parameters"]
        wanted = Callable([Function(tool["name"], parameters)], True, False)
        grammar = LLMatcher.grammar_from_lark(calls_grammar(wanted, syntax, None).text)
        if (text := drawn(matcher_of(grammar), rng)) is None:
            continue
        reader = AnswerReader(syntax, {tool["name"]: parameters})
        list(reader.push(TokenEvent(text, RESULT)))
        (called,) = reader.calls
        validator(tool, tuple(argument_rules(syntax.form, parameters)[1])).validate(
            json.loads(called.arguments)
        )
        num_whole += 1
    assert num_whole > 8


def test_an_object_that_is_open_is_so_in_gemmas_form() -> None:
    """As a database's filter is declared, whose members nobody lists."""
    is_open: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": {}}
    is_closed = is_open | {"additionalProperties": False}
    parameters = {"type": "object", "properties": {"filter": is_open, "sort": is_closed}}
    syntax = syntax_of("<|tool_call>call:")
    assert syntax is not None
    grammar = calls_grammar(Callable([Function("find", parameters)], True, False), syntax, None)
    for arguments in ("filter:{a:1,b:true}", "sort:{}", "sort:{a:1}"):
        call = f"<|tool_call>call:find{{{arguments}}}<tool_call|>"
        assert takes_text(grammar.text, call) == (arguments != "sort:{a:1}")


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
