"""Random numbers and state of a request's draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.sampler import TokenSampler
from hotcold.actors.protocol.messages import GenerateRequest, Grammar
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import batching, complete, random_request, start
from tests.conftest import TinyCheckpoint

Tiny = Callable[..., TinyCheckpoint]
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


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_same_alone_and_beside_others(tiny: Tiny, options: dict[str, Any]) -> None:
    checkpoint = tiny("llama-relu")
    sampling = SamplingParams(max_tokens=24, temperature=1.2, ignore_eos=True, seed=5, **options)
    request = GenerateRequest(sampling, prompt_ids=[5, 9, 17, 40, 3], request_id="a")
    with batching(checkpoint, "dense") as (_, driver):
        alone = complete(driver, request).ids
        others = [start(driver, random_request(seed)) for seed in range(4)]
        assert start(driver, replace(request, request_id="b")).end().ids == alone
        assert not any(isinstance(other.end(), Exception) for other in others)
        second = replace(sampling, seed=6)
        assert complete(driver, replace(request, sampling=second)).ids != alone


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
