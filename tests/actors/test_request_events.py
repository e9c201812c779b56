"""Events of many requests together, and the logprobs in them; beside the float64 reference."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.outputs import AnswerLogprobs
from hotcold.actors.protocol.messages import (
    GenerateRequest,
    ReaderEpoch,
    TokenEvent,
    TokenLogprob,
)
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from hotcold.model.text.tokenizer import Tokenizer
from tests.actors.batching import WAIT_S, batching
from tests.conftest import TinyCheckpoint
from tests.reference import reference_logits

Tiny = Callable[..., TinyCheckpoint]
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
