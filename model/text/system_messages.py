"""Conversations for templates that allow one system message, or none, and turns of each alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]


def one_at_the_start(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the system messages that it begins with as one."""
    rest = list(messages)
    while len(rest) > 1 and _may_join(rest[0], rest[1], "system"):
        rest[:2] = [_joined(rest[0], rest[1])]
    return rest


def plainer(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The conversation, then what to try where a template refuses it.

    Neighbouring messages of the user become one, and later system messages part of them; then the
    first one, too.
    """
    yield list(messages)
    for first in (1, 0):
        told = [_as_user(one) if i >= first else one for i, one in enumerate(messages)]
        if (turns := _user_turns(told)) != messages:
            yield turns


def _as_user(message: Message) -> Message:
    return message | {"role": "user"} if message["role"] == "system" else message


def _user_turns(messages: list[Message]) -> list[Message]:
    """Neighbouring messages of the user as one."""
    found: list[Message] = []
    for message in messages:
        if found and _may_join(found[-1], message, "user"):
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _may_join(one: Message, other: Message, role: str) -> bool:
    texts = (one.get("content"), other.get("content"))
    return one["role"] == other["role"] == role and all(isinstance(text, str) for text in texts)


def _joined(one: Message, other: Message) -> Message:
    return one | {"content": f"{one['content']}\n\n{other['content']}"}
