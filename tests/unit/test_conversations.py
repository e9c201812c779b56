"""A visitor's conversations, over a server whose system answers by the book."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import orjson
import pytest

from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig, TokenEvent
from hotcold.model.errors import ServiceError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.errors import ApiError
from hotcold.ui.page.branches import Message, restored
from hotcold.ui.page.conversations import ChatHistory, Conversation
from tests.unit.ollama_routes import give_client

_USER, _ASSISTANT = ({"role": role, "content": "x"} for role in ("user", "assistant"))
_NO_BRANCHES: list[dict[str, Any]] = [
    _ASSISTANT | {"after": -1}, _USER | {"after": 0}, _USER | {"after": 7}, _USER | {"after": 1},
    _USER | {"after": "x"}, _USER | {"after": None}, _ASSISTANT | {"after": float("inf")},
]  # fmt: skip
Deliver = Callable[[TokenEvent | BaseException], None]


class Book:
    """A client that answers with the prompt's text, in two parts, the second when let go."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.ended: list[str] = []
        self.may_go_on = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        self.requests.append(request)
        name = str(len(self.requests))
        self.tasks.add(asyncio.create_task(self._answer(name, deliver)))
        return name

    async def _answer(self, name: str, deliver: Deliver) -> None:
        deliver(TokenEvent("said "))
        await self.may_go_on.wait()
        reason = "cancelled" if name in self.ended else "stop"
        deliver(TokenEvent(name, Generation("", [1], reason, 1, 0.1, 0.1)))

    def stop(self, name: str) -> None:
        self.ended.append(name)
        self.may_go_on.set()

    cancel = stop


class Visit:
    """A server of the demo model over a book, with room for three answers."""

    def __init__(self, may_go_on: bool = True, **settings: Any) -> None:
        config = SystemConfig(str(DEMO_DIRECTORY), context_length=128, max_batch=2)
        settings = {"max_queue": 1, "max_tokens": 100, **settings}
        self.backend = Backend(config, ServerSettings("demo", **settings))
        self.book: Any = Book()
        give_client(self.backend, self.book)
        if may_go_on:
            self.book.may_go_on.set()

    def ask(
        self, talk: Conversation, question: str | None, system_prompt: str = "",
        is_chat: bool = True, max_tokens: int | None = 8, at: int | None = None,
    ) -> None:  # fmt: skip
        sampling = SamplingParams(max_tokens, temperature=0.0)
        talk.ask(self.backend, question, sampling, system_prompt, is_chat, at)

    def ids(self, *messages: str, system: str = "") -> list[int]:
        told = [{"role": "system", "content": system}] if system else []
        roles = ["user", "assistant"] * len(messages)
        told += [{"role": role, "content": m} for role, m in zip(roles, messages, strict=False)]
        return self.backend.prompts.ids(GenerateRequest(SamplingParams(), messages=told))


async def finished(talk: Conversation) -> list[str]:
    async with asyncio.timeout(30):
        while talk.is_answering:
            await asyncio.sleep(0.001)
    return [message.content for message in talk.messages]


def told(talk: Conversation) -> str:
    """What went wrong."""
    assert talk.problem is not None
    return talk.problem.message


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A coroutine as a test."""

    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_the_page_has_the_servers_limits() -> None:
    """Its answers take places beside the API's, and end at the same deadline and length."""
    visit = Visit(may_go_on=False)
    talks = [Conversation() for _ in range(4)]
    for talk in talks:
        visit.ask(talk, "one?")
    assert await finished(talks[3]) == ["one?"]
    assert "queue is full" in told(talks[3]) and visit.backend.num_active == 3
    other = GenerateRequest(SamplingParams(), prompt="a")
    with pytest.raises(ApiError, match="queue is full"):
        await visit.backend.start(1, partial(visit.backend.encoded, other))
    visit.book.may_go_on.set()
    for talk in talks[:3]:
        await finished(talk)
    assert visit.backend.num_active == 0
    visit.ask(talks[0], "two?", max_tokens=101)
    await finished(talks[0])
    assert "this server allows 100" in told(talks[0]) and len(visit.book.requests) == 3
    visit.ask(talks[0], "two?", max_tokens=None)
    await finished(talks[0])
    assert visit.book.requests[3].sampling.max_tokens == 100
    hasty = Visit(may_go_on=False, request_timeout_s=0.05)
    hasty.ask(talks[1], "two?")
    await finished(talks[1])
    assert "longer than 0.05 s" in told(talks[1]) and hasty.backend.num_active == 0
    early = Visit(may_go_on=False)
    early.ask(talk := Conversation(), "one?")
    talk.stop()  # before it begins
    assert (await finished(talk))[0] == "one?"
    assert early.book.ended == ["1"] and talk.problem is None
    visit.ask(text := Conversation(), "Once upon", "unused", is_chat=False)
    await finished(text)
    asked = GenerateRequest(SamplingParams(), prompt="Once upon")
    assert visit.book.requests[-1].prompt_ids == visit.backend.prompts.ids(asked)


@in_loop
async def test_another_answer_and_another_question_are_branches() -> None:
    visit, talk = Visit(), Conversation()
    visit.ask(talk, "one?")
    await finished(talk)
    visit.ask(talk, "two?", "Be kind.")
    await finished(talk)
    asked = visit.ids("one?", "said 1", "two?", system="Be kind.")
    assert visit.book.requests[1].prompt_ids == asked
    visit.ask(talk, None, at=1)  # the first question, answered again
    assert await finished(talk) == ["one?", "said 3"]
    assert visit.book.requests[2].prompt_ids == visit.ids("one?")
    talk.step(1, 0)
    assert await finished(talk) == ["one?", "said 1", "two?", "said 2"]
    visit.ask(talk, "too?", at=2)
    assert await finished(talk) == ["one?", "said 1", "too?", "said 4"]
    assert visit.book.requests[3].prompt_ids == visit.ids("one?", "said 1", "too?")
    talk.write(3, "mine")
    visit.ask(talk, "and?")
    assert (await finished(talk))[3:] == ["mine", "and?", "said 5"]
    assert visit.book.requests[4].prompt_ids == visit.ids("one?", "said 1", "too?", "mine", "and?")
    history, other = ChatHistory(), ChatHistory()
    history.conversations = [talk]
    kept = history.saved()
    assert other.restore(json.loads(json.dumps(kept))) == 1
    assert other.saved() == kept
    again = other.conversations[-1]
    again.step(1, 1)
    assert await finished(again) == ["one?", "said 3"]
    assert again.has(["mine"]) and again.num_chars == talk.num_chars > 9 * 16
    again.step(1, 0)
    again.step(2, 0)
    assert await finished(again) == ["one?", "said 1", "two?", "said 2"]
    again.step(2, 1)
    again.step(3, 0)
    assert await finished(again) == ["one?", "said 1", "too?", "said 4"]


@in_loop
async def test_what_fails_loses_nothing_and_makes_way_for_the_next_question() -> None:
    """Else roles would not take turns: some templates refuse that, and no browser keeps it."""
    visit, talk = Visit(), Conversation()
    submit = visit.book.submit

    async def fail(request: GenerateRequest, deliver: Deliver) -> str:
        raise ServiceError("the cpu0 service died; start again")

    async def end_at_once(request: GenerateRequest, deliver: Deliver) -> str:
        event = TokenEvent("", Generation("", [], "stop", 1, 0.1, 0.1))
        asyncio.get_running_loop().call_soon(deliver, event)
        return "0"

    for question, at, answer, contents in (
        ("one?", None, end_at_once, ["one?", ""]),
        ("two?", None, fail, ["one?", "", "two?"]),
        ("three?", None, fail, ["one?", "", "three?"]),
        (None, 3, submit, ["one?", "", "three?", "said 1"]),
        (None, 3, fail, ["one?", "", "three?", ""]),  # beside the answer that was there
        ("four?", None, submit, ["one?", "", "three?", "said 1", "four?", "said 2"]),
        ("tree?", 2, fail, ["one?", "", "tree?"]),  # beside the other question
        ("5?", None, submit, ["one?", "", "three?", "said 1", "four?", "said 2", "5?", "said 3"]),
    ):  # fmt: skip
        visit.book.submit = answer
        visit.ask(talk, question, at=at)
        assert await finished(talk) == contents
        assert (answer is fail) == (talk.problem is not None)
        assert answer is not fail or told(talk) == "the cpu0 service died; start again"
    other = ChatHistory()
    assert other.restore(history_of(talk).saved()) == 1


def test_branches_may_hold_each_other_deeply() -> None:
    def texts(found: Conversation) -> list[str]:
        return [message.content for message in found.messages]

    depth, roles = 2000, ("user", "assistant")
    said = [{"role": roles[n % 2], "content": f"{n}"} for n in range(depth)]
    talk = Conversation(restored(said))
    for number in reversed(range(depth)):
        talk.before(number).add(Message(roles[number % 2], f"new {number}"))
    history, other = ChatHistory(), ChatHistory()
    history.conversations = [talk]
    kept = history.saved()
    assert other.restore(json.loads(orjson.dumps(kept))) == 1 and other.saved() == kept
    again = other.conversations[-1]
    assert again.num_chars == talk.num_chars and again.has(["new 1999"])
    for number in range(depth):
        assert texts(again) == [*map(str, range(number)), f"new {number}"]
        again.step(number, 0)
    assert texts(again) == [f"{number}" for number in range(depth)]


def test_what_a_visitor_may_keep_is_bounded() -> None:
    def kept(prefix: str, count: int, length: int) -> list[Any]:
        turn = {"role": "user", "content": "x" * length}
        return [{"id": f"{prefix}{n}", "messages": [turn]} for n in range(count)]

    history = ChatHistory()
    for prefix in "abc":
        history.restore(kept(prefix, 40, 1))
    history.restore(kept("d", 1, 1))
    assert len(history.conversations) == 51 and len(history.saved()) == 50  # one is empty
    for conversation in list(history.conversations):
        history.open_id = conversation.id
        conversation.start = Message(replies=[Message("user", "x")])
        history.forget_oldest()
        history.start_new()
    assert len(history.conversations) == 51 and len(history.saved()) == 50
    large = ChatHistory()
    for prefix in "abcd":
        large.restore(kept(prefix, 3, 300_000))
    assert sum(len(m.content) for item in large.conversations for m in item.messages) == 900_000
    large.require_space("x" * 100_000)
    with pytest.raises(UsageError, match="delete one"):
        large.require_space("x" * 200_000)


def test_what_is_malformed_is_left_out() -> None:
    """Messages without a word, and long ids, take room too."""
    turn = _USER
    malformed: list[Any] = [
        None, 7, "text", [None], [{}], [{"id": 1, "messages": []}], [{"id": 1, "messages": [7]}],
        [{"id": 1, "messages": [_ASSISTANT]}], [{"messages": [turn]}],
        [{"id": "x" * 10_000, "messages": [turn]}],
        *([{"id": 1, "messages": [turn, branch]}] for branch in _NO_BRANCHES),
    ]  # fmt: skip
    for kept in malformed:
        assert ChatHistory().restore(kept) == 0
    turns, history = [_USER | {"content": ""}, _ASSISTANT | {"content": ""}] * 10_000, ChatHistory()
    assert history.restore([{"id": str(n), "messages": turns} for n in range(40)]) > 0
    assert sum(len(item.messages) for item in history.conversations) < 70_000


def talk_of(*texts: str) -> Conversation:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return Conversation(restored(messages))


def history_of(*talks: Conversation) -> ChatHistory:
    found = ChatHistory()
    found.conversations, found.open_id = [*talks], talks[0].id
    return found


def test_what_is_deleted_comes_back_only_where_there_is_room() -> None:
    """A browser keeps 50 conversations, of a million characters in all."""
    history = history_of(talk_of("one?", "The first."), talk_of("two?", "The second."))
    gone = history.conversations[0]
    for many in ([talk_of("three?") for _ in range(50)], [talk_of("x" * 1_048_500)]):
        history.remove(gone.id)
        assert history.restore(history_of(*many).saved()) > 0
        with pytest.raises(UsageError, match="no room"):
            history.undo_remove()
        assert gone not in history.conversations
        del history.conversations[1:]
        for _ in range(2):
            history.undo_remove()
            assert history.open is history.conversations[0] is gone and len(history.listed()) == 2


def test_an_empty_conversation_takes_no_room() -> None:
    """Neither for Undo, nor where a browser gives its 50 back to a page that was just opened."""
    history = history_of(*(talk_of(f"{number}?") for number in range(50)))
    history.start_new()
    gone = history.conversations[-1]
    history.remove(gone.id)
    history.undo_remove()
    assert history.open is gone
    opened = ChatHistory()
    opened.take_over(json.loads(json.dumps(history.saved())))
    assert len(opened.saved()) == 50 and opened.open.messages == []
    opened.open.start = talk_of("new?").start
    opened.forget_oldest()
    asked = [item["messages"][0]["content"] for item in opened.saved()]
    assert asked == ["new?", *(f"{number}?" for number in range(49))]
    assert len(opened.conversations) == 50
