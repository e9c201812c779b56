"""Tools that a model may call: how prompts describe them, and how the model writes a call.

Tools are objects of OpenAI's API: {"type": "function", "function": {"name", "description",
"parameters"}}. A template that knows tools gets them as `tools`. For others the system message
describes them, and calls and their results are text of the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

Tools = Sequence[dict[str, Any]]


class CallSyntax(NamedTuple):
    """How a model writes a call: begin, {"name": NAME, ARGUMENTS: {...}}, end.

    White space may stand between all of these, and within the braces.
    """

    begin: str  # what only calls hold, before a brace; empty: a call is the whole answer
    end: str
    arguments: str  # the key


# Hermes, Qwen 2.5 and 3, SmolLM; and what `described_in_system_prompt` asks for.
TAGGED = CallSyntax("<tool_call>", "</tool_call>", "arguments")
# Llama 3.
BARE = CallSyntax("", "", "parameters")

# Texts that a template holds -> the syntax that it teaches.
_TAUGHT = {
    ("<tool_call>", '"arguments"'): TAGGED,
    ('{"name": function name, "parameters": dictionary',): BARE,
}
# A template that holds one of these teaches another syntax.
_OTHERS = ("<function=", "<|tool_call", "<tool_calls")

_SYSTEM_PROMPT = """\
You may call functions to help with what the user asks. You are given them as JSON within <tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and its arguments within <tool_call>:
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>"""


def described(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool with every key that a chat template may read."""
    function = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def syntax_of(template: str, knows_tools: bool) -> CallSyntax | None:
    """Return the syntax that a template teaches; None where the system prompt must teach it."""
    if not knows_tools or any(text in template for text in _OTHERS):
        return None
    for texts, syntax in _TAUGHT.items():
        if all(text in template for text in texts):
            return syntax
    return None


def described_in_system_prompt(
    messages: Sequence[dict[str, Any]], tools: Tools
) -> list[dict[str, Any]]:
    """Return the conversation for a template that knows no tools, in system, user, assistant."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _SYSTEM_PROMPT.format(tools=described)
    plain = in_words(messages, TAGGED)
    if plain and plain[0]["role"] == "system":
        text = f"{plain[0]['content']}\n\n{text}"
        del plain[0]
    return [{"role": "system", "content": text}, *plain]


def in_words(messages: Sequence[dict[str, Any]], syntax: CallSyntax) -> list[dict[str, Any]]:
    """Return the conversation with its calls and their results as text."""
    return _joined([_plain_message(message, syntax) for message in messages])


def _plain_message(message: dict[str, Any], syntax: CallSyntax) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{syntax.begin}\n{_written(call['function'], syntax.arguments)}\n{syntax.end}".strip()
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": "\n".join(filter(None, [content, *calls]))}


def _written(function: dict[str, Any], key: str) -> str:
    """A call as the model writes it; arguments that are whole JSON text stay as they are."""
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    try:
        is_json = isinstance(arguments, str) and json.loads(arguments) is not None
    except (ValueError, RecursionError):
        is_json = False
    text = arguments if is_json else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {name}, "{key}": {text}}}'


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
