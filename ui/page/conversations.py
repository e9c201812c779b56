"""The conversations of one visitor, and the task that reads an answer."""

import asyncio
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hotcold.actors.protocol.messages import GenerateRequest, Generation
from hotcold.model.errors import UsageError
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.errors import ApiError, as_api_error
from hotcold.ui.page.branches import Message, flattened, restored

_TITLE_LENGTH = 40
_LONGEST_NAME = _LONGEST_ID = 80
_MAX_SAVED = 50  # conversations; the oldest are forgotten
_MAX_CHARS = 1 << 20  # of all conversations of a visitor
_MESSAGE_CHARS = 16  # that a message takes besides its text
NO_TITLE = "New conversation"


@dataclass
class Conversation:
    """Questions and answers in turn, all in the server's loop: of the branch that is shown."""

    start: Message = field(default_factory=Message)  # what the first question follows
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    name: str = ""  # given by the visitor, else the first question stands for it
    result: Generation | None = None
    problem: ApiError | None = None  # why the last question has no answer, or no whole one
    _reading: asyncio.Task[None] | None = None  # while the last answer grows
    _answers: Answers | None = None
    _is_stopped: bool = False

    @property
    def messages(self) -> list[Message]:
        """Those that are shown."""
        return self.start.thread()

    def before(self, index: int) -> Message:
        """What the message `index` follows."""
        return [self.start, *self.messages][index]

    @property
    def title(self) -> str:
        """Its name, else the first question, on one line."""
        question = self.messages[0].content if self.messages else ""
        text = " ".join((self.name or question).split()) or NO_TITLE
        return text if len(text) <= _TITLE_LENGTH else text[: _TITLE_LENGTH - 1] + "…"

    @property
    def is_answering(self) -> bool:
        """Whether an answer is under way."""
        return self._reading is not None

    @property
    def num_chars(self) -> int:
        """Characters that count against the visitor's limit."""
        return sum(len(one["content"]) + _MESSAGE_CHARS for one in flattened(self.start))

    def ask(
        self,
        backend: Backend,
        question: str | None,
        sampling: SamplingParams,
        system_prompt: str,
        is_chat: bool,
        at: int | None = None,
    ) -> None:
        """Add a question and start reading its answer, in the server's loop.

        `at`: it takes the place of that message, which stays as a branch. None as the question: the
        same is answered again, in the place of the answer `at`.
        A question before it without an answer is removed: questions and answers alternate.
        `is_chat` False: the model has no chat template, and continues the question's text.
        """
        if question is not None:
            self._add_question(question, at)
            at = None
        asked = self.before(-1 if at is None else at)
        answer = Message()
        asked.add(answer)
        told = [{"role": one.role, "content": one.content} for one in self.messages[:-1]]
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        request = GenerateRequest(
            sampling,
            messages=[*system, *told] if is_chat else None,
            prompt=None if is_chat else told[-1]["content"],
        )
        self.result = self.problem = None
        self._is_stopped = False
        self._reading = asyncio.create_task(self._read(backend, request, asked, answer))

    def _add_question(self, question: str, at: int | None) -> None:
        while at is None and self.messages:
            last, before = self.messages[-1], self.before(-2)
            is_empty = not last.content and len(before.replies) > 1  # beside other answers
            if last.role != "user" and not is_empty:
                break
            before.drop()
        self.before(-1 if at is None else at).add(Message("user", question))

    async def _read(
        self, backend: Backend, request: GenerateRequest, asked: Message, answer: Message
    ) -> None:
        try:
            self._answers = await backend.start(1, partial(backend.encoded, request))
            if self._is_stopped:
                self._answers.stop()
            async for _, event in self._answers.events():
                answer.content += event.readable
                self.result = event.result
        except Exception as error:
            self.problem = as_api_error(error)
        finally:
            if self.problem and not answer.content and len(asked.replies) == 1:
                asked.drop()
            self._answers = self._reading = None

    def stop(self) -> None:
        """End the answer that is under way, if one is; what was said stays."""
        self._is_stopped = True
        if self._answers is not None:
            self._answers.stop()

    def write(self, index: int, text: str) -> None:
        """Put a text in the place of the answer `index`, which stays as a branch."""
        self.before(index).add(Message(content=text))
        self.result = self.problem = None

    def step(self, index: int, place: int) -> None:
        """Show the branch of that number at message `index`."""
        self.before(index).show(place)
        self.result = self.problem = None

    def has(self, words: list[str]) -> bool:
        """Whether its title and messages have all these words, in small letters."""
        said = (message["content"] for message in flattened(self.start))
        text = "\n".join([self.title, *said]).lower()
        return all(word in text for word in words)

    def as_json(self) -> dict[str, Any]:
        """What a browser or a file keeps of it."""
        name = {"name": self.name} if self.name else {}
        return {"id": self.id, **name, "messages": flattened(self.start)}


class ChatHistory:
    """One visitor's conversations, newest first, and which of them is open."""

    def __init__(self) -> None:
        """One empty conversation."""
        self.conversations = [Conversation()]
        self.open_id = self.conversations[0].id
        self.query = ""  # the words that listed conversations have
        self.named_id = ""  # the conversation whose name is being written
        self.notice: dict[str, str] = {}  # of what was done last, in place of the thread's state
        self.num_acts = 0  # of its visitor
        self.removed: tuple[int, Conversation] | None = None  # its place, for `undo_remove`
        self._has_taken_over = False

    @property
    def open(self) -> Conversation:
        """The conversation that is shown."""
        return self.find(self.open_id) or self.conversations[0]

    def find(self, conversation_id: str) -> Conversation | None:
        """The conversation of that id, or None."""
        found = (item for item in self.conversations if item.id == conversation_id)
        return next(found, None)

    def show(self, conversation_id: str) -> None:
        """Open a conversation."""
        if self.find(conversation_id) is not None:
            self.open_id = conversation_id

    def start_new(self) -> None:
        """Open an empty conversation; one is enough."""
        empty = next((item for item in self.conversations if not item.messages), None)
        if empty is None:
            empty = Conversation()
            self.conversations.insert(0, empty)
        self.open_id = empty.id

    def forget_oldest(self) -> None:
        """Drop the conversations beyond those that a browser keeps."""
        for oldest in self._saved[_MAX_SAVED:]:
            oldest.stop()
            self.conversations.remove(oldest)

    @property
    def _saved(self) -> list[Conversation]:
        """Those that hold something: an empty one takes no room."""
        return [item for item in self.conversations if item.messages]

    def require_space(self, question: str) -> None:
        """Raise UsageError where a question would make the conversations too long to keep."""
        if sum(item.num_chars for item in self.conversations) + len(question) > _MAX_CHARS:
            raise UsageError("the conversations are too long to keep; delete one")

    def remove(self, conversation_id: str) -> None:
        """Remove a conversation; until the next removal `undo_remove` restores it."""
        gone = self.find(conversation_id)
        if gone is None:
            return
        gone.stop()
        place = self.conversations.index(gone)
        self.removed = (place, gone) if gone.messages else None
        self.conversations.remove(gone)
        if not self.conversations:
            self.conversations = [Conversation()]
        if gone.id == self.open_id:
            self.open_id = self.conversations[min(place, len(self.conversations) - 1)].id

    def undo_remove(self) -> None:
        """Restore the conversation removed last, and open it. Errors: UsageError without room."""
        if self.removed is None:
            return
        place, gone = self.removed
        if self.find(gone.id) is None:  # no import has brought it back
            if not self._has_room(gone):
                raise UsageError("there is no room for it beside the others")
            self.conversations.insert(place, gone)
        self.removed = None
        self.open_id = gone.id

    def _has_room(self, added: Conversation) -> bool:
        chars = sum(item.num_chars for item in [*self.conversations, added])
        return len(self._saved) < _MAX_SAVED and chars <= _MAX_CHARS

    def rename(self, name: str) -> None:
        """Give the conversation `named_id` a name, once; an empty one: its first question again."""
        found, self.named_id = self.find(self.named_id), ""
        if found is not None and (found.name or name != found.title):
            found.name = " ".join(name.split())[:_LONGEST_NAME]

    def listed(self) -> list[Conversation]:
        """Those that hold something, and all words of `query`."""
        words = self.query.lower().split()
        return [item for item in self._saved if item.has(words)]

    def stop_all(self) -> None:
        """End all answers: the visitor has left."""
        for conversation in self.conversations:
            conversation.stop()

    def saved(self) -> list[dict[str, Any]]:
        """What a browser keeps: conversations that hold something, without what is under way."""
        return [item.as_json() for item in self._saved[:_MAX_SAVED]]

    def take_over(self, saved: Any, open_id: str = "") -> None:
        """Restore the browser's conversations, once; later the browser stores the server's.

        `open_id`: the one that the page shows, which may have outlived the server it is of.
        """
        if not self._has_taken_over:
            self._has_taken_over = True
            self.restore(saved)
            self.show(open_id)

    def restore(self, saved: Any) -> int:
        """Add the conversations of a browser or a file; returns how many.

        Malformed, known and too long ones are left out.
        """
        before = len(self.conversations)
        items = saved if isinstance(saved, list) else []
        found = [conversation for item in items if (conversation := _restored(item))]
        known = {item.id for item in self.conversations}
        for item in found:
            if self._has_room(item):
                self.conversations += [item] if item.id not in known else []
                known.add(item.id)
        return len(self.conversations) - before


def _restored(item: Any) -> Conversation | None:
    try:
        name = str(item.get("name", ""))[:_LONGEST_NAME]
        found = Conversation(restored(item["messages"]), str(item["id"]), name)
        return found if len(found.id) <= _LONGEST_ID else None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
