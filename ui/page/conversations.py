"""The conversations of one visitor, and the task that reads an answer."""

import asyncio
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.protocol.messages import GenerateRequest, Generation
from model.errors import UsageError
from model.sampling import SamplingParams
from ui.api.backend import Answers, Backend
from ui.api.errors import as_api_error

Message = dict[str, str]
_TITLE_LENGTH = 40
_MOST_KEPT = 50  # conversations; the oldest are forgotten
_MOST_CHARS = 1 << 20  # of all conversations of a visitor
NO_TITLE = "New conversation"


@dataclass
class Conversation:
    """Questions and answers in turn, all in the server's loop."""

    messages: list[Message] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    result: Generation | None = None
    error: str = ""
    _reading: asyncio.Task[None] | None = None  # while the last answer grows
    _answers: Answers | None = None
    _is_stopped: bool = False

    @property
    def title(self) -> str:
        """The first question, on one line."""
        text = " ".join(self.messages[0]["content"].split()) if self.messages else NO_TITLE
        return text if len(text) <= _TITLE_LENGTH else text[: _TITLE_LENGTH - 1] + "…"

    @property
    def is_answering(self) -> bool:
        """Whether an answer is under way."""
        return self._reading is not None

    @property
    def num_chars(self) -> int:
        """Of all messages."""
        return sum(len(message["content"]) for message in self.messages)

    def ask(
        self,
        backend: Backend,
        question: str,
        sampling: SamplingParams,
        system_prompt: str,
        is_chat: bool,
    ) -> None:
        """Add a question and begin to read its answer, in the server's loop.

        Not `is_chat`: the model has no chat template, and goes on with the question's text alone.
        """
        self.messages.append({"role": "user", "content": question})
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        request = GenerateRequest(
            sampling,
            messages=[*messages, *map(dict, self.messages)] if is_chat else None,
            prompt=None if is_chat else question,
        )
        answer = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        self.result, self.error, self._is_stopped = None, "", False
        self._reading = asyncio.create_task(self._read(backend, request, answer))

    async def _read(self, backend: Backend, request: GenerateRequest, answer: Message) -> None:
        try:
            self._answers = await backend.start(1, partial(backend.encoded, request))
            if self._is_stopped:
                self._answers.stop()
            async for _, event in self._answers.events():
                answer["content"] += event.text
                self.result = event.result
        except Exception as error:
            self.error = as_api_error(error).message
        finally:
            if self.error and not answer["content"]:
                self.messages.remove(answer)
            self._answers = self._reading = None

    def stop(self) -> None:
        """End the answer that is under way, if one is; what was said stays."""
        self._is_stopped = True
        if self._answers is not None:
            self._answers.stop()

    def cut(self, index: int) -> str:
        """Take back everything from the question at or before message `index`; that question."""
        while index > 0 and self.messages[index]["role"] != "user":
            index -= 1
        question = self.messages[index]["content"]
        del self.messages[index:]
        self.error = ""
        return question


class ChatHistory:
    """One visitor's conversations, newest first, and which of them is open."""

    def __init__(self) -> None:
        """One empty conversation."""
        self.conversations = [Conversation()]
        self.open_id = self.conversations[0].id

    @property
    def open(self) -> Conversation:
        """The conversation that is shown."""
        return self.find(self.open_id) or self.conversations[0]

    def find(self, conversation_id: str) -> Conversation | None:
        """The conversation of that id, or None."""
        found = (item for item in self.conversations if item.id == conversation_id)
        return next(found, None)

    def start_new(self) -> None:
        """Open an empty conversation; one is enough."""
        empty = next((item for item in self.conversations if not item.messages), None)
        if empty is None:
            empty = Conversation()
            self.conversations.insert(0, empty)
            for oldest in self.conversations[_MOST_KEPT:]:
                oldest.stop()
            del self.conversations[_MOST_KEPT:]
        self.open_id = empty.id

    def require_room(self, question: str) -> None:
        """Raise UsageError where a question would make the conversations too long to keep."""
        if sum(item.num_chars for item in self.conversations) + len(question) > _MOST_CHARS:
            raise UsageError("the conversations are too long to keep; delete one")

    def remove_open(self) -> None:
        """Forget the conversation that is open, and open another."""
        gone = self.open
        gone.stop()
        self.conversations.remove(gone)
        if not self.conversations:
            self.conversations = [Conversation()]
        self.open_id = self.conversations[0].id

    def clear_open(self) -> None:
        """Take back all that was said in the conversation that is open."""
        self.open.stop()
        fresh = Conversation()
        self.conversations[self.conversations.index(self.open)] = fresh
        self.open_id = fresh.id

    def stop_all(self) -> None:
        """End all answers: the visitor has left."""
        for conversation in self.conversations:
            conversation.stop()

    def saved(self) -> list[dict[str, Any]]:
        """What a browser keeps: conversations that hold something, without what is under way."""
        kept = [item for item in self.conversations if item.messages][:_MOST_KEPT]
        return [{"id": item.id, "messages": [dict(m) for m in item.messages]} for item in kept]

    def restore(self, saved: Any) -> None:
        """Take over what a browser kept; whatever is malformed is left out."""
        items = saved if isinstance(saved, list) else []
        found = [conversation for item in items if (conversation := _restored(item))]
        known = {item.id for item in self.conversations}
        for item in found:
            room = _MOST_CHARS - sum(one.num_chars for one in self.conversations)
            if len(self.conversations) < _MOST_KEPT and item.num_chars <= room:
                self.conversations += [item] if item.id not in known else []
                known.add(item.id)


def _restored(item: Any) -> Conversation | None:
    try:
        messages = [
            {"role": str(m["role"]), "content": str(m["content"])} for m in item["messages"]
        ]
        roles = [message["role"] for message in messages]
        if not messages or any(
            role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)
        ):
            return None
        return Conversation(messages, str(item["id"]))
    except (KeyError, TypeError):
        return None
