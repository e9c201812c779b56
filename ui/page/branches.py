"""Branches of a conversation: what else was asked or answered in a message's place.

`others` of a message are the branches that begin in its place beside its own, each a list of
messages; `place` is the number of its own among all of them, from 0. Messages without branches have
neither.
"""

from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
_DEEPEST = 75  # branches in branches: pages send and store nothing that is much deeper


def begin_branch(messages: list[Message], index: int, message: Message) -> None:
    """Put `message` in the place of message `index`, which stays as a branch with what follows.

    Only a branch in which nothing is said makes way.
    """
    branches, place = _taken(messages, index)
    if not any(each["content"] for each in branches[place]):
        del branches[place]
    branches.append([message])
    _put(messages, branches, len(branches) - 1)


def show_branch(messages: list[Message], index: int, place: int) -> None:
    """Go on at message `index` with the branch of that number; the last one where there is none."""
    branches, _ = _taken(messages, index)
    _put(messages, branches, min(max(place, 0), len(branches) - 1))


def drop_branch(messages: list[Message], index: int) -> None:
    """Remove the branch that is shown at message `index`; the one before it is shown, if any."""
    branches, place = _taken(messages, index)
    del branches[place]
    if branches:
        _put(messages, branches, max(place - 1, 0))


def num_branches(message: Message) -> int:
    """How many branches begin in its place, with its own."""
    return 1 + len(message.get("others", ()))


def in_all_branches(messages: list[Message]) -> Iterator[Message]:
    """The messages, and those of all other branches."""
    for message in messages:
        yield message
        for branch in message.get("others", ()):
            yield from in_all_branches(branch)


def restored(items: Any, number: int = 0, depth: int = 0) -> list[Message]:
    """The messages of a browser or a file, questions and answers in turn from `number` on.

    `depth`: how many branches these are in.
    Errors:  AttributeError, KeyError, OverflowError, RecursionError, TypeError or ValueError where
             it has others
    """
    if depth > _DEEPEST:
        raise ValueError("branches hold each other too deeply")
    found = []
    for count, item in enumerate(items, number):
        message: Message = {"role": str(item["role"]), "content": str(item["content"])}
        if message["role"] != ("user", "assistant")[count % 2]:
            raise ValueError("a message in the wrong place")
        if others := [restored(branch, count, depth + 1) for branch in item.get("others", ())]:
            place = min(max(int(item.get("place", 0)), 0), len(others))
            message |= {"others": others, "place": place}
        found.append(message)
    if not found:
        raise ValueError("a branch without a message")
    return found


def _taken(messages: list[Message], index: int) -> tuple[list[list[Message]], int]:
    """Take all branches at message `index` off; they, and the number of the one that was shown."""
    shown = messages[index:]
    del messages[index:]
    others, place = shown[0].pop("others", []), shown[0].pop("place", 0)
    return [*others[:place], shown, *others[place:]], place


def _put(messages: list[Message], branches: list[list[Message]], place: int) -> None:
    shown = branches.pop(place)
    if branches:
        shown[0] |= {"others": branches, "place": place}
    messages += shown
