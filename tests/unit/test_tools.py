"""Tools: described by templates or the system prompt, held to schemas, read from answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hotcold.actors.driver.grammars.grammar import calls_grammar
from hotcold.chats import template_messages
from hotcold.model.errors import PromptError
from hotcold.model.text.call_syntax import BARE, TAGGED, CallSyntax
from hotcold.model.text.chat_template import ChatTemplate
from hotcold.ui.api.responses.conversation import as_chat
from hotcold.ui.api.responses.schemas import ResponsesRequest
from hotcold.ui.api.schemas import ChatRequest, parse
from tests.unit.test_enforced_schemas import takes_text

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": CALL}]},
    {"role": "tool", "content": "20 °C", "tool_call_id": "c1"},
]  # fmt: skip
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HERMES = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    'Write <tool_call>\n{"name": N, "arguments": A}\n</tool_call>{% endif %}'
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
LLAMA = (
    "{% if tools is not none %}Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}'
    + PLAIN
)
OTHER = "{% if tools %}<tool_call>\n<function=name>{% endif %}" + PLAIN
BOTH = OTHER.replace("tool_call>", 'tool_call>"arguments"')
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN


def _template(text: str) -> ChatTemplate:
    return ChatTemplate(text, "a template", {})


@pytest.mark.parametrize(
    ("template", "syntax"),
    [(PLAIN, TAGGED), (HERMES, TAGGED), (LLAMA, BARE), (OTHER, TAGGED), (NO_SYSTEM, TAGGED)],
)
def test_how_calls_are_written_is_the_templates_choice(template: str, syntax: CallSyntax) -> None:
    assert _template(template).call_syntax == syntax


def test_a_template_that_knows_tools_gets_them() -> None:
    text = _template(HERMES).render(TALK, tools=TOOLS)
    assert text.count(json.dumps(WEATHER)) == 1 and "<tool>20 °C" in text
    assert '<assistant><tool_call>{"city": "Paris"}' in text
    assert "You may call functions" not in text
    assert "Write" not in _template(HERMES).render(TALK[:2])


@pytest.mark.parametrize("template", [PLAIN, OTHER, BOTH])
def test_other_templates_get_tools_in_the_system_prompt(template: str) -> None:
    text = _template(template).render(TALK, tools=TOOLS)
    system, user, assistant, result = text.split("<system>")[1].replace(
        "<user>", "\0").replace("<assistant>", "\0").split("\0")  # fmt: skip
    assert system.startswith("Be brief.\n\nYou may call functions")
    assert all(json.dumps(tool["function"]) in system for tool in TOOLS)
    assert user == "How is Paris?"
    assert assistant == f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    assert result == "<tool_response>\n20 °C\n</tool_response>"
    assert _template(PLAIN).render(TALK[:2]) == "<system>Be brief.<user>How is Paris?"


def test_where_there_is_no_system_message_the_user_tells() -> None:
    text = _template(NO_SYSTEM).render(TALK, tools=TOOLS)
    assert text.startswith("<user>Be brief.\n\nYou may call") and "\nHow is Paris?<a" in text
    with pytest.raises(PromptError, match="refuses"):
        _template("{{ raise_exception('never') }}").render(TALK, tools=TOOLS)


def _request(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS} | fields
    return parse(ChatRequest, json.dumps(body).encode())


WRITTEN = '{"a":1e5,  "b": 1.0, "c": 1152921504606846976, "d": "\\u00e9é", "e": 0.10}'
QWEN = HERMES.replace("{{ c.function.arguments | tojson }}", (
    "{% set c = c.function %}{% if c.arguments is string %}{{ c.arguments }}{% else %}"
    "{{ c.arguments | tojson }}{% endif %}"))  # fmt: skip


@pytest.mark.parametrize("template", [QWEN, PLAIN])
def test_arguments_stay_the_text_that_they_were(template: str) -> None:
    """Where the template prints text, or where calls are told in words."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": WRITTEN}}
    message = _request(messages=[{"role": "assistant", "tool_calls": [call]}]).messages[0]
    (told,) = template_messages([{"role": "assistant", "tool_calls": [call]}])
    for one in (message.for_template, told):
        assert WRITTEN in _template(template).render([one], tools=TOOLS)
    items = [{"type": "function_call", "call_id": "1", "name": "now", "arguments": WRITTEN}]
    body = ResponsesRequest.model_validate({"input": items})
    chat = as_chat(body, body.items, {})
    asked = [one.for_template for one in chat.messages]
    assert WRITTEN in _template(template).render(asked, tools=TOOLS)


PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BARE_PARIS = '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}'
SHAPE = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("syntax", "fields", "taken", "refused"),
    [
        (
            TAGGED, {},
            ["", "hello", PARIS, f"I look.\n{PARIS}\n{NOW}", f"{NOW}done", "a <tool_call> b {"],
            [PARIS.replace("weather", "wether"), PARIS.replace('"Paris"', "1"), PARIS[:-3],
             PARIS.replace("city", "town"), NOW.replace("{}", '{"a": 1}'), f"x{NOW[:30]}"],
        ),
        (TAGGED, {"parallel_tool_calls": False}, ["x", f"x {NOW}"], [NOW + NOW, NOW + "x"]),
        (TAGGED, {"tool_choice": "required"}, [PARIS, f"{PARIS}\n{NOW}"], ["", "x", f"x{NOW}"]),
        (
            TAGGED, {"tool_choice": {"type": "function", "function": {"name": "now"}}},
            [NOW], [PARIS, f"{NOW}\n{NOW}", ""],
        ),
        (TAGGED, {"response_format": SHAPE}, ["7", PARIS], ["x", f"7{NOW}", "7.5"]),
        (BARE, {}, ["", "hello {", BARE_PARIS], ["{}", BARE_PARIS + "x", BARE_PARIS[:-1]]),
        (BARE, {"tool_choice": "required"}, [BARE_PARIS], ["hello", ""]),
    ],
)  # fmt: skip
def test_answers_are_held_to_the_grammar(
    syntax: CallSyntax, fields: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    request = _request(**fields)
    assert request.callable is not None
    shape = json.dumps({"type": "integer"}) if "response_format" in fields else None
    grammar = calls_grammar(request.callable, syntax, shape).text
    assert {text: takes_text(grammar, text) for text in [*taken, *refused]} == {
        **dict.fromkeys(taken, True), **dict.fromkeys(refused, False)
    }  # fmt: skip
