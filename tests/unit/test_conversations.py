"""A visitor's conversations, with a system that answers by the book."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from model.errors import ServiceError
from model.sampling import SamplingParams
from ui.page.conversations import NO_TITLE, ChatHistory, Conversation

SAMPLING = SamplingParams(temperature=0.0)


class Book:
    """Answers with the number of the messages it saw, in two parts, the second when let go."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.may_go_on = threading.Event()
        self.error: Exception | None = None

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        yield TokenEvent(f"{len(request.messages or [])} ")
        assert self.may_go_on.wait(30)
        result = Generation("", [1], "stop", 1, 0.1, 0.1)
        yield TokenEvent("messages", result)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


@pytest.fixture
def book() -> Any:
    return Book()


def finished(conversation: Conversation) -> list[str]:
    deadline = time.monotonic() + 30
    while conversation.is_answering:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return [message["content"] for message in conversation.messages]


def test_questions_and_answers_take_turns(book) -> None:
    book.may_go_on.set()
    talk = Conversation()
    talk.ask(book, "one?", SAMPLING, "", is_chat=True)
    assert finished(talk) == ["one?", "1 messages"]
    talk.ask(book, "two?", SAMPLING, "Be kind.", is_chat=True)
    assert finished(talk)[2:] == ["two?", "4 messages"]
    roles = [message["role"] for message in book.requests[1].messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert talk.title == "one?"
    assert talk.cut(3) == "two?"
    assert finished(talk) == ["one?", "1 messages"]
    assert talk.cut(0) == "one?"
    assert (talk.messages, talk.title) == ([], NO_TITLE)


def test_two_answers_grow_at_once(book) -> None:
    history = ChatHistory()
    first = history.open
    first.ask(book, "one?", SAMPLING, "", is_chat=True)
    history.start_new()
    second = history.open
    second.ask(book, "a longer question " * 9, SAMPLING, "", is_chat=True)
    assert first.is_answering and second.is_answering
    history.start_new()
    history.remove_open(book)
    assert not book.cancelled
    book.may_go_on.set()
    assert finished(first)[1] == finished(second)[1] == "1 messages"
    assert len(second.title) == 40


def test_stop_and_leaving_cancel_what_runs(book) -> None:
    history = ChatHistory()
    history.open.stop(book)
    history.open.ask(book, "one?", SAMPLING, "", is_chat=True)
    history.stop_all(book)
    assert book.cancelled == [history.open.request_id]
    book.may_go_on.set()
    finished(history.open)


def test_an_error_leaves_the_question(book) -> None:
    talk = Conversation()
    book.error = ServiceError("the cpu0 service died; start again")
    talk.ask(book, "one?", SAMPLING, "", is_chat=True)
    assert finished(talk) == ["one?"]
    assert talk.error == "the cpu0 service died; start again"
    book.error = None
    book.may_go_on.set()
    assert talk.cut(0) == "one?"
    talk.ask(book, "one?", SAMPLING, "", is_chat=True)
    assert (finished(talk)[1], talk.error) == ("1 messages", "")


def test_without_a_chat_template_the_text_is_the_prompt(book) -> None:
    book.may_go_on.set()
    talk = Conversation()
    talk.ask(book, "Once upon", SAMPLING, "unused", is_chat=False)
    finished(talk)
    assert (book.requests[0].prompt, book.requests[0].messages) == ("Once upon", None)


def test_what_a_browser_kept_comes_back(book) -> None:
    book.may_go_on.set()
    history = ChatHistory()
    history.open.ask(book, "one?", SAMPLING, "", is_chat=True)
    finished(history.open)
    kept = history.saved()
    other = ChatHistory()
    other.restore(copy.deepcopy(kept))
    other.restore(copy.deepcopy(kept))
    assert [item.title for item in other.conversations] == [NO_TITLE, "one?"]
    assert other.saved() == kept


@pytest.mark.parametrize(
    "kept",
    [
        None, 7, "text", [None], [{}], [{"id": 1, "messages": []}], [{"id": 1, "messages": [7]}],
        [{"id": 1, "messages": [{"role": "assistant", "content": "x"}]}],
        [{"messages": [{"role": "user", "content": "x"}]}],
    ],
)  # fmt: skip
def test_what_is_malformed_is_left_out(kept) -> None:
    history = ChatHistory()
    history.restore(kept)
    assert len(history.conversations) == 1
