"""The checker of random requests: it draws the same again, and misses no difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_requests import Answer
from benchmarks.request_draws import Draws
from hotcold.actors.protocol.messages import TokenLogprob
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import PARAMETERS
from tests.benchmark_programs import output_of, run_in_own_process
from tests.conftest import TinyCheckpoint

LOGPROBS = tuple(TokenLogprob(n, -0.1 * n, ((n, -0.1 * n), (7, -2.5))) for n in range(4))
ANSWER = Answer((0, 1, 2, 3), LOGPROBS, "text of it", "stop", LOGPROBS[:2], (0.5, 0.25))
NEXT = TokenLogprob(3, LOGPROBS[3].logprob and LOGPROBS[3].logprob * (1 + 2**-52), ())
ELSE = TokenLogprob(3, LOGPROBS[3].logprob, ((3, -0.3), (7, -2.5000000001)))


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": (0, 1, 2, 4)},
        {"ids": (0, 1, 2)},
        {"logprobs": (*LOGPROBS[:3], NEXT)},
        {"logprobs": LOGPROBS[:3]},
        {"logprobs": (*LOGPROBS[:3], ELSE)},
        {"text": "text of"},
        {"finish_reason": "length"},
        {"prompt_logprobs": LOGPROBS[1:3]},
        {"embedding": (0.5, 0.2500000001)},
        {"error": "it failed"},
    ],
)
def test_any_difference_is_found(changes: dict[str, Any]) -> None:
    assert ANSWER.difference(ANSWER) == ""
    (name,) = changes
    assert replace(ANSWER, **changes).difference(ANSWER).startswith(f"{name}: ")


def test_what_was_left_is_the_beginning() -> None:
    left = Answer(ANSWER.ids[:2], LOGPROBS[:1], "text", prompt_logprobs=LOGPROBS[:2])
    assert left.difference(ANSWER) == "" and Answer((), (), "").difference(ANSWER) == ""
    assert replace(left, ids=(0, 2)).difference(ANSWER) == "ids: at 1 2 instead of 1"
    assert replace(left, text="tax").difference(ANSWER) == "text: 'tax' instead of 'tex'"
    assert replace(left, prompt_logprobs=LOGPROBS[1:3]).difference(ANSWER) != ""
    longer = replace(left, ids=(*ANSWER.ids, 9))
    assert longer.difference(ANSWER) != ""


def drawn(draws: Draws, count: int) -> list[Any]:
    found = []
    for number in range(count):
        found.append(draws.draw(number))
        draws.add(found[-1], [number % 7, 5, 6])
    return found


@pytest.mark.parametrize("has_text", [True, False])
def test_requests_are_drawn_again(has_text: bool, tiny: Callable[..., TinyCheckpoint]) -> None:
    path: Path = DEMO_DIRECTORY if has_text else tiny("llama-gqa").path
    found = drawn(Draws(path, 3, 256), 1000)
    assert found == drawn(Draws(path, 3, 256), 1000)
    assert found[:5] != drawn(Draws(path, 4, 256), 5)
    requests = [one.request for one in found]
    sizes = [len(one.prompt_ids or []) for one in requests]
    assert 1 <= min(sizes) < 10 and 128 < max(sizes) <= 254
    assert all(
        size + (one.sampling.max_tokens or 0) <= 256
        for size, one in zip(sizes, requests, strict=True)
    )
    ids = [one.prompt_ids for one in requests]
    shared = [any(a[:64] == b[:64] for b in ids[:n]) for n, a in enumerate(ids) if len(a) > 64]
    assert sum(shared) > 50
    for name in ("wants_embedding", "num_prompt_logprobs", "use_cache"):
        assert len({getattr(one, name) for one in requests}) == 2, name
    assert any(one.grammar for one in requests) == has_text
    varied = {
        name
        for name in PARAMETERS
        if len({getattr(one.sampling, name, None) for one in requests}) > 1
    }
    assert varied >= PARAMETERS.keys() - {"repetition_penalty"} - (set() if has_text else {"stop"})
    assert {True, False} == {one.leaves_after is None for one in found}
    assert any(one.kills for one in found) and any(one.restarts for one in found)
    assert not any(one.kills or one.restarts for one in drawn(Draws(path, 3, 256, False), 1000))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_small_run() -> None:
    done = run_in_own_process("random_requests", "--shape", "tiny", "--requests", 60, "--seed", 2)
    assert "; 0 differ from the plain system's." in output_of(done)
