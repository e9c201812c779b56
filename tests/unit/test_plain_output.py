"""What a model or a file says cannot order a terminal about; a pipe has it as it is."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any

import pytest

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.jobs.chat.screen import Screen
from hotcold.jobs.cli import _print_error
from hotcold.jobs.commands import generate, models
from hotcold.jobs.running.in_flight import Deliver
from hotcold.jobs.support import model_facts
from hotcold.model.sampling import SamplingParams

# A title, a link, a colour, what types for the user (an answer to a question), in one byte, too.
TEXT = "a\x1b]0;title\x07\x1b[31mred\x1b[6n\x9b5n\rover\b\b\x7f\ttab é\n"
SHOWN = "a␛]0;title␇␛[31mred␛[6n\ufffd5n␍over␈␈␡\ttab é\n"


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def stream(request: pytest.FixtureRequest) -> Stream:
    return Stream(request.param)


def written_to(stream: Stream) -> ExitStack:
    """Within it both standard outputs are `stream`."""
    stack = ExitStack()
    stack.enter_context(redirect_stdout(stream))
    stack.enter_context(redirect_stderr(stream))
    return stack


def expected(stream: Stream) -> str:
    return SHOWN if stream.isatty() else TEXT


def test_an_answer(stream: Stream) -> None:
    class Answering:
        max_batch = 1

        def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
            deliver(TokenEvent(TEXT))
            deliver(TokenEvent("", Generation("", [1], "stop", 1, 0.1, 0.1)))

        def close(self) -> None:
            pass

    connection: Any = Answering()
    with written_to(stream):
        generate._answer(connection, GenerateRequest(SamplingParams(), prompt="x"))
    assert stream.getvalue() == expected(stream)


def test_a_chat(stream: Stream) -> None:
    screen = Screen()
    with written_to(stream):
        with screen.answer() as show:
            show(TokenEvent(TEXT))
        screen.say(TEXT)
    assert stream.getvalue() == expected(stream) + "\n" + expected(stream) + "\n"


def test_an_error(stream: Stream) -> None:
    with written_to(stream):
        _print_error(f"model.gguf{TEXT}")
    assert ("\x1b" in stream.getvalue()) != stream.isatty()


def test_facts_of_a_model(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_facts, "facts_of", lambda path: {})
    monkeypatch.setattr(model_facts, "lines_of", lambda facts: [("model", TEXT)])
    show: Any = models.show.callback
    with written_to(stream):
        show(None)
    assert stream.getvalue() == f"model  {expected(stream)}\n"
