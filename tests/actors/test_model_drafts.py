"""Answers with a model's drafts are those without, and a draft of equal weights is always right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.draft_policy import FixedPolicy
from hotcold.actors.driver.drafts import ModelDrafter
from hotcold.actors.protocol.messages import NO_MODEL, GenerateRequest
from hotcold.actors.telemetry.step_times import StepTimes
from tests.actors.batching import Answer, answer, answers, batching, greedy, mode_of
from tests.actors.in_process import InProcessSystem
from tests.actors.test_speculation import beside, drafting, varied
from tests.actors.test_stored_neurons import StoredSystem, packed
from tests.conftest import TinyCheckpoint
from tests.quantized_models import make_model
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A tiny model in float16, whose neurons are on storage too."""
    made = make_model("q-llama", tmp_path_factory.mktemp("q-llama") / "m")
    packed(made)
    return TinyCheckpoint(made)


def requests() -> list[GenerateRequest]:
    """Of varied lengths and ways to draw."""
    random, found = np.random.default_rng(5), []
    for seed in range(12):
        ids = random.integers(0, VOCAB_SIZE, int(random.integers(1, 90))).tolist()
        found.append(replace(varied(seed, ids), prompt_ids=ids))
    return found


@pytest.fixture(scope="module")
def wanted(model: TinyCheckpoint) -> list[Answer]:
    """The answers of a system without any draft."""
    with batching(model) as (_, driver):
        return answers(driver, requests())


@pytest.mark.parametrize(
    ("kind", "draft"), [(InProcessSystem, "q4"), (StoredSystem, "q4"), (InProcessSystem, NO_MODEL)]
)
def test_answers_are_those_without_drafts(
    model: TinyCheckpoint,
    wanted: list[Answer],
    kind: type[InProcessSystem],
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the model in 4 bits, its neurons in memory or on storage; by predicted neurons."""
    with batching(model, kind=kind, shares=True, draft=draft) as (system, driver):
        assert answers(driver, requests()) == wanted
        drafter = driver.drafter
        if draft == NO_MODEL:
            drafter = ModelDrafter(driver.engine, mode_of(system, "lowrank"))
        assert drafter is not None
        times, propose = StepTimes(), drafter.propose

        def timed(*given: Any) -> list[list[int]]:
            found = propose(*given)
            times.include(driver.engine.times)
            return found

        monkeypatch.setattr(drafter, "propose", timed)
        with drafting(driver, drafter, FixedPolicy(4), ngrams=draft != NO_MODEL):
            assert answers(driver, beside(requests(), "with drafts")) == wanted
        assert times.num_steps > 0
        assert draft != NO_MODEL or 0 < times.num_gates < times.num_tokens * 100 * 3


def test_all_of_a_greedy_draft_of_equal_weights_is_accepted(model: TinyCheckpoint) -> None:
    ids = np.random.default_rng(6).integers(0, VOCAB_SIZE, 11).tolist()
    request = greedy(ids, 33)
    with batching(model, weight_dtype="q4", draft="q4") as (_, driver):
        assert driver.drafter is not None
        plain = answer(driver, request)
        with drafting(driver, driver.drafter, FixedPolicy(3), ngrams=False):
            found = answer(driver, request)
    assert found == plain
    # The first token is the prompt's; 32 more come in steps of four.
    drafts = found.result.drafts
    assert (drafts.num_drafts, drafts.num_drafted) == (8, 24)
    assert drafts.accepted_at == [8, 8, 8] and drafts.by_source == {"model": [24, 24]}
