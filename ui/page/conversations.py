"""The conversations of one visitor, and the thread that reads an answer."""

import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

from actors.protocol.failures import first_line
from actors.protocol.messages import GenerateRequest, Generation
from actors.system import System
from model.errors import HotcoldError
from model.sampling import SamplingParams

Message = dict[str, str]
_TITLE_LENGTH = 40
_MOST_KEPT = 50  # conversations; the oldest are forgotten
NO_TITLE = "New conversation"


@dataclass
class Conversation:
    """Questions and answers in turn. While `request_id` is set, the last answer grows."""

    messages: list[Message] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    request_id: str = ""
    result: Generation | None = None
    error: str = ""

    @property
    def title(self) -> str:
        """The first question, on one line."""
        text = " ".join(self.messages[0]["content"].split()) if self.messages else NO_TITLE
        return text if len(text) <= _TITLE_LENGTH else text[: _TITLE_LENGTH - 1] + "…"

    @property
    def is_answering(self) -> bool:
        """Whether an answer is under way."""
        return bool(self.request_id)

    def ask(
        self,
        system: System,
        question: str,
        sampling: SamplingParams,
        system_prompt: str,
        is_chat: bool,
    ) -> None:
        """Add a question and let a thread read its answer; see `GenerateRequest` for its parts.

        Not `is_chat`: the model has no chat template, and goes on with the question's text alone.
        """
        self.messages.append({"role": "user", "content": question})
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        request = GenerateRequest(
            sampling,
            messages=[*messages, *map(dict, self.messages)] if is_chat else None,
            prompt=None if is_chat else question,
            request_id=uuid.uuid4().hex,
        )
        answer = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        self.request_id, self.result, self.error = request.request_id, None, ""
        threading.Thread(target=self._read, args=(system, request, answer), daemon=True).start()

    def _read(self, system: System, request: GenerateRequest, answer: Message) -> None:
        try:
            for event in system.generate(request):
                answer["content"] += event.text
                self.result = event.result
        except HotcoldError as error:
            self.error = str(error)
        except Exception as error:  # shown, because nobody else would see it
            self.error = first_line(error)
        finally:
            if self.error and not answer["content"]:
                self.messages.remove(answer)
            self.request_id = ""

    def stop(self, system: System) -> None:
        """End the answer that is under way, if one is; what was said stays."""
        if self.request_id:
            system.cancel(self.request_id)

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
        self.open_id = empty.id

    def remove_open(self, system: System) -> None:
        """Forget the conversation that is open, and open another."""
        gone = self.open
        gone.stop(system)
        self.conversations.remove(gone)
        if not self.conversations:
            self.conversations = [Conversation()]
        self.open_id = self.conversations[0].id

    def clear_open(self, system: System) -> None:
        """Take back all that was said in the conversation that is open."""
        self.open.stop(system)
        fresh = Conversation()
        self.conversations[self.conversations.index(self.open)] = fresh
        self.open_id = fresh.id

    def stop_all(self, system: System) -> None:
        """End all answers: the visitor has left."""
        for conversation in self.conversations:
            conversation.stop(system)

    def saved(self) -> list[dict[str, Any]]:
        """What a browser keeps: conversations that hold something, without what is under way."""
        kept = [item for item in self.conversations if item.messages][:_MOST_KEPT]
        return [{"id": item.id, "messages": [dict(m) for m in item.messages]} for item in kept]

    def restore(self, saved: Any) -> None:
        """Take over what a browser kept; whatever is malformed is left out."""
        items = saved if isinstance(saved, list) else []
        found = [conversation for item in items if (conversation := _restored(item))]
        known = {item.id for item in self.conversations}
        self.conversations += [item for item in found if item.id not in known][:_MOST_KEPT]


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
