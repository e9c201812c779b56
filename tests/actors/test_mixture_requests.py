"""Requests of mixtures of experts: tokens of transformers, in whatever company, drafts, pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from hotcold.actors.driver.draft_policy import FixedPolicy
from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import batching
from tests.actors.test_batching import all_pages_are_free, greedy
from tests.actors.test_speculation import (
    Answer,
    NastyDrafter,
    answer,
    answers,
    beside,
    drafting,
    repetitive,
)
from tests.conftest import TinyCheckpoint
from tests.tiny_checkpoint import GREEDY_TOKENS
from tests.tiny_models import VOCAB_SIZE

Tiny = Callable[..., TinyCheckpoint]
Running = tuple[TinyCheckpoint, Driver]


@pytest.fixture(scope="module", params=["gpt-oss", "glm4-moe-groups", "smallthinker"])
def checkpoint(request: pytest.FixtureRequest, tiny: Tiny) -> TinyCheckpoint:
    return tiny(request.param)


@pytest.fixture(scope="module")
def driver(checkpoint: TinyCheckpoint) -> Iterator[Driver]:
    """Of a system that computes each prompt anew."""
    with batching(checkpoint) as (_, running):
        yield running


def test_greedy_tokens_are_those_of_transformers(
    checkpoint: TinyCheckpoint, driver: Driver
) -> None:
    request = greedy(checkpoint.ids[:10].tolist(), GREEDY_TOKENS, "greedy")
    assert answer(driver, request)[0][0] == checkpoint.greedy_ids


def long_requests() -> list[GenerateRequest]:
    """Of prompts that end in a page or fill it, of one text; with logprobs."""
    ids = np.random.default_rng(5).integers(0, VOCAB_SIZE, 320).tolist()
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=1, ignore_eos=True)
    return [
        GenerateRequest(sampling, prompt_ids=ids[:size], num_logprobs=2, request_id=f"long {size}")
        for size in (300, 64, 129, 33)
    ]


def test_bits_do_not_depend_on_company_or_drafts(driver: Driver) -> None:
    """Prompts of matrix products beside steps, several at once; drafts that are right or wrong."""
    requests = [*(repetitive(seed) for seed in range(8)), *long_requests()]
    alone = [answer(driver, request)[0] for request in requests]
    assert answers(driver, beside(requests, "together")) == alone
    drafter = NastyDrafter(3, VOCAB_SIZE)
    drafter.answers = {one.request_id: found[0] for one, found in zip(requests, alone, strict=True)}
    with drafting(driver, drafter, FixedPolicy(5), ngrams=True):
        assert answers(driver, beside(requests, "with drafts")) == alone
    assert drafter.num_calls
    assert all_pages_are_free(driver)


def test_bits_do_not_depend_on_chunks_and_kept_beginnings(
    checkpoint: TinyCheckpoint, driver: Driver
) -> None:
    requests = long_requests()
    expected = [answer(driver, request)[0] for request in requests]
    with batching(checkpoint, shares=True, max_tokens=200) as (_, sharing):
        for turn in ("first", "again"):
            found: list[Answer] = []
            num_cached = 0
            for request in beside(requests, turn):
                one, result = answer(sharing, request)
                found.append(one)
                num_cached += result.num_cached_tokens
            assert found == expected
            assert num_cached


def test_bits_do_not_depend_on_company_with_another_cache(tiny: Tiny) -> None:
    """Sinks and windows, by gpt-oss."""
    with batching(tiny("gpt-oss"), kv_dtype="q8") as (_, driver):
        requests = [repetitive(3), *long_requests()]
        alone = [answer(driver, request)[0] for request in requests]
        assert answers(driver, beside(requests, "together")) == alone
        again = replace(requests[1], request_id="again")
        assert answer(driver, again)[0] == alone[1]
