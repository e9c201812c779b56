"""Another number of CPU services: by what runs, and whole or not at all."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotcold.actors.exchange.recovery import MAX_FAILURES
from hotcold.actors.protocol.kv_pool import KvPool
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup import connection
from hotcold.model.errors import CheckpointError, ServiceError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.placement.profile import PROFILE_FILE, ActivationProfile, write_profile
from tests.actors.batching import Background
from tests.actors.changing_services import (
    KINDS,
    SIZES,
    complete,
    config_of,
    driver_of,
    greedy,
    hot_of,
    require_whole,
    scale_among_requests,
    start_of,
    tokens,
)
from tests.actors.kept_system import wait_until
from tests.actors.stand_in_ray import StandInRay, lose_once, stand_in_ray, stand_in_system
from tests.conftest import TinyCheckpoint
from tests.predictor_layers import write_sign_predictors

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("one_torch_thread")]
Tiny = Callable[..., TinyCheckpoint]


@pytest.mark.parametrize("kind", KINDS)
def test_up_and_down(copied: TinyCheckpoint, host: StandInRay, kind: str) -> None:
    """A GPU's plan that the CPU carries out counts no neuron twice."""
    with stand_in_system(host, start_of(kind, copied.path, host)) as system:
        expected, hot = tokens(system), hot_of(system)
        assert any(ids.size for ids in hot) == (kind != "cpu")
        request = replace(greedy(1, 20), prompt_ids=copied.ids[:10].tolist())
        for count in (3, 1):
            outcome, found = scale_among_requests(system, count)
            assert outcome.num_cpu_actors == count and found == expected
            require_whole(system, count, hot)
            assert complete(system, request) == copied.greedy_ids[:20]


def test_an_arena_that_was_left_is_let_go_of(
    copied: TinyCheckpoint, host: StandInRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though there was telemetry, once: there may be no memory for a third."""
    arenas: list[weakref.ref[np.ndarray]] = []
    put_arena = connection.put_arena  # the stand-in's

    def noted(arena: np.ndarray) -> tuple[Any, np.ndarray]:
        arena_ref, mapped = put_arena(arena)
        arenas.append(weakref.ref(mapped))
        return arena_ref, mapped

    monkeypatch.setattr(connection, "put_arena", noted)
    with stand_in_system(host, config_of(copied.path)) as system:
        assert len(system.actor.telemetry(600.0).actors) == 3  # the driver too
        system.actor.scale(2)
        for actor in set(host.actors) - set(host.alive()):
            del actor.service  # a process that has ended holds nothing
        deadline = time.monotonic() + 60
        while arenas[0]() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        assert [arena() is None for arena in arenas] == [True, False]


def test_a_profile_that_is_written_meanwhile(copied: TinyCheckpoint, host: StandInRay) -> None:
    """What fires most often is known better now, but the GPU has what it has."""
    with stand_in_system(host, start_of("cuda", copied.path, host)) as system:
        expected, hot = tokens(system), hot_of(system)
        config = driver_of(system).generator.config
        counts = np.zeros((config.num_layers, config.ffn_size), np.int64)
        counts[:, 0::4] = 9
        file = artifact_path(copied.path, PROFILE_FILE)
        profile = ActivationProfile(counts, 10, "text", "")
        write_profile(file, ModelIdentity.of(copied.path), profile)
        system.actor.scale(2)
        require_whole(system, 2, hot)
        assert tokens(system) == expected


def test_predictors_that_are_made_anew_meanwhile(copied: TinyCheckpoint, host: StandInRay) -> None:
    file = write_sign_predictors(copied.path, 1)
    config = config_of(copied.path, mode="sign", predictors_path=str(file))
    with stand_in_system(host, config) as system:
        expected = tokens(system)
        assert expected != tokens_in_mode(host, replace(config, mode="exact"))
        write_sign_predictors(copied.path, 2)
        for count in (3, 2):
            outcome, found = scale_among_requests(system, count)
            assert outcome.num_cpu_actors == count
            assert found == tokens(system) == expected


def tokens_in_mode(host: StandInRay, config: SystemConfig) -> list[list[int]]:
    with stand_in_system(host, config) as system:
        return tokens(system)


def change_model(path: Path) -> None:
    """Another model at the same place."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 2000}))


def test_a_model_that_is_changed_meanwhile(copied: TinyCheckpoint, host: StandInRay) -> None:
    """New services would have other weights than those that run."""
    with stand_in_system(host, config_of(copied.path)) as system:
        expected = tokens(system)
        change_model(copied.path)
        with pytest.raises(CheckpointError, match="may be another model than when the system"):
            system.actor.scale(2)
        require_whole(system, 1, hot_of(system))
        assert tokens(system) == expected


class Refused(ServiceError):
    """What a test lets fail."""


def fail(*arguments: Any, **options: Any) -> Any:
    raise Refused("a test says no")


def test_what_fails_before_the_change_changes_nothing(
    copied: TinyCheckpoint,
    host: StandInRay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stand_in_system(host, config_of(copied.path)) as system:
        expected = tokens(system)
        with monkeypatch.context() as patch:
            patch.setattr(KvPool, "copy_to", fail)
            outcome, found = scale_among_requests(system, 3)
        assert isinstance(outcome, Refused) and found == expected
        require_whole(system, 1, hot_of(system))
        assert system.actor.scale(2).num_cpu_actors == 2
        require_whole(system, 2, hot_of(system))
        assert tokens(system) == expected


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_fails_half_way_ends_the_system(
    copied: TinyCheckpoint, host: StandInRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one line for every caller: none gets tokens of a system that is not whole.

    The thread that would prepare long prompts ends, too, and says nothing.
    """
    with stand_in_system(host, config_of(copied.path)) as system:

        def break_down(*arguments: Any) -> None:
            raise TypeError("a mistake")

        monkeypatch.setattr("hotcold.actors.processes.scaling.move_attention", break_down)
        outcome, found = scale_among_requests(system, 2)
        line = (
            "the system ended while its CPU services were changed: TypeError: a mistake; "
            "start again"
        )
        assert [str(error) for error in (outcome, *found)] == [line] * (1 + len(SIZES))
        for call in (lambda: complete(system, greedy(3)), system.actor.driver_load):
            with pytest.raises(ServiceError) as caught:
                call()
            assert str(caught.value) == line
        assert wait_until(lambda: all(one.name != "prompts" for one in threading.enumerate()))


def test_a_gpu_service_that_never_comes_back_ends_the_system(
    copied: TinyCheckpoint, host: StandInRay
) -> None:
    with stand_in_system(host, config_of(copied.path)) as system:
        gpu = system.service("gpu")
        gpu.before["join"] = gpu.kill
        gpu.before["load"] = gpu.kill  # and each that comes in its place
        outcome, found = scale_among_requests(system, 2)
        line = str(outcome)
        assert line.startswith("the system ended while its CPU services were changed: ")
        assert f"{MAX_FAILURES} failures" in line and "\n" not in line
        assert [str(error) for error in found] == [line] * len(SIZES)


def test_a_gpu_service_that_is_lost_as_it_moves(copied: TinyCheckpoint, host: StandInRay) -> None:
    """Killed or stopped at any call: its requests are recomputed on the new services."""
    with stand_in_system(host, config_of(copied.path)) as system:
        expected, count = tokens(system), 1
        for method in ("join", "attach"):
            for what in ("kill", "stop"):
                gpu, count = system.service("gpu"), 3 - count
                pid = gpu.pid

                def once(gpu: Any = gpu, method: str = method, what: str = what) -> None:
                    del gpu.before[method]
                    getattr(gpu, what)()

                gpu.before[method] = once
                outcome, found = scale_among_requests(system, count)
                assert outcome.num_cpu_actors == count, outcome
                assert found == tokens(system) == expected
                assert not gpu.before and system.service("gpu").pid != pid
                require_whole(system, count, hot_of(system))


_STEPS = st.one_of(
    st.tuples(st.just("scale"), st.integers(1, 3)), st.tuples(st.just("lose"), st.integers(0, 3))
)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KINDS), st.lists(_STEPS, min_size=1, max_size=4))
def test_tokens_do_not_depend_on_what_happens_to_services(
    tiny: Tiny, kind: str, steps: list[tuple[str, int]]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, stand_in_ray(monkeypatch) as host:
        checkpoint, count = tiny("llama-relu"), 1
        with stand_in_system(host, start_of(kind, checkpoint.path, host)) as system:
            expected, hot = tokens(system), hot_of(system)
            for what, number in steps:
                if what == "scale":
                    _, found = scale_among_requests(system, number)
                    count = number
                else:
                    lose_once(host, number % (1 + count))
                    running = [
                        Background(partial(complete, system, greedy(size))) for size in SIZES
                    ]
                    found = [one.end() for one in running]
                assert found == expected
                require_whole(system, count, hot)
