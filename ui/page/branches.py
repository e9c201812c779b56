"""Branches of a conversation: what else was asked or answered in a message's place.

`others` of a message are the branches that begin in its place beside its own, each a list of
messages; `place` is the number of its own among all of them, from 0. Messages without branches have
neither. Browsers and files keep them flat: branches may be in branches as deep as they like.
"""

from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


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
    waiting = [messages]
    while waiting:
        for message in waiting.pop():
            yield message
            waiting += message.get("others", ())


def flattened(messages: list[Message]) -> list[dict[str, Any]]:
    """All messages, one after another.

    Of each its role and content; "after", where it does not follow the one before it in the list:
    the number of the message that it follows, or -1; "place" where it is the shown one of several
    that follow the same, which is the first of them in the list.
    """
    found: list[dict[str, Any]] = []
    waiting = [(-1, messages)]
    while waiting:
        before, branch = waiting.pop()
        for message in branch:
            waiting += [(before, other) for other in reversed(message.get("others", ()))]
            kept: Message = {key: value for key, value in message.items() if key != "others"}
            if before != len(found) - 1:
                kept["after"] = before
            found.append(kept)
            before = len(found) - 1
    return found


def restored(items: Any) -> list[Message]:
    """The messages of a browser or a file, as `flattened` gives them.

    Errors:  AttributeError, KeyError, OverflowError, TypeError or ValueError for others
    """
    messages: list[Message] = []
    # The branch that each message is in, its number in the conversation, and what follows it.
    homes, numbers = {-1: messages}, {-1: -1}
    next_ones: dict[int, Message] = {}
    for index, item in enumerate(items):
        before = int(item.get("after", index - 1))
        message: Message = {"role": str(item["role"]), "content": str(item["content"])}
        numbers[index] = numbers[before] + 1
        if message["role"] != ("user", "assistant")[numbers[index] % 2]:
            raise ValueError("a message in the wrong place")
        if before in next_ones:
            homes[index] = [message]
            next_ones[before].setdefault("others", []).append(homes[index])
        else:
            homes[index] = homes[before]
            homes[before].append(message)
            next_ones[before] = message
        message["place"] = int(item.get("place", 0))
    if not messages:
        raise ValueError("a conversation without a message")
    for message in in_all_branches(messages):
        place, others = message.pop("place"), message.get("others", ())
        if others:
            message["place"] = min(max(place, 0), len(others))
    return messages


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
