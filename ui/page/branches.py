"""Branches of a conversation: what else was asked or answered in a message's place.

Messages are a tree. Browsers and files keep them flat: branches may be in branches as deep as they
like.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Message:
    """A question or an answer, and all replies to it, of which one is shown."""

    role: str = "assistant"
    content: str = ""
    replies: list["Message"] = field(default_factory=list)
    place: int = 0  # of the reply that is shown

    def thread(self) -> list["Message"]:
        """The shown reply, the shown one to that, and so on."""
        found = [self]
        while found[-1].replies:
            found.append(found[-1].replies[found[-1].place])
        return found[1:]

    def add(self, message: "Message") -> None:
        """Show a further reply. The one shown before makes way only if nothing is said in it."""
        if self.replies and not any(one.content for one in self.thread()):
            self.drop()
        self.replies.append(message)
        self.place = len(self.replies) - 1

    def show(self, place: int) -> None:
        """Show the reply of that number; the last one where there is none."""
        self.place = min(max(place, 0), len(self.replies) - 1)

    def drop(self) -> None:
        """Remove the shown reply; the one before it is shown, if any."""
        del self.replies[self.place]
        self.place = max(self.place - 1, 0)

    def below(self) -> Iterator["Message"]:
        """All replies, and all to these."""
        waiting = [*self.replies]
        while waiting:
            message = waiting.pop()
            yield message
            waiting += message.replies


def flattened(start: Message) -> list[dict[str, Any]]:
    """All messages after `start`, one after another.

    Of each its role and content; "after", where it does not follow the one before it in the list:
    the number of the message that it follows, or -1; "place" where it is the shown one of several
    that follow the same, which is the first of them in the list.
    """
    found: list[dict[str, Any]] = []
    waiting: list[tuple[int, Message, dict[str, int]]] = [(-2, start, {})]
    while waiting:
        before, message, more = waiting.pop()
        number = len(found) - 1 if message is start else len(found)
        if message is not start:
            after = {} if before == number - 1 else {"after": before}
            found.append({"role": message.role, "content": message.content, **after, **more})
        others = [*message.replies]
        if others:
            shown = others.pop(message.place)
            waiting += [(number, other, {}) for other in reversed(others)]
            waiting.append((number, shown, {"place": message.place} if others else {}))
    return found


def restored(items: Any) -> Message:
    """What the messages of a browser or a file follow; `flattened` gives them.

    Errors:  AttributeError, KeyError, OverflowError, TypeError or ValueError for others
    """
    found = {-1: Message()}
    for index, item in enumerate(items):
        before = found[int(item.get("after", index - 1))]
        message = found[index] = Message(str(item["role"]), str(item["content"]))
        if message.role != ("user" if before.role == "assistant" else "assistant"):
            raise ValueError("a message in the wrong place")
        place = int(item.get("place", 0))
        before.place = before.place if before.replies else place
        before.replies.append(message)
    if len(found) == 1:
        raise ValueError("a conversation without a message")
    for message in found.values():
        if message.replies:
            message.show(message.place)
            message.replies.insert(message.place, message.replies.pop(0))
    return found[-1]
