"""Tools that a model may call: how prompts describe them, and how the model writes a call.

Tools are objects of OpenAI's API: {"type": "function", "function": {"name", "description",
"parameters"}}. A template that knows tools gets them as `tools`. For others the system message
describes them, and calls and their results are text of the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hotcold.model.text.call_syntax import TAGGED, CallSyntax

Tools = Sequence[dict[str, Any]]

_SYSTEM_PROMPT = """\
You may call functions to help with what the user asks. You are given them as JSON within <tools>:
<tools>
{tools}
</tools>
For each call write {what}:
{example}"""
_TAGGED = "a JSON object with the function's name and its arguments within <tool_call>"
_OTHER = "the function's name and its arguments in exactly this form"


def described(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool with every key that a chat template may read."""
    function = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def described_in_system_prompt(
    messages: Sequence[dict[str, Any]], tools: Tools, syntax: CallSyntax | None = None
) -> list[dict[str, Any]]:
    """Return the conversation for a template that does not say what tools there are.

    `syntax`: in which it renders calls, which stay as they are; None: all becomes text.
    """
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    if syntax is None:
        told, what, example = in_words(messages, TAGGED), _TAGGED, TAGGED.text([("NAME", "{...}")])
        example = example.replace('"NAME"', "NAME").replace('"{...}"', "{...}")
    else:
        told, what, example = list(messages), _OTHER, syntax.text([("NAME", {"KEY": "VALUE"})])
    text = _SYSTEM_PROMPT.format(tools=described, what=what, example=example)
    if told and told[0]["role"] == "system":
        text = f"{told[0]['content']}\n\n{text}"
        del told[0]
    return [{"role": "system", "content": text}, *told]


def calls_in_words(message: dict[str, Any], syntax: CallSyntax) -> dict[str, Any]:
    """The message with its calls as text, as a model writes them."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if not functions:
        return message
    text = syntax.text([(one["name"], one["arguments"]) for one in functions])
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, [message.get("content"), text]))}


def in_words(messages: Sequence[dict[str, Any]], syntax: CallSyntax) -> list[dict[str, Any]]:
    """Return the conversation with its calls and their results as text."""
    return _joined([_plain_message(message, syntax) for message in messages])


def _plain_message(message: dict[str, Any], syntax: CallSyntax) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    told = calls_in_words(message, TAGGED if syntax.has_channels else syntax)
    return {"role": message["role"], "content": told.get("content") or ""}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive messages of one role, which many templates refuse."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            content = f"{joined[-1]['content']}\n{message['content']}"
            joined[-1] = {"role": message["role"], "content": content}
        else:
            joined.append(message)
    return joined
