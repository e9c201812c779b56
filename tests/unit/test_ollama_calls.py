"""Calls of tools as Ollama's routes tell them."""

from __future__ import annotations

from typing import Any

from hotcold.actors.protocol.messages import Generation, TokenEvent
from tests.unit.ollama_routes import CALLED, HELLO, TOOL, Recording, lines, post


def test_calls_are_told_whole_with_arguments_as_objects() -> None:
    half = len(CALLED) // 2
    result = Generation(CALLED, [7], "stop", 3, 0.1, 0.1)
    events = (TokenEvent(CALLED[:half]), TokenEvent(CALLED[half:], result))
    expected = [{"a": 1}, {"a": 2}]

    def arguments_of(message: dict[str, Any]) -> list[Any]:
        for call in message.get("tool_calls", ()):
            assert call["id"] and call["function"]["name"] == "look_up"
        return [call["function"]["arguments"] for call in message.get("tool_calls", ())]

    asked: dict[str, Any] = {"messages": HELLO, "tools": [TOOL]}
    recording = Recording(*events)
    whole = post(recording, "/api/chat", stream=False, **asked).json()
    assert arguments_of(whole["message"]) == expected
    assert [call["function"]["index"] for call in whole["message"]["tool_calls"]] == [0, 1]
    assert whole["message"]["content"] == "Well." and whole["done_reason"] == "stop"
    assert recording.requests[0].grammar is not None
    streamed = [line["message"] for line in lines(post(Recording(*events), "/api/chat", **asked))]
    assert [one for message in streamed for one in arguments_of(message)] == expected
    assert "".join(message["content"] for message in streamed) == "Well."


def test_a_call_that_was_cut_off_is_none() -> None:
    cut = CALLED[: CALLED.index("1}")]
    event = TokenEvent(cut, Generation(cut, [7], "length", 3, 0.1, 0.1))
    answer = post(Recording(event), "/api/chat", messages=HELLO, tools=[TOOL], stream=False).json()
    assert answer["message"] == {"role": "assistant", "content": "Well."}
    assert answer["done_reason"] == "length"


def test_calls_and_results_go_back_into_the_conversation() -> None:
    call = {"function": {"name": "look_up", "arguments": {"a": 1}}}
    talk = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "hm"},
        {"role": "TOOL", "tool_name": "look_up", "content": "five"},
    ]
    ours = Recording()
    assert post(ours, "/api/chat", messages=talk, tools=[TOOL], stream=False).status_code == 200
    function = {"name": "look_up", "arguments": '{"a": 1}'}
    theirs = Recording()
    openai_talk = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "name": "look_up", "content": "five"},
    ]
    answer = post(theirs, "/v1/chat/completions", messages=openai_talk, tools=[TOOL])
    assert answer.status_code == 200
    assert ours.requests[0].prompt_ids == theirs.requests[0].prompt_ids
