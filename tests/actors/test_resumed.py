"""Answers that another system goes on with, from what was handed out and the request's state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotcold.actors.driver import streams
from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.messages import GenerateRequest, Grammar, TokenEvent
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import batching
from tests.conftest import TinyCheckpoint
from tests.unit.test_thinking_answers import HELLO, SAYS, THINKS, serving

WANTED: list[dict[str, Any]] = [
    {"sampling": {"temperature": 0.0, "stop": ("the sea", " of")}, "num_logprobs": 2},
    {"sampling": {"mirostat": 2, "temperature": 1.2, "repeat_penalty": 1.1}},
    {
        "sampling": {"temperature": 1.5, "seed": 7, "dry_multiplier": 0.8, "xtc_probability": 0.4},
        "num_prompt_logprobs": 1,
    },
    {
        "sampling": {"temperature": 1.0, "seed": 8},
        "grammar": Grammar("lark", 'start: "[" /[a-zé ]{1,30}/ ("," /[a-z]{1,8}/)* "]"'),
    },
]


@pytest.fixture(scope="module")
def drivers() -> Iterator[tuple[Driver, Driver]]:
    """Of two systems of the embedded model."""
    checkpoint = TinyCheckpoint(DEMO_DIRECTORY)
    with batching(checkpoint) as (_, one), batching(checkpoint) as (_, other):
        yield one, other


@pytest.mark.parametrize("wanted", WANTED, ids=lambda one: "-".join([*one, *one["sampling"]]))
def test_another_system_goes_on_from_any_event(
    wanted: dict[str, Any], drivers: tuple[Driver, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same events, whichever was the last that was read, and the same result."""
    monkeypatch.setattr(streams, "PACE_S", 0.0)
    sampling = SamplingParams(**{"max_tokens": 48, **wanted["sampling"]})
    request = GenerateRequest(
        **{**wanted, "sampling": sampling}, prompt="There was once a" * 9, is_resumable=True
    )
    check(*drivers, request)


def test_it_goes_on_within_thoughts_and_marks_that_end_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a budget ends are told apart from the answer as before."""
    monkeypatch.setattr(streams, "PACE_S", 0.0)
    with serving(tmp_path, THINKS, SAYS) as served:
        for budget in (-1, 0, 2, 5):
            sampling = SamplingParams(temperature=0.0, thinking_token_budget=budget, stop=("w",))
            request = GenerateRequest(sampling, messages=HELLO, is_resumable=True)
            check(served.driver, served.driver, request, step=1)


def check(one: Driver, other: Driver, request: GenerateRequest, step: int = 3) -> None:
    """`other` says the rest of what `one` says, from each event on of every so many."""
    events = answer(one, request)
    while len(events) < 3:  # on a busy machine one event may say what several would
        events = answer(one, request)
    for last in range(0, len(events) - 1, step):
        read = events[: last + 1]
        given = tuple(token for event in read for token in event.token_ids)
        rest = answer(other, replace(request, given=given, state=read[-1].state))
        assert told(rest) == told(events[last + 1 :])
        found, whole = rest[-1].result, events[-1].result
        assert (found.text, found.ids) == (whole.text, whole.ids)
        assert found.num_thought_tokens == whole.num_thought_tokens


def answer(driver: Driver, request: GenerateRequest) -> list[Any]:
    """All events of an answer."""
    return list(driver.generate(request))


def told(events: list[TokenEvent]) -> Any:
    """What they say together."""
    whole = events[0]
    for event in events[1:]:
        whole += event
    parts = "".join(kind * length for kind, length in whole.told_parts)
    return whole.text, parts, whole.token_ids, whole.logprobs, whole.prompt_logprobs
