"""What answers are made of: draws, penalties, ends, events and logprobs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.logprobs import AnswerLogprobs
from hotcold.actors.driver.sampler import TokenSampler
from hotcold.actors.driver.stop_strings import StopStrings
from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Grammar,
    ReaderEpoch,
    TokenEvent,
    TokenLogprob,
)
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from hotcold.model.text.tokenizer import Tokenizer
from tests.actors.batching import WAIT_S, answer, answers, batching, complete
from tests.actors.test_dry import dry_logits
from tests.reference import reference_logits
from tests.tiny_checkpoint import Tiny, TinyCheckpoint

FILTERS: list[dict[str, Any]] = [
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_n_sigma": 1.5},
    {"typical_p": 0.7, "top_k": 0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_random_numbers_follow_from_the_options_alone(options: dict[str, Any]) -> None:
    """Whatever the logits are, the same count is taken: the next draws are then the same."""
    params = SamplingParams(temperature=1.0, seed=3, **options)
    random = np.random.default_rng(3)
    count = 2 if "xtc_probability" in options else 1
    flat, peaked = np.zeros(50, np.float32), np.zeros(50, np.float32)
    peaked[7] = np.inf
    sampler = TokenSampler(params)
    for logits in (flat, peaked, flat, flat, peaked):
        sampler.draw(logits)
        random.random(count)
    assert sampler._random.random() == random.random()


def test_the_same_alone_and_beside_others(tiny: Tiny) -> None:
    prompt, sampling = [5, 9, 17, 40, 3], SamplingParams(max_tokens=24, temperature=1.2, seed=5)
    requests = [
        GenerateRequest(replace(sampling, ignore_eos=True, **options), prompt_ids=prompt)
        for options in FILTERS
    ]
    with batching(tiny("llama-relu"), "dense") as (_, driver):
        alone = [answer(driver, request) for request in requests]
        assert answers(driver, requests) == alone
        for request, found in zip(requests, alone, strict=True):
            other = replace(request, sampling=replace(request.sampling, seed=6))
            assert complete(driver, other).ids != found.ids


def test_with_a_grammar_and_min_tokens() -> None:
    """Only what the grammar allows is drawn, and no end before `min_tokens`."""
    demo = TinyCheckpoint(DEMO_DIRECTORY)
    grammar = Grammar("lark", "start: /[ab]{0,12}/")
    with batching(demo, "exact") as (_, driver):
        for number, options in enumerate(FILTERS):
            sampling = SamplingParams(
                max_tokens=40, temperature=1.5, seed=number, min_tokens=4, **options
            )
            request = GenerateRequest(
                sampling, prompt="Return the", grammar=grammar, request_id=f"{number}"
            )
            found = complete(driver, request)
            assert found.text and set(found.text) <= {"a", "b"}
            assert len(found.ids) >= 4 or len(found.text) == 12


PENALTIES: list[dict[str, Any]] = [
    {"repeat_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.75, "repeat_last_n": -1},
    {"repeat_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": 0.3, "repeat_last_n": 4},
    {"frequency_penalty": 0.75, "repeat_last_n": -1, "penalize_prompt": False},
    {"presence_penalty": 2.0, "repeat_last_n": 6, "penalize_prompt": False},
    {"repeat_penalty": 1.7, "presence_penalty": 0.5, "repeat_last_n": -1, "penalize_prompt": False},
    {"logit_bias": ((3, -100.0), (7, 2.5), (9, 0.75))},
    {"logit_bias": ((5, 3.0), (9, -4.0)), "repeat_penalty": 1.4, "frequency_penalty": 0.5},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1},
]


def expected(
    logits: np.ndarray, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """As llama.cpp has it: each token that stands among the last ones, by how often."""
    last = params.repeat_last_n
    found = logits.astype(np.float64)
    for token, bias in params.biases:
        found[token] += bias
    tokens = [*prompt, *answer]
    for token in set(tokens if last < 0 else tokens[-last:]):
        factor = params.repeat_penalty
        found[token] *= 1 / factor if found[token] > 0 else factor
    tokens = tokens if params.penalize_prompt else [*answer]
    for token, count in Counter(tokens if last < 0 else tokens[-last:]).items():
        found[token] -= count * params.frequency_penalty + params.presence_penalty
    return dry_logits(found, [*prompt, *answer], params, []) if params.dry_multiplier else found


def test_whole_answers(tiny: Tiny) -> None:
    """Greedy, so that each token follows from those before it; the same beside other requests."""
    checkpoint, prompt = tiny("llama-relu"), [5, 9, 5, 5, 9, 5, 5, 9]
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain, *requests = [
        GenerateRequest(replace(sampling, **penalties), prompt_ids=prompt)
        for penalties in ({}, *PENALTIES)
    ]
    with batching(checkpoint, "dense") as (_, driver):
        unchanged = complete(driver, plain).ids
        alone = [answer(driver, request) for request in requests]
        assert answers(driver, requests) == alone
    for request, found in zip(requests, alone, strict=True):
        logits = reference_logits(checkpoint.path, [*prompt, *found.ids])[len(prompt) - 1 :]
        for place, token in enumerate(found.ids):
            weighed = expected(logits[place], prompt, found.ids[:place], request.sampling)
            assert weighed[token] >= weighed.max() - 1e-3, request.sampling
        assert found.ids != unchanged, request.sampling


def test_where_answers_end(tiny: Tiny) -> None:
    """At tokens that a request names, in the text or not, and nowhere before `min_tokens`."""
    checkpoint, prompt = tiny("llama-relu"), [5, 9, 17, 40, 3]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, repeat_penalty=1.7)
    with batching(checkpoint, "dense") as (_, driver):

        def found(**changes: Any) -> tuple[list[int], str]:
            request = GenerateRequest(replace(greedy, **changes), prompt_ids=prompt)
            result = complete(driver, request)
            return result.ids, result.finish_reason

        free, reason = found()
        assert (len(free), reason) == (12, "length") and len(set(free[:6])) == 6
        assert found(stop_token_ids=(free[4], free[2])) == (free[:3], "stop")
        held, reason = found(stop_token_ids=(free[2],), min_tokens=6)
        assert held[:2] == free[:2] and free[2] not in held[:6] and len(held) > 6
        forced, _ = found(logit_bias=((11, 100.0),))
        assert forced[0] == 11 != free[0]
        # The next best stands in where a token may not end the answer.
        logits = reference_logits(checkpoint.path, [*prompt, *free[:2]])[-1]
        weighed = expected(logits, prompt, free[:2], greedy)
        weighed[free[2]] = -np.inf
        assert weighed[held[2]] >= weighed.max() - 1e-3


READER = ReaderEpoch("a test")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()


def take_all(driver: Driver, count: int) -> dict[str, TokenEvent]:
    """All events of `count` requests, each request's as one."""
    found: dict[str, TokenEvent] = {}
    num_taken, num_ended, end = 0, 0, time.monotonic() + WAIT_S
    while num_ended < count:
        assert time.monotonic() < end
        num_taken, events = driver.take_events(READER, num_taken, 1.0)
        assert len({name for name, _ in events}) == len(events)
        for name, event in events:
            assert isinstance(event, TokenEvent)
            found[name] = found[name] + event if name in found else event
            num_ended += event.result is not None
    return found


def test_prompts_and_answers_are_scored_in_a_batch(tiny: Tiny) -> None:
    checkpoint = tiny("llama-relu")
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 99, size).tolist() for size in (1, 5, 70, 33)]
    with batching(checkpoint) as (_, driver):
        for number, ids in enumerate(prompts):
            sampling = SamplingParams(
                max_tokens=6, temperature=1.5, top_k=3, seed=number, ignore_eos=True
            )
            request = GenerateRequest(
                sampling, prompt_ids=ids, request_id=str(number),
                num_logprobs=2, num_prompt_logprobs=1,
            )  # fmt: skip
            driver.submit(READER, request)
        driver.submit(READER, GenerateRequest(sampling, prompt_ids=prompts[2], request_id="plain"))
        found = take_all(driver, 5)
        assert found["plain"].logprobs == found["plain"].prompt_logprobs == ()
        assert not driver._streams
        driver.between_requests(lambda: None)  # once the last one has left
        load = driver.load()
        assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (0, 0, 0.0)
    for number, ids in enumerate(prompts):
        event = found[str(number)]
        assert event.result is not None and event.num_tokens == 6
        assert event.num_prompt_tokens == len(ids)
        new = event.result.ids
        expected = log_softmax(reference_logits(checkpoint.path, ids + new))
        scored = [*event.prompt_logprobs, *event.logprobs]
        assert [one.token_id for one in scored] == ids + new
        assert scored[0] == TokenLogprob(ids[0], None)
        for one, row in zip(scored[1:], expected, strict=False):
            assert one.logprob == pytest.approx(row[one.token_id], abs=2e-3)
            values = [value for _, value in one.top]
            assert values == pytest.approx(np.sort(row)[::-1][: len(values)], abs=2e-3)
        assert {len(one.top) for one in event.logprobs} == {2}


def test_logprobs_come_with_the_text_that_they_begin_in() -> None:
    """A token that a stop string cuts off wholly never comes."""
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    assert tokenizer is not None
    ids = tokenizer.encode(" value of the", add_special_tokens=False)
    assert len(ids) == 3
    decoder, logprobs = tokenizer.stream_decoder([1]), AnswerLogprobs(0)
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    for token_id in ids:
        logprobs.add(logits, token_id, decoder)
        decoder.push(token_id)
    assert [one.token_id for one in logprobs.take(len(" val"))] == ids[:1]
    assert logprobs.take(len(" value")) == ()
    assert [one.token_id for one in logprobs.take(len(" value o"))] == ids[1:2]
    assert [one.token_id for one in logprobs.take(None)] == ids[2:]


_TEXTS = st.text("ab\n", max_size=6)
_STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """The text up to the first stop string, searched in all the text after every piece."""
    text = ""
    for piece in pieces:
        text += piece
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], True
    return text, False


@given(st.lists(_TEXTS, max_size=12), _STOPS)
def test_stop_strings(pieces: list[str], stops: list[str]) -> None:
    expected, found = cut(pieces, stops)
    machine, shown, received = StopStrings(stops), "", ""
    for piece in pieces:
        shown += machine.push(piece)
        received += piece
        if not machine.found:
            held = received[len(shown) :]
            assert received.startswith(shown)
            assert not held or any(stop.startswith(held) for stop in stops)
    shown += machine.flush()
    assert (shown, machine.found) == (expected, found)
    assert machine.text == shown
    assert machine.push("more") == ("" if found else "more")


@given(st.lists(_TEXTS, max_size=12), _STOPS, st.integers(0, 12))
def test_stop_strings_that_are_shown_or_not_looked_for_yet(
    pieces: list[str], stops: list[str], first: int
) -> None:
    machine, silent, received = StopStrings(stops, includes=True), "".join(pieces[:first]), ""
    for number, piece in enumerate(pieces):
        if not machine.found:
            received += piece
        machine.push(piece, may_stop=number >= first)
    machine.flush()
    expected, found = cut(pieces[first:], stops)
    shown = silent + expected
    ends = [stop for stop in stops if received.startswith(shown + stop)]
    assert machine.found == found
    assert machine.text == shown + (min(ends, key=len) if found else "")
