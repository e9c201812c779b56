"""A model's reasoning, separated from its answer: on every route, in any pieces."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.driver.grammars.masks import Constraint, Grammars
from hotcold.actors.driver.thoughts import Thoughts, reader_of
from hotcold.actors.protocol import messages
from hotcold.actors.protocol.messages import GenerateRequest, Generation, Grammar, TokenEvent
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.call_syntax import TAGGED, CallSyntax
from hotcold.model.text.calls import SpanKind
from hotcold.model.text.chat_template import ChatTemplate, Thinking, thinking_of
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.ui.api.tools.reader import AnswerReader, ReasoningPart, TextPart
from tests.unit.ollama_routes import HELLO, RESULT, Recording, post, server

WAY = Thinking("<think>", "</think>")
# Ends with what begins thoughts unless it is told not to think, as Qwen's and DeepSeek's do.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% elif opens %}<think>\n{% endif %}{% endif %}"
)


def demo_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))
    return Tokenizer(backend, ChatTemplate(TEMPLATE, "a test", {}))


TOKENIZER = demo_tokenizer()


def thoughts(are_open: bool) -> Thoughts:
    return Thoughts(WAY, are_open)


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
# Whether the prompt opens thoughts, the answer, and what of it is thought, said and called.
ANSWERS: list[tuple[bool, str, str, str, int]] = [
    (True, "I see.\n</think>\n\nYes.", "I see.", "Yes.", 0),
    (True, "cut off in the mid", "cut off in the mid", "", 0),
    (True, "cut off in </thi", "cut off in </thi", "", 0),
    (True, "\n\n</think>\n\nYes.", "", "Yes.", 0),
    (True, "<think>\nagain</think>x", "again", "x", 0),
    (True, "a < b </ c </think> d ", "a < b </ c", "d ", 0),
    (True, "a</think>b</think>c", "a", "b</think>c", 0),
    (True, f"so {CALL} it is", "so", "it is", 1),
    (True, "a <tool_call> b {c} </think>x", "a <tool_call> b {c}", "x", 0),
    (True, "a <tool_call>", "a <tool_call>", "", 0),
    (True, "", "", "", 0),
    (False, "<think>\nI see.\n</think>\n\nYes.", "I see.", "Yes.", 0),
    (False, "\n<think>I", "I", "", 0),
    (False, "<thi", "", "<thi", 0),
    (False, " Yes. </think> <think>", "", " Yes. </think> <think>", 0),
    (False, f"<think>a</think>Well.\n{CALL}", "a", "Well.", 1),
    (False, "\n ", "", "\n ", 0),
]


def told(
    pieces: Sequence[str],
    opened: Thoughts | None,
    result: Generation = RESULT,
    syntax: CallSyntax | None = TAGGED,
) -> list[TokenEvent]:
    """The events of an answer that comes in these pieces."""
    reader, found = reader_of(opened, syntax, lambda text: True), []
    kinds = {
        SpanKind.TEXT: messages.SAID,
        SpanKind.THOUGHT: messages.THOUGHT,
        SpanKind.MARK: messages.MARK,
    }
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        spans = reader.push(piece, is_last)
        parts = tuple((kinds[span.kind], len(span.text)) for span in spans)
        text = "".join(span.text for span in spans)
        found.append(TokenEvent(text, result if is_last else None, 1, parts=parts))
    return found


def read(are_open: bool, pieces: Sequence[str], with_calls: bool) -> tuple[str, str, int]:
    reader = AnswerReader(TAGGED if with_calls else None)
    found: list[Any] = []
    events = told(pieces, thoughts(are_open))
    assert "".join(event.text for event in events) == "".join(pieces)
    whole = functools.reduce(operator.add, events)
    assert whole.thought == "".join(event.thought for event in events)
    assert whole.said == "".join(event.said for event in events)
    for event in events:
        found += reader.push(event)
    texts = [part for part in found if isinstance(part, TextPart | ReasoningPart)]
    assert all(part.text for part in texts)
    thought, said = (
        "".join(part.text for part in texts if isinstance(part, kind))
        for kind in (ReasoningPart, TextPart)
    )
    return thought, said, len(reader.calls)


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 120), max_size=8))
def test_thoughts_are_told_apart_however_they_come(answer: Any, cuts: list[int]) -> None:
    are_open, text, *expected = answer
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)] or [""]
    for split in (pieces, [*text, ""]):
        assert [*read(are_open, split, with_calls=True)] == expected
        if not expected[2]:
            assert [*read(are_open, split, with_calls=False)] == expected


def constraint(grammar: Grammar, opened: Thoughts | None = None) -> Constraint:
    return Grammars(TOKENIZER, TOKENIZER.vocab_size, [0]).constraint(grammar, opened)


def begins(found: Constraint, text: str) -> bool:
    """Whether the answer may begin with this text's tokens."""
    ids = TOKENIZER.encode(text, False)
    return found.beginning(ids) == ids


@pytest.mark.parametrize(
    "grammar", [Grammar("json_schema", '{"type": "integer"}'), Grammar("lark", "start: /[0-9]+/")]
)
@pytest.mark.parametrize("way", [WAY, *(thinking_of(text) for text in ("</seed:think>", "[THINK]",
    "<|END_THINKING|>", "\u25c1think\u25b7"))])  # fmt: skip
def test_a_grammar_begins_after_the_thoughts(grammar: Grammar, way: Thinking) -> None:
    free = constraint(grammar, Thoughts(way, are_open=False))
    for text, is_allowed in (
        ("7", True), (way.begin, True), (f"\n{way.begin}", True), ("x", False), ("\n7", False),
        (f"7{way.begin}", False), (way.end, False),
    ):  # fmt: skip
        assert begins(free, text) == is_allowed, text
    for are_open in (False, True):
        held = constraint(grammar, Thoughts(way, are_open))
        for text in ("7", "\n\n7"):
            assert held.takes_after_thoughts(text)
        assert not held.takes_after_thoughts("x") and not held.takes_after_thoughts(way.begin)
        held.resume("\n")
        assert begins(held, "7") and not begins(held, "x") and not begins(held, way.begin)


def test_tags_that_are_special_tokens_are_seen() -> None:
    backend = tokenizers.Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))
    backend.add_special_tokens([WAY.begin, WAY.end])
    ids = backend.encode("a<think>b</think>c", add_special_tokens=False).ids
    assert backend.decode(ids) == "abc"
    found = Tokenizer(backend, ChatTemplate(TEMPLATE, "a test", {}))
    assert found.encode("a<think>b</think>c", False) == ids
    assert found.decode(ids) == "a<think>b</think>c"
    table = Grammars(found, found.vocab_size + 3, [0])
    written = table.constraint(Grammar("lark", 'start: "<think>b"'))
    logits = np.zeros(found.vocab_size + 3, np.float32)
    assert np.isfinite(written.masked(logits)[ids[1]]), "the token itself stands for its text"
    assert not written.accept(ids[1]) and written.accept(ids[2])
    free = table.constraint(Grammar("lark", r"start: /(.|\n)*/")).masked(logits)
    special = [token for token, one in backend.get_added_tokens_decoder().items()
               if one.special and one.content not in WAY]  # fmt: skip
    assert len(special) > 2 and not np.isfinite(free[special[1:]]).any()


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's model thinks."""
    monkeypatch.setattr(server()[0].prompts, "tokenizer", TOKENIZER)


NUM_THOUGHT = 5


class _Answering(Recording):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def answer(self, request: GenerateRequest) -> Sequence[TokenEvent]:
        assert request.is_chat
        text, tokenizer = self._text, server()[0].prompts.tokenizer
        ids = TOKENIZER.encode(text, False)
        result = replace(RESULT, text=text, ids=ids, num_thought_tokens=NUM_THOUGHT)
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        opened = Thoughts.of(tokenizer, request.prompt_ids or ())
        return told([*pieces, ""], opened, result)


def answering(text: str) -> Recording:
    """Answers with `text`, a few characters a piece."""
    return _Answering(text)


SAID = "<think>\nI see.\n</think>\n\nYes."


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "reasoning_content"),
        ("/v1/chat/completions", "reasoning"),
        ("/api/chat", "thinking"),
    ],
)
def test_what_was_thought_goes_back_to_the_template(path: str, field: str) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Yes.", field: "I see."}, *HELLO]
    client = Recording()
    assert post(client, path, messages=talk).status_code == 200
    prompt = TOKENIZER.decode(client.requests[0].prompt_ids or [])
    assert "[assistant]<think>I see.</think>Yes." in prompt


@pytest.mark.usefixtures("thinking")
def test_ollama_says_that_a_model_thinks() -> None:
    assert "thinking" in post(Recording(), "/api/show").json()["capabilities"]
    raw = post(Recording(), "/api/generate", prompt="a", raw=True, think=True)
    assert raw.status_code == 400 and "thinking in raw mode" in raw.json()["error"]
