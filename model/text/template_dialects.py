"""What chat templates call the same things: thoughts of the history, switches for new ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotcold.model.text.channels import THOUGHTS, split_readable

Message = dict[str, Any]

# Of a message: the names of its thoughts, beside reasoning_content.
_THOUGHTS = {
    name: re.compile(rf"\w\.{name}\b|['\"]{name}['\"]")
    for name in ("thinking", "reasoning", "tool_plan")
}
# A template that holds it wants thoughts as a part of the content: Magistral, Ministral 3.
_AS_PART = re.compile(r"\[['\"]type['\"]\]\s*==\s*['\"]thinking['\"]")
_NO_THINK = "/no_think"  # Nemotron Nano 2
# A template that holds it has one call in a message, whose result names no call: gpt-oss.
_ONE_CALL = "tool_calls[0]"
# Variables that turn thoughts on and off: their values where they are on, and where they are off,
# and what a template that reads them so matches. None: no value says that.
_SWITCHES: tuple[tuple[str, Any, Any, re.Pattern[str]], ...] = (
    ("enable_thinking", True, False, re.compile(r"\benable_thinking\b")),
    ("thinking", True, False, re.compile(r"\bthinking\b")),
    ("reasoning", True, False, re.compile(r"\breasoning is not undefined")),
    ("thinking_mode", "enabled", "disabled", re.compile(r"\bthinking_mode == ['\"]disabled")),
    ("thinking_budget", None, 0, re.compile(r"\bthinking_budget == 0")),
    ("reasoning_effort", "high", "no_think", re.compile(r"reasoning_effort.{0,40}['\"]no_think")),
    ("reasoning_effort", None, "none", re.compile(r"reasoning_effort.{0,40}['\"]none['\"]")),
    ("reasoning_effort", None, "low", re.compile(r"reasoning_effort in \[['\"]low")),
    # gpt-oss cannot be without
    ("reasoning_effort", None, "low", re.compile(r"<\|channel\|>")),
)


def switched(template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, with what the template calls enable_thinking and reasoning_effort."""
    found, thinks = dict(variables), variables.get("enable_thinking")
    for name, on, off, sign in _SWITCHES:
        value = on if thinks is True else off if thinks is False else None
        if value is not None and name not in found and sign.search(template):
            found[name] = value
    if "thinking_effort" in template and "reasoning_effort" in variables:
        found.setdefault("thinking_effort", variables["reasoning_effort"])
    return found


def without_thoughts(
    template: str, messages: Sequence[Message], variables: Mapping[str, Any]
) -> Sequence[Message]:
    """The conversation of a template that is told by a word in the system message not to think."""
    is_off = variables.get("enable_thinking") is False and _NO_THINK in template
    if not is_off or re.search(r"(?<![.(\w])enable_thinking\b", template):
        return messages
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    text = f"{first['content']} {_NO_THINK}" if first else _NO_THINK
    return [{"role": "system", "content": text}, *messages[1 if first else 0 :]]


def told_to(template: str, messages: Sequence[Message]) -> list[Message]:
    """The conversation with thoughts, calls and results as the template reads them.

    Thoughts have all the names that it knows; results the name of their function.
    """
    names = {
        call.get("id"): call["function"].get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    }
    found = [_named(message, names) for message in messages]
    if THOUGHTS in template:
        found = [_told_apart(message) for message in found]
    if _ONE_CALL in template:
        found = list(_one_call_each(found))
    return [_with_thoughts(template, message) for message in found]


def _named(message: Message, names: Mapping[Any, Any]) -> Message:
    name = names.get(message.get("tool_call_id"))
    if message["role"] != "tool" or message.get("name") or name is None:
        return message
    return {**message, "name": name}


def _told_apart(message: Message) -> Message:
    """Thoughts that stand in the text, as who shows all of it keeps them, as thoughts."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    thought, said = split_readable(content)
    return {**message, "reasoning_content": thought, "content": said} if thought else message


def _with_thoughts(template: str, message: Message) -> Message:
    thought, content = message.get("reasoning_content"), message.get("content")
    if not thought or message["role"] != "assistant":
        return message
    if _AS_PART.search(template) and isinstance(content, str | None):
        part = {"type": "thinking", "thinking": thought}
        text = [{"type": "text", "text": content}] if content else []
        return {**message, "content": [part, *text]}
    named = {name: thought for name, sign in _THOUGHTS.items() if sign.search(template)}
    return {**named, **message}


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Each call as a message, with its results behind it; what was said before it is a thought."""
    results = [message for message in messages if message["role"] == "tool"]
    told: list[int] = []
    for message in messages:
        if id(message) in told:
            continue
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            yield {key: value for key, value in message.items() if key != "tool_calls"}
            continue
        before = filter(None, (message.get("reasoning_content"), message.get("content")))
        plain = {key: value for key, value in message.items() if key != "reasoning_content"}
        for number, call in enumerate(calls):
            thought = {"reasoning_content": "\n\n".join(before)} if number == 0 else {}
            yield {**plain, **thought, "content": "", "tool_calls": [call]}
            own = [one for one in results if one.get("tool_call_id") == call.get("id")]
            told += map(id, own)
            yield from own
