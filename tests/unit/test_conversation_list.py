"""What is done in the list of conversations, and what a thread shows when something went wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hotcold.model.errors import UsageError
from hotcold.ui.api.errors import ApiError, timed_out, unavailable
from hotcold.ui.page.branches import restored
from hotcold.ui.page.conversation_list import act, listed
from hotcold.ui.page.conversations import ChatHistory, Conversation
from hotcold.ui.page.thread import remedy, shown_messages, suggestions, thread_state


def talk(*texts: str) -> Conversation:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return Conversation(restored(messages))


@pytest.fixture
def history() -> ChatHistory:
    found = ChatHistory()
    found.conversations = [talk("one?", "The first."), talk("two?", "The second.")]
    found.open_id = found.conversations[0].id
    return found


def titles(history: ChatHistory) -> list[str]:
    return [row["title"] for row in listed(history)["rows"]]


def test_a_conversation_gets_a_name_and_is_found_by_it(history: ChatHistory) -> None:
    first, second = (item.id for item in history.conversations)
    act(history, {"do": "rename", "id": second, "text": "  Half\n a dozen "})
    assert titles(history) == ["one?", "Half a dozen"]
    found = {"DOZEN second": [second], "the second": [second], "the": [first, second], "third": []}
    for query, expected in found.items():
        act(history, {"do": "search", "text": query})
        assert [row["id"] for row in listed(history)["rows"]] == expected
    act(history, {"do": "search", "text": ""})
    other = ChatHistory()
    other.restore(json.loads(json.dumps(history.saved())))
    assert titles(other) == ["one?", "Half a dozen"]
    act(history, {"do": "rename", "id": second, "text": " "})
    assert titles(history) == ["one?", "two?"]


def test_what_was_deleted_comes_back_to_its_place(history: ChatHistory) -> None:
    first, second = (item.id for item in history.conversations)
    act(history, {"do": "remove", "id": first})
    assert (titles(history), listed(history)["removed"], history.open_id) == (
        ["two?"], "one?", second,
    )  # fmt: skip
    act(history, {"do": "undo"})
    assert (titles(history), history.open_id) == (["one?", "two?"], first)
    act(history, {"do": "undo"})
    assert titles(history) == ["one?", "two?"]
    for name in (second, first):
        act(history, {"do": "remove", "id": name})
    assert titles(history) == [] and history.open.messages == []


def test_what_is_deleted_comes_back_only_where_there_is_room(history: ChatHistory) -> None:
    """A browser keeps 50 conversations, of a million characters in all."""
    gone = history.conversations[0]
    for many in ([talk("three?") for _ in range(50)], [talk("x" * 1_048_500)]):
        act(history, {"do": "remove", "id": gone.id})
        others = ChatHistory()
        others.conversations = many
        assert history.restore(others.saved()) > 0
        assert "no room" in act(history, {"do": "undo"})["note"]
        assert gone not in history.conversations
        del history.conversations[1:]
        assert "note" not in act(history, {"do": "undo"})
        assert history.open is gone


def test_an_empty_conversation_takes_no_room(history: ChatHistory) -> None:
    """Neither for Undo, nor where a browser gives its 50 back to a page that was just opened."""
    history.conversations += [talk("three?") for _ in range(48)]
    history.start_new()
    gone = history.conversations[-1]
    act(history, {"do": "remove", "id": gone.id})
    assert "note" not in act(history, {"do": "undo"}) and history.open is gone
    opened = ChatHistory()
    opened.take_over(json.loads(json.dumps(history.saved())))
    assert len(opened.saved()) == 50 and opened.open.messages == []
    opened.open.start = talk("four?").start
    opened.forget_oldest()
    assert [item["messages"][0]["content"] for item in opened.saved()] == [
        "four?", "one?", "two?", *["three?"] * 47,
    ]  # fmt: skip
    assert len(opened.conversations) == 50


def test_a_file_is_given_and_taken_over(history: ChatHistory) -> None:
    kept = act(history, {"do": "export"})["file"]
    other = ChatHistory()
    for expected in ("2 conversations imported.", "Nothing imported"):
        assert expected in act(other, {"do": "import", "text": json.dumps(kept)})["note"]
    assert titles(other) == ["one?", "two?"]
    for text in ("{", "[" * 100_000):
        assert "not JSON" in act(other, {"do": "import", "text": text})["note"]


@pytest.mark.parametrize(
    "done", [{}, {"do": "no such"}, {"do": "open", "id": "x"}, {"do": ["new"]}]
)
def test_what_is_unknown_changes_nothing(history: ChatHistory, done: dict[str, Any]) -> None:
    before = listed(history) | {"at": 0}
    act(history, done)
    assert listed(history) | {"at": 0} == before
    older, newer = listed(history), listed(history)
    assert older["server"] == newer["server"] and older["at"] < newer["at"]


def test_another_server_says_that_it_is_another() -> None:
    code = "from hotcold.ui.page import conversation_list as c\n"
    code += "print(c.listed(c.ChatHistory())['server'])"
    told = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)]
    assert len({*told, listed(ChatHistory())["server"] + "\n"}) == 3


def test_the_state_is_that_of_the_open_conversation() -> None:
    conversation = Conversation()
    assert (thread_state(conversation)["state"], thread_state(conversation)["empty"]) == (
        "ready", True,
    )  # fmt: skip
    conversation.refuse(UsageError("seed is 'x'"))
    state = thread_state(conversation)
    assert (state["state"], state["refused"], state["empty"]) == ("error", True, False)
    (problem,) = shown_messages(conversation)
    assert "Not sent: seed is &#x27;x&#x27;." in problem["content"]
    assert conversation.messages == []


def test_each_error_says_what_to_do() -> None:
    long = ApiError(400, "too long", code="context_length_exceeded")
    problems = [
        long,
        timed_out(1.0, "why"),
        unavailable("queue"),
        ApiError(400, "a"),
        ApiError(500, "b"),
    ]
    found = [remedy(problem) for problem in problems]
    assert len(set(found)) == len(found)
    assert "shorten the question" in found[0] and "Max tokens" not in found[0]
    assert "new conversation" in found[0] and all("Retry" in text for text in found[1:])


def test_questions_fit_the_model() -> None:
    shown = [suggestions(True, True), suggestions(False, True), suggestions(False, False)]
    assert all(len(each) == 4 for each in shown)
    assert "Python" in shown[0][0]
    assert not any(question.endswith("?") for question in shown[2][1:])
    assert len({heading for heading, *_ in shown}) == 3
