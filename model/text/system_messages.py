"""Conversations for templates that allow one system message, or none, and turns of each alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

Message = dict[str, Any]


def one_at_the_start(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the system messages that it begins with as one."""
    first = list(takewhile(lambda one: _is_text_of(one, "system"), messages))
    return [_joined(first), *messages[len(first) :]] if first else list(messages)


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
    for may_join, group in groupby(messages, lambda one: _is_text_of(one, "user")):
        some = list(group)
        found += [_joined(some)] if may_join else some
    return found


def _is_text_of(message: Message, role: str) -> bool:
    return message["role"] == role and isinstance(message.get("content"), str)


def _joined(messages: Sequence[Message]) -> Message:
    return messages[0] | {"content": "\n\n".join(one["content"] for one in messages)}
