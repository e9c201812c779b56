"""The list of a visitor's conversations: what it shows, and what is done in it."""

import itertools
import json
import uuid
from collections.abc import Callable
from typing import Any

from hotcold.ui.page.conversations import ChatHistory

_LONGEST_QUERY = 200
_NO_ROOM = "Not brought back: there is no room for it beside the others."
_SERVER = uuid.uuid4().hex  # this process, whose numbers these are
_numbers = itertools.count(1)


def listed(history: ChatHistory) -> dict[str, Any]:
    """What `list.js` shows: the conversations with messages that have the searched words.

    `at` increases while `server` stays: updates by a stream and by a click may arrive in any order.
    An open page may outlive its server, whose successor counts from 1 again.
    """
    items = [item for item in history.matching() if item.messages]
    return {
        "server": _SERVER,
        "at": next(_numbers),
        "open": history.open_id,
        "query": history.query,
        "any": any(item.messages for item in history.conversations),
        "rows": [
            {
                "id": item.id,
                "title": item.title,
                "name": item.name or item.title,
                "busy": item.is_answering,
            }
            for item in items
        ],
        "removed": "" if history.removed is None else history.removed[1].title,
    }


def act(history: ChatHistory, done: dict[str, Any]) -> dict[str, Any]:
    """Do what a visitor did in the list.

    done: "do" is one of the names below, "id" a conversation's, "text" what was written or read
    Returns "file", conversations for `list.js` to give to the visitor, or "note", words for them.
    """
    kind, name, text = (str(done.get(key, "")) for key in ("do", "id", "text"))
    reply: dict[str, Any] = {}
    actions: dict[str, Callable[[], Any]] = {
        "new": history.start_new,
        "open": lambda: history.show(name),
        "rename": lambda: history.rename(name, text),
        "remove": lambda: history.remove(name),
        "undo": lambda: None if history.undo_remove() else reply.update(note=_NO_ROOM),
        "search": lambda: setattr(history, "query", text[:_LONGEST_QUERY]),
        "export": lambda: reply.update(file=history.saved()),
        "import": lambda: reply.update(note=_import(history, text)),
    }
    if kind in actions:
        actions[kind]()
    return reply


def _import(history: ChatHistory, text: str) -> str:
    """Take over the conversations of a file; what came of it."""
    try:
        count = history.restore(json.loads(text))
    except (ValueError, RecursionError):
        return "This is no file of conversations: it is not JSON."
    if count == 0:
        return "Nothing imported: no conversation in this file is new, or there is no room."
    return f"{count} conversation{'s' if count > 1 else ''} imported."
