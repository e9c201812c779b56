"""System messages in templates that allow one, at the start, or none; as published ones do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hotcold.model.text.chat_template import ChatTemplate
from hotcold.model.text.system_messages import one_at_the_start, plainer
from hotcold.ui.api.responses.conversation import messages_of
from hotcold.ui.api.responses.schemas import InputMessage
from tests.unit.ollama_routes import Recording, post, prompt_of, server

SAY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ONE = (  # Qwen 3.5's, Mistral's
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}{% endfor %}" + SAY
)
ALTERNATE = (  # Mistral's: user and assistant in turn, tools after calls
    "{% set ns = namespace(user=true) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}"
    "{% if m.role == 'tool' and loop.previtem.role in ('user', 'system') %}"
    "{{ raise_exception('a result follows its call') }}{% endif %}{% endfor %}"
)
NONE = (  # Gemma 2's
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + ALTERNATE + SAY
)
DROPS = (  # SmolLM3's: what is not the first is no message
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def talk(*said: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[one[0]], "content": one} for one in said]


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (SAY, ["s1", "u1"], "<system>s1<user>u1"),
        (SAY, ["s1", "u1", "a1", "s2", "u2"], "<system>s1<user>u1<assistant>a1<system>s2<user>u2"),
        (SAY, ["u1", "u2"], "<user>u1<user>u2"),
        (ONE, ["s1", "s2", "u1"], "<system>s1\n\ns2<user>u1"),
        (ONE, ["s1", "u1", "s2", "a1"], "<system>s1<user>u1\n\ns2<assistant>a1"),
        (ONE, ["s1", "u1", "a1", "s2"], "<system>s1<user>u1<assistant>a1<user>s2"),
        (DROPS, ["s1", "s2", "u1"], "<system>s1\n\ns2<user>u1"),
        (NONE, ["s1", "u1", "a1", "u2"], "<user>s1\n\nu1<assistant>a1<user>u2"),
        (NONE, ["s1", "u1", "a1", "s2", "u2"], "<user>s1\n\nu1<assistant>a1<user>s2\n\nu2"),
        (NONE, ["s1"], "<user>s1"),
        (NONE, ["u1", "u2", "a1"], "<user>u1\n\nu2<assistant>a1"),
    ],
)
def test_a_template_is_told_what_it_takes(template: str, said: list[str], expected: str) -> None:
    assert ChatTemplate(template, "a test", {}).render(talk(*said)) == expected


def test_many_messages_of_one_role_take_as_long_as_their_text() -> None:
    """Of the thread's own time; each joined to all before it they take half a minute."""
    text, number = "x" * 380, 10_000
    before = time.thread_time()
    (system,) = one_at_the_start([{"role": "system", "content": text}] * number)
    _, (user,), _ = plainer([{"role": "user", "content": text}] * number)
    (answer,) = messages_of(None, [InputMessage(role="assistant", content=text)] * number)
    assert time.thread_time() - before < 3.0
    assert all(len(one["content"]) > 380 * number for one in (system, user, answer))


CALL = {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"}
OTHER = CALL | {"call_id": "d"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "one"}
SAID = {"role": "assistant", "content": "Well."}
HELLO = {"role": "user", "content": "Hello"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
LINE = {"type": "input_text", "text": "[image left out]"}


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's model has a template that is as strict as any, for tools too."""
    tokenizer = server()[0].prompts.tokenizer
    assert tokenizer is not None
    text = (
        "{% if tools %}<tool_call> \"arguments\"{% endif %}" + ALTERNATE + ONE.replace(
            "{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
    )  # fmt: skip
    monkeypatch.setattr(tokenizer, "_template", ChatTemplate(text, "a test", {}))


TOLD = {"role": "user", "content": "<tool_response>\none\n</tool_response>"}
CALLED = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("items", "same"),
    [
        ([HELLO, CALL, SAID, RESULT], [HELLO, SAID, CALL, RESULT]),
        ([HELLO, SAID, SAID], [HELLO, SAID | {"content": "Well.\nWell."}]),
        (
            [HELLO, CALL, RESULT | {"output": [PICTURE]}],
            [HELLO, CALL, RESULT | {"output": [LINE]}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "Look:"}, PICTURE]}],
            [{"role": "user", "content": "Look:\n[image left out]"}],
        ),
        ([{"role": "developer", "content": "b"}, HELLO], [HELLO]),
        # A result without its call, and a call without its result: the history was cut.
        ([HELLO, RESULT], [HELLO | {"content": f"Hello\n{TOLD['content']}"}]),
        ([RESULT, HELLO], [HELLO | {"content": f"{TOLD['content']}\nHello"}]),
        ([HELLO, CALL, HELLO], [HELLO, SAID | {"content": CALLED}, HELLO]),
        (
            [RESULT, SAID, HELLO, CALL, RESULT, SAID],
            [TOLD, SAID, HELLO, SAID | {"content": CALLED}, TOLD, SAID],
        ),
    ],
)
def test_a_history_is_told_in_order(items: list[Any], same: list[Any]) -> None:
    """Instructions are there, too; the second history is what a template takes as it comes."""
    instructions = ["a", "a\n\nb" if items[0].get("role") == "developer" else "a"]
    first, second = prompts(instructions, (items, same))
    assert first == second and first.startswith("<system>a")


def prompts(instructions: list[str], histories: tuple[list[Any], ...]) -> list[str]:
    client = Recording()
    for told, history in zip(instructions, histories, strict=True):
        answer = post(client, "/v1/responses", input=history, instructions=told)
        assert answer.status_code == 200, answer.text
    return [prompt_of(request) for request in client.requests]
