"""Answers with a model's drafts are those without, and a draft of equal weights is always right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.draft_policy import FixedPolicy
from hotcold.actors.driver.drafts import ModelDrafter
from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.failures import ServiceLost
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.serve.mailbox import DRAFT, WEIGHTS
from tests.actors.batching import CONTEXT, mode_of
from tests.actors.changing_services import (
    config_of,
    driver_of,
    greedy,
    scale_among_requests,
    tokens,
)
from tests.actors.in_process import InProcessSystem
from tests.actors.stand_in_ray import StandInRay, StandInSystem, stand_in_system
from tests.actors.test_speculation import answer, answers, beside, drafting, varied
from tests.actors.test_stored_neurons import StoredSystem, packed
from tests.predictor_layers import write_sign_predictors
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


def plain_tokens(path: Path, host: StandInRay) -> list[list[int]]:
    """Of a system without drafts."""
    with stand_in_system(host, config_of(path, weight_dtype="q4")) as system:
        return tokens(system)


@contextmanager
def drafting_system(path: Path, host: StandInRay) -> Iterator[tuple[StandInSystem, ModelDrafter]]:
    """A system whose draft has the weights of the model, so all that it proposes is accepted."""
    with stand_in_system(host, config_of(path, weight_dtype="q4", draft="q4")) as system:
        driver = driver_of(system)
        assert driver.drafter is not None
        with drafting(driver, driver.drafter, FixedPolicy(3), ngrams=False):
            yield system, driver.drafter


def require_right_drafts(system: StandInSystem, drafter: ModelDrafter) -> None:
    """Several steps drafted, and the model chose the same."""
    before = drafter.times.num_steps
    *_, last = driver_of(system).generate(greedy(7, 21))
    assert last.result is not None
    assert last.result.drafts.accepted_at == [5, 5, 5]
    assert drafter.times.num_steps == before + 15


@pytest.mark.parametrize("service", [0, 1])
def test_a_service_that_is_lost_in_a_draft(path: Path, host: StandInRay, service: int) -> None:
    """The process in its place has both weights."""
    expected = plain_tokens(path, host)
    with drafting_system(path, host) as (system, drafter):
        requests = driver_of(system).engine.exchange.buffers.requests

        def lose(services: Sequence[int]) -> None:
            if service in services and requests[service, WEIGHTS] == DRAFT:
                host.on_request = lambda services: None
                raise ServiceLost(service, f"service {service} died in a draft")

        host.on_request = lose
        old = system.service(["gpu", "cpu0"][service]).service
        assert tokens(system) == expected
        assert system.service(["gpu", "cpu0"][service]).service is not old
        require_right_drafts(system, drafter)


def test_predictors_that_draft_follow_the_services(path: Path, host: StandInRay) -> None:
    """Each service's neurons are chosen by their own predictors, whoever holds them."""
    expected = plain_tokens(path, host)
    file = write_sign_predictors(path, seed=1)
    options = {"draft": "predicted", "draft_predictors_path": str(file)}
    with stand_in_system(host, config_of(path, weight_dtype="q4", **options)) as system:
        driver = driver_of(system)
        assert driver.drafter is not None and driver.engine.mode.predictor is None
        with drafting(driver, driver.drafter, FixedPolicy(3), ngrams=False):
            assert tokens(system) == expected
            drafted = [last_drafts(system)]
            for count in (3, 1):
                outcome, found = scale_among_requests(system, count)
                assert outcome.num_cpu_actors == count and found == expected
                drafted.append(last_drafts(system))
    assert drafted[1:] == drafted[:1] * 2
    assert 0 < driver.drafter.times.num_gates < driver.drafter.times.num_tokens * 300


def last_drafts(system: StandInSystem) -> tuple[int, list[int]]:
    """How many tokens were drafted for a request, and how many were accepted by position."""
    *_, last = driver_of(system).generate(greedy(7, 21))
    assert last.result is not None
    return last.result.drafts.num_drafted, last.result.drafts.accepted_at
