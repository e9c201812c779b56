"""Answers with a model's drafts are those without, and a draft of equal weights is always right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.draft_policy import FixedPolicy
from hotcold.actors.driver.drafts import ModelDrafter
from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import CONTEXT, mode_of
from tests.actors.in_process import InProcessSystem
from tests.actors.test_speculation import answer, answers, beside, drafting, varied
from tests.actors.test_stored_neurons import StoredSystem, packed
from tests.quantized_models import make_model
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in float16, whose neurons are on storage too."""
    made = make_model("q-llama", tmp_path_factory.mktemp("q-llama") / "m")
    packed(made)
    return made


@contextmanager
def driven(
    path: Path, kind: Callable[..., InProcessSystem] = InProcessSystem, **options: Any
) -> Iterator[tuple[InProcessSystem, Driver]]:
    """A driver of up to 8 requests at once on two services of two threads."""
    settings = {"num_positions": CONTEXT, "num_slots": 8, "kv_positions": 8 * CONTEXT}
    with kind(path, 2, 2, **settings, **options) as system:
        config = SystemConfig(
            str(path), context_length=CONTEXT, kv_positions=8 * CONTEXT, draft=system.draft
        )
        driver = Driver(config, system.exchange, system.topology)
        try:
            yield system, driver
        finally:
            driver.close()


def requests() -> list[GenerateRequest]:
    """Of varied lengths and ways to draw."""
    random, found = np.random.default_rng(5), []
    for seed in range(12):
        ids = random.integers(0, VOCAB_SIZE, int(random.integers(1, 90))).tolist()
        found.append(replace(varied(seed, ids), prompt_ids=ids))
    return found


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[Any]:
    """The answers of a system without any draft."""
    with driven(path) as (_, driver):
        return answers(driver, requests())


@pytest.mark.parametrize("kind", [InProcessSystem, StoredSystem])
def test_answers_are_those_without_drafts(
    path: Path, wanted: list[Any], kind: Callable[..., InProcessSystem]
) -> None:
    with driven(path, kind, draft="q4") as (_, driver):
        assert answers(driver, requests()) == wanted
        assert driver.drafter is not None
        with drafting(driver, driver.drafter, FixedPolicy(4), ngrams=True):
            assert answers(driver, beside(requests(), "with drafts")) == wanted
        assert driver.drafter.times.num_steps > 0


def test_answers_are_those_without_predicted_drafts(path: Path, wanted: list[Any]) -> None:
    with driven(path) as (system, driver):
        drafter = ModelDrafter(driver.engine, mode_of(system, "lowrank"))
        with drafting(driver, drafter, FixedPolicy(4), ngrams=False):
            assert answers(driver, requests()) == wanted
        assert 0 < drafter.times.num_gates < drafter.times.num_tokens * 100 * 3


def test_all_of_a_greedy_draft_of_equal_weights_is_accepted(path: Path) -> None:
    ids = np.random.default_rng(6).integers(0, VOCAB_SIZE, 11).tolist()
    sampling = SamplingParams(max_tokens=33, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(sampling, prompt_ids=ids, request_id="greedy")
    with driven(path, weight_dtype="q4", draft="q4") as (_, driver):
        assert driver.drafter is not None
        plain, _ = answer(driver, request)
        with drafting(driver, driver.drafter, FixedPolicy(3), ngrams=False):
            found, result = answer(driver, replace(request, request_id="drafted"))
    assert found == plain
    # The first token is the prompt's; 32 more come in steps of four.
    assert result.drafts.num_drafts == 8
    assert result.drafts.accepted_at == [8, 8, 8]
    assert result.drafts.num_drafted == 24
    assert result.drafts.by_source == {"model": [24, 24]}
