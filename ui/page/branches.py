"""Branches of a conversation: what else was asked or answered in a message's place.

Messages are a tree. Browsers and files keep them flat: branches may be in branches as deep as they
like.
"""

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


def flattened(start: Message) -> list[dict[str, Any]]:
    """All messages after `start`, each behind the one that it follows.

    Of each its role and content; "after", where it does not follow the one before it in the list:
    the number of the message that it follows, or -1; "shown" where it is, though not the first of
    several.
    """

    def replies(number: int, message: Message) -> list[tuple[int, Message, bool]]:
        shown = enumerate(message.replies)
        return [(number, one, 0 < message.place == place) for place, one in shown][::-1]

    found: list[dict[str, Any]] = []
    waiting = replies(-1, start)
    while waiting:
        before, message, is_shown = waiting.pop()
        number = len(found)
        after = {} if before == number - 1 else {"after": before}
        shown = {"shown": True} if is_shown else {}
        found.append({"role": message.role, "content": message.content, **after, **shown})
        waiting += replies(number, message)
    return found


def restored(items: Any) -> Message:
    """What the messages of a browser or a file follow; `flattened` gives them.

    Errors:  AttributeError, KeyError, TypeError or ValueError for others
    """
    found = {-1: Message()}
    for index, item in enumerate(items):
        before = found[int(item.get("after", index - 1))]
        message = found[index] = Message(str(item["role"]), str(item["content"]))
        if message.role != ("user" if before.role == "assistant" else "assistant"):
            raise ValueError("a message in the wrong place")
        before.replies.append(message)
        if item.get("shown"):
            before.show(len(before.replies) - 1)
    if len(found) == 1:
        raise ValueError("a conversation without a message")
    return found[-1]
