"""Every kind of item and tool that OpenAI's client knows, as /v1/responses takes it."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from openai.types.responses import response_create_params, response_input_item_param, tool_param

from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.responses.schemas import ResponsesRequest
from hotcold.ui.api.schemas import ChatRequest, parse

HELLO = {"role": "user", "content": "Hello"}
LOOK_UP = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
PATCH = {"type": "update_file", "path": "a.py", "diff": "+x"}


def kinds(union: Any) -> set[str]:
    """The types of a union's members, as OpenAI's client declares them."""
    found: set[str] = set()
    for member in typing.get_args(union):
        kind = typing.get_type_hints(member)["type"]
        for literal in (kind, *typing.get_args(kind)):
            found |= {name for name in typing.get_args(literal) if isinstance(name, str)}
    return found


ITEM_KINDS = kinds(response_input_item_param.ResponseInputItemParam)
TOOL_KINDS = kinds(tool_param.ToolParam)
CHOICES = [
    one for one in typing.get_args(response_create_params.ToolChoice) if hasattr(one, "__mro__")
]


def as_chat(**fields: Any) -> ChatRequest:
    return parse(ResponsesRequest, json.dumps({"input": "Hello", **fields}).encode()).as_chat()


def refused(**fields: Any) -> str:
    with pytest.raises(ApiError) as error:
        as_chat(**fields)
    assert error.value.status == 400
    return error.value.message


def told(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [one.for_template for one in as_chat(input=[HELLO, *items]).messages][1:]


def called(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def gave(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "c"}


# A whole item of each kind, and what it becomes.
TAKEN: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "reasoning": ({"id": "r", "summary": [], "encrypted_content": "x"}, []),
    "web_search_call": ({"id": "w", "status": "completed", "action": {"type": "search"}}, []),
    "mcp_list_tools": ({"id": "m", "server_label": "s", "tools": []}, []),
    "function_call": (
        {"call_id": "c", "name": "f", "arguments": '{"a": 1}'}, [called("f", {"a": 1})],
    ),
    "function_call_output": ({"call_id": "c", "output": "1"}, [gave("1")]),
    "custom_tool_call": (
        {"call_id": "c", "name": "f", "input": "x"}, [called("f", {"input": "x"})],
    ),
    "custom_tool_call_output": (
        {"call_id": "c", "output": [{"type": "input_text", "text": "1"}]}, [gave("1")],
    ),
    "mcp_call": (
        {"id": "c", "name": "f", "arguments": "{}", "server_label": "s", "output": "1"},
        [called("f", {}), gave("1")],
    ),
    "local_shell_call": (
        {"id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        [called("local_shell", {"type": "exec", "command": ["ls"]})],
    ),
    "local_shell_call_output": ({"id": "c", "output": "1"}, [gave("1")]),
    "shell_call": (
        {"call_id": "c", "action": {"commands": ["ls"]}}, [called("shell", {"commands": ["ls"]})],
    ),
    "shell_call_output": (
        {"call_id": "c", "output": [{"stdout": "1", "stderr": ""}]},
        [gave('[{"stdout": "1", "stderr": ""}]')],
    ),
    "apply_patch_call": ({"call_id": "c", "operation": PATCH}, [called("apply_patch", PATCH)]),
    "apply_patch_call_output": ({"call_id": "c", "status": "completed"}, [gave("")]),
    "code_interpreter_call": (
        {"id": "c", "code": "1", "container_id": "x", "outputs": [{"type": "logs", "logs": "1"}]},
        [called("code_interpreter", {"code": "1"}), gave('[{"type": "logs", "logs": "1"}]')],
    ),
    "file_search_call": (
        {"id": "c", "queries": ["q"], "results": [{"text": "1"}]},
        [called("file_search", {"queries": ["q"]}), gave("1")],
    ),
    "computer_call": ({"call_id": "c", "action": {"a": 1}}, [called("computer", {"a": 1})]),
    "computer_call_output": (
        {"call_id": "c", "output": {"type": "computer_screenshot", "image_url": "data:"}},
        [gave("[image left out]")],
    ),
    "tool_search_call": (
        {"call_id": "c", "execution": "client", "arguments": {"query": "git"}},
        [called("tool_search", {"query": "git"})],
    ),
    "tool_search_output": (
        {"call_id": "c", "tools": [{"type": "namespace", "name": "n", "tools": [LOOK_UP]}]},
        [gave("n__look_up")],
    ),
    "image_generation_call": (
        {"id": "c", "result": "aGk="}, [{"role": "assistant", "content": "[image left out]"}],
    ),
    "compaction": (
        {"id": "c", "encrypted_content": "x"},
        [{"role": "user", "content": "[earlier conversation left out]"}],
    ),
    "message": (
        {"role": "assistant", "content": [
            {"type": "output_text", "text": "a", "annotations": []},
            {"type": "refusal", "refusal": "b"}]},
        [{"role": "assistant", "content": "ab"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted({*ITEM_KINDS, "of next year"} - {"item_reference"}))
def test_a_session_goes_on_after_items_of_every_kind(kind: str) -> None:
    """What nobody here knows, and what another model thought in secret, is passed over."""
    assert len(ITEM_KINDS) > 15
    fields, expected = TAKEN.get(kind, ({"id": "x", "call_id": "x", "action": {}}, []))
    assert told({"type": kind, **fields}) == expected


def test_results_that_nobody_kept_are_passed_over() -> None:
    assert told({"type": "mcp_call", "id": "c", "name": "f", "arguments": "{}"}) == []
    failed = {"type": "mcp_call", "id": "c", "name": "f", "arguments": "{}", "error": "no"}
    assert told(failed) == [called("f", {}), gave("no")]


def test_a_namespace_of_another_type_is_its_text() -> None:
    item = {"type": "custom_tool_call", "call_id": "c", "namespace": 5, "name": "f", "input": "x"}
    assert told(item) == [called("5__f", {"input": "x"})]


def test_what_another_agent_says_is_read() -> None:
    """Codex tells an agent its task so; what is encrypted there, and in results, is named."""
    secret = {"type": "encrypted_content", "encrypted_content": "x"}
    task = [{"type": "input_text", "text": "Find it."}, secret]
    said = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": task}
    words = "Find it.\n[encrypted text left out]"
    assert told(said) == [{"role": "user", "content": words}]
    for kind in ("function_call_output", "custom_tool_call_output"):
        assert told({"type": kind, "call_id": "c", "output": task}) == [gave(words)]


def test_calls_of_one_answer_stay_together() -> None:
    (message,) = told(
        {"type": "message", "role": "assistant", "content": "Well."},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": ""},
    )
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]


@pytest.mark.parametrize("kind", sorted(TOOL_KINDS - {"function", "custom", "namespace"}))
def test_tools_that_nobody_runs_here_are_left_out(kind: str) -> None:
    assert len(TOOL_KINDS) > 6
    foreign = {"type": kind, "name": "x", "server_label": "y"}
    chat = as_chat(tools=[foreign, LOOK_UP])
    assert [tool.function.name for tool in chat.tools or ()] == ["look_up"]
    assert as_chat(tools=[foreign]).callable is None
    assert "no function among the tools" in refused(tools=[foreign], tool_choice="required")


@pytest.mark.parametrize("choice", CHOICES, ids=lambda one: one.__name__)
def test_a_choice_of_each_kind(choice: Any) -> None:
    hints = typing.get_type_hints(choice)
    for kind in typing.get_args(hints["type"]):
        fields: dict[str, Any] = {"type": kind, "name": "look_up", "server_label": "y"}
        if kind == "allowed_tools":
            fields |= {"mode": "required", "tools": [{"type": "function", "name": "look_up"}]}
        tool = LOOK_UP | ({"type": kind} if kind == "custom" else {})
        if kind in ("allowed_tools", "function", "custom"):
            wanted = as_chat(tools=[tool, {**LOOK_UP, "name": "b"}], tool_choice=fields).callable
            assert wanted is not None and wanted.is_required
            assert [function.name for function in wanted.functions] == ["look_up"]
        else:
            assert f"asks for '{kind}'" in refused(tools=[LOOK_UP], tool_choice=fields)


def test_a_namespace_within_another_is_refused_in_words() -> None:
    inner = {"type": "namespace", "name": "b", "tools": []}
    told = refused(tools=[{**inner, "tools": [inner]}])
    assert told == "tools.0.tools.0 is of a type that may not be here"


def test_a_function_says_whether_it_is_strict() -> None:
    chat = as_chat(tools=[{**LOOK_UP, "strict": True}, {**LOOK_UP, "name": "b"}])
    assert [tool.function.strict for tool in chat.tools or ()] == [True, None]
    shape = {"type": "json_schema", "name": "x", "schema": {}, "strict": True}
    assert as_chat(text={"format": shape}).is_schema_strict is True


def test_of_the_allowed_tools_those_that_nobody_runs_here_are_none() -> None:
    only: dict[str, Any] = {"type": "allowed_tools", "tools": [{"type": "web_search"}]}
    assert as_chat(tools=[LOOK_UP], tool_choice={**only, "mode": "auto"}).callable is None
    told = refused(tools=[LOOK_UP], tool_choice={**only, "mode": "required"})
    assert "no function among the tools" in told


def test_a_chat_may_allow_some_of_its_tools() -> None:
    functions: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": name}} for name in ("a", "b")
    ]

    def chat(mode: str, *names: str) -> ChatRequest:
        allowed = [one for one in functions if one["function"]["name"] in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        body = {"messages": [HELLO], "tools": functions, "tool_choice": choice}
        return parse(ChatRequest, json.dumps(body).encode())

    for mode, is_required in (("auto", False), ("required", True)):
        wanted = chat(mode, "b")
        assert wanted.callable is not None and wanted.callable.is_required is is_required
        assert [function.name for function in wanted.callable.functions] == ["b"]
        assert [tool.function.name for tool in wanted.all_tools] == ["a", "b"]
    with pytest.raises(ApiError, match="allows none of the tools"):
        chat("auto")


def test_a_part_that_declines_is_text_in_chats() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    body = {"messages": [HELLO, {"role": "assistant", "content": parts}]}
    message = parse(ChatRequest, json.dumps(body).encode()).messages[1]
    assert message.for_template == {"role": "assistant", "content": "ab"}
