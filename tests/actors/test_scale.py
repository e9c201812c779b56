"""More and fewer CPU services while requests run: no request is lost, greedy tokens stay."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from hotcold.actors.driver.draft_policy import FixedPolicy
from hotcold.actors.driver.drafts import Speculation
from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.placement_choice import plan_request
from hotcold.actors.system import System
from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, MemoryBudgetError, ServiceError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.plan import plan_path, write_plan
from tests.actors.batching import Background, greedy
from tests.actors.kept_system import (
    KeptSystem,
    all_gone,
    forget_failures,
    in_driver,
    wait_until,
)
from tests.actors.stand_in_host import Forgetful, WithoutGpu, start_stand_in
from tests.actors.test_placement_choice import WITH_GPU
from tests.conftest import TinyCheckpoint
from tests.draft_layer_models import DraftedModel
from tests.placement_cases import make_plan
from tests.predictor_layers import write_sign_predictors
from tests.quantized_models import make_model

pytestmark = pytest.mark.usefixtures("local_ray")

ROOT = Path(__file__).resolve().parents[2]


def request_of(size: int, num_tokens: int) -> GenerateRequest:
    return greedy(np.random.default_rng(size).integers(0, 101, size), num_tokens)


def asked(system: System, request: GenerateRequest) -> Background:
    return Background(lambda: system.complete(request))


def ids_of(system: System, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    """The answers to requests that run side by side."""
    return [one.end().ids for one in [asked(system, request) for request in requests]]


def test_services_come_and_go_while_requests_run(kept: KeptSystem) -> None:
    system = kept.system
    requests = [request_of(size, 600) for size in (3, 40, 600)]
    expected = ids_of(system, requests)
    before = system.call("processes")
    running = [asked(system, request) for request in requests]
    assert system.call("scale", 1).num_cpu_actors == 1
    assert [one.end().ids for one in running] == expected
    fewer = system.call("processes")
    assert set(fewer) == {"driver", "gpu", "cpu0"}
    assert fewer["gpu"] == before["gpu"]  # it has stayed, with its KV cache
    assert fewer["cpu0"] not in before.values()
    assert all_gone([before["cpu0"], before["cpu1"]])
    running = [asked(system, request) for request in requests]
    os.kill(fewer["gpu"], signal.SIGKILL)  # what was scaled recovers as before
    os.kill(fewer["cpu0"], signal.SIGKILL)
    assert [one.end().ids for one in running] == expected
    running = [asked(system, request) for request in requests]
    assert system.call("scale", 2).num_cpu_actors == 2
    assert [one.end().ids for one in running] == expected
    assert set(system.call("processes")) == {"driver", "gpu", "cpu0", "cpu1"}
    assert system.complete(requests[1]).ids == expected[1]
    window = requests[1].prompt_ids
    assert np.isfinite(system.call("score_window", window, 3, False).nll).all()


def test_what_cannot_be_had_leaves_all_as_it_was(kept: KeptSystem) -> None:
    """Too many, too little memory, what fails before the change, a new service that is stopped."""
    system, request = kept.system, request_of(20, 30)
    expected, before = system.complete(request).ids, system.call("processes")
    with pytest.raises(UsageError, match=r"--cpu-actors 3 is not within 1\.\.2"):
        system.call("scale", 3)
    spoilt: list[tuple[Callable[[Any], None], type[Exception], str]] = [
        (without_memory, MemoryBudgetError, "MiB are missing"),
        (fail_to_copy, ServiceError, "a test says no"),
        (stop_new_ones, ServiceError, "the number of CPU services stays 2: the cpu0 service does"),
    ]
    for spoil, kind, told in spoilt:
        in_driver(system, spoil)
        with pytest.raises(kind, match=told) as caught:
            system.call("scale", 1)
        assert "\n" not in str(caught.value)
        in_driver(system, mend)
        assert system.call("processes") == before
        assert system.complete(request).ids == expected


def spoil(host: Any, target: Any, name: str, spoilt: Any) -> None:
    """Put something in the place of an attribute, in the driver's process."""
    host.mended = target, name, getattr(target, name)
    setattr(target, name, spoilt)


def mend(host: Any) -> None:
    setattr(*host.mended)


def without_memory(host: Any) -> None:
    from hotcold.actors.processes import scaling

    spoil(host, scaling, "free_bytes", lambda: 1 << 20)


def fail_to_copy(host: Any) -> None:
    from hotcold.actors.kv_cache.pool import KvPool

    def fail(*arguments: Any) -> None:
        raise ServiceError("a test says no")

    spoil(host, KvPool, "copy_to", fail)


def stop_new_ones(host: Any) -> None:
    from hotcold.actors.setup.connection import Connection

    load = Connection.load

    def stopping(new: Connection, services: Any) -> None:
        for service in services:
            os.kill(ray.get(new.handles[service].ping.remote()), signal.SIGSTOP)
        load(new, services)

    spoil(host, Connection, "load", stopping)


def break_down(host: Any) -> None:
    from hotcold.actors.processes import scaling

    def fail(*arguments: Any) -> None:
        raise TypeError("a mistake")

    spoil(host, scaling, "move_attention", fail)


def test_services_that_are_lost_while_others_come(kept: KeptSystem) -> None:
    """Killed or stopped at any moment; requests are recomputed on those that serve then."""
    system, random = kept.system, np.random.default_rng()
    requests = [request_of(size, 400) for size in (3, 40, 300)]
    expected = ids_of(system, requests)
    for name, number in (
        ("gpu", signal.SIGSTOP), ("cpu0", signal.SIGKILL),
    ):  # fmt: skip
        in_driver(system, forget_failures)
        count, pid = 3 - system.call("describe").num_cpu_actors, system.call("processes")[name]
        running = [asked(system, request) for request in requests]
        scaling = Background(partial(system.call, "scale", count))
        threading.Event().wait(float(random.uniform(0.0, 0.8)))
        with suppress(ProcessLookupError):  # it has ended already
            os.kill(pid, number)
        outcome = scaling.end()
        if isinstance(outcome, Exception):  # it was lost before the others could begin
            assert str(outcome).startswith(f"the number of CPU services stays {3 - count}: ")
            count = 3 - count
        assert [one.end().ids for one in running] == expected
        assert system.call("describe").num_cpu_actors == count
        assert ids_of(system, requests) == expected
    in_driver(system, forget_failures)
    system.call("scale", 2)  # as other tests find it


def config_of(path: Path, **options: Any) -> SystemConfig:
    return SystemConfig(
        str(path), num_cpu_actors=1, num_threads=2, context_length=256, max_batch=4,
        kv_positions=1024, kv_dtype="float32", prefill_chunk=64, **options,
    )  # fmt: skip


def test_what_is_written_meanwhile_changes_nothing(copied: TinyCheckpoint) -> None:
    """Predictors and profiles; of another model new services would have other weights."""
    file = write_sign_predictors(copied.path, 1)
    config = config_of(copied.path, mode="sign", predictors_path=str(file))
    requests = [request_of(size, 16) for size in (5, 70, 20)]
    with System.start(config) as system:
        expected = ids_of(system, requests)
        in_driver(system, keep_arena)
        write_sign_predictors(copied.path, 2)
        assert len(system.call("telemetry", 600.0).actors) == 3
        system.call("scale", 2)
        assert ids_of(system, requests) == expected
        # There may be no memory for a third arena.
        assert wait_until(lambda: in_driver(system, has_let_go))
        described = copied.path / "config.json"
        changed = json.loads(described.read_text()) | {"max_position_embeddings": 2000}
        described.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match="may be another model than when the system"):
            system.call("scale", 1)
        assert ids_of(system, requests) == expected


def keep_arena(host: Any) -> None:
    """Remember the arena that the driver uses now, for as long as somebody else does."""
    arena = host.services.connection.exchange.buffers.hidden
    while isinstance(arena.base, np.ndarray):
        arena = arena.base
    host.left_arena = weakref.ref(arena)


def has_let_go(host: Any) -> bool:
    gc.collect()
    return host.left_arena() is None


def test_what_fails_half_way_ends_the_system(copied: TinyCheckpoint) -> None:
    """With one line for every caller: none gets tokens of a system that is not whole."""
    with System.start(config_of(copied.path)) as system:
        running = [asked(system, request_of(size, 200)) for size in (5, 40)]
        in_driver(system, break_down)
        outcome = Background(partial(system.call, "scale", 2)).end()
        line = "the system ended while its CPU services were changed: TypeError: a mistake; "
        assert str(outcome) == line + "start again"
        assert {str(one.end()) for one in running if not isinstance(one.end(), Generation)} <= {
            str(outcome)
        }
        for _ in range(2):
            with pytest.raises(ServiceError) as caught:
                system.complete(request_of(3, 3))
            assert str(caught.value) == str(outcome)


def test_a_service_that_lacks_a_neuron(copied: TinyCheckpoint, tmp_path: Path) -> None:
    """The system does not start; where it comes back so, it ends."""
    config, broken = config_of(copied.path), tmp_path / "broken"
    broken.touch()
    with pytest.raises(ServiceError, match="of layer 0, 1 are in no service and 0 too many"):
        start_stand_in(config, broken, Forgetful)
    broken.unlink()
    with start_stand_in(config, broken, Forgetful) as system:
        system.complete(request_of(3, 3))
        broken.touch()
        os.kill(system.call("processes")["cpu0"], signal.SIGKILL)
        with pytest.raises(ServiceError, match="the cpu0 service came back with other neurons"):
            for _ in range(100):
                system.complete(request_of(3, 3))


def test_a_gpus_plan_that_the_cpu_carries_out(copied: TinyCheckpoint, tmp_path: Path) -> None:
    """It counts no neuron twice, with any number of CPU services, whatever plan comes later."""
    system, config = config_of(copied.path, device="cuda"), read_config(copied.path)
    plan = make_plan(config, WITH_GPU, None, plan_request(system, SystemOptions(), "", None))
    file = plan_path(copied.path, plan.request)
    for seed in (1, 2):
        places = np.random.default_rng(seed).choice(2, plan.neuron_device.shape).astype(np.int16)
        write_plan(file, ModelIdentity.of(copied.path), replace(plan, neuron_device=places))
        if seed == 1:
            running = start_stand_in(
                replace(system, plan_path=str(file)), tmp_path / "broken", WithoutGpu
            )
    request = greedy(copied.ids[:10], 20)
    with running:
        for count in (1, 2):
            assert running.call("scale", count).num_cpu_actors == count
            assert running.complete(request).ids == copied.greedy_ids[:20]
            neurons = running.call("telemetry").neurons
            assert neurons.num_neurons.sum() == config.num_neurons and neurons.num_hot.any()


@pytest.mark.parametrize("draft", ["q4", "mtp"])
def test_a_drafting_system_that_loses_services(tmp_path: Path, draft: str) -> None:
    """Who comes has both weights: a draft of the same weights is always right."""
    path, dtype = tmp_path / "model", "q4" if draft == "q4" else ""
    if draft == "q4":
        make_model("q-llama", path)
    else:
        DraftedModel("qwen3.5", path)
    requests = [request_of(size, 21) for size in (5, 70, 7)]
    with System.start(config_of(path, weight_dtype=dtype, draft=draft)) as system:
        expected = ids_of(system, requests)
        in_driver(system, draft_always)
        for names in (("gpu", "cpu0"), ()):
            running = [asked(system, request) for request in requests]
            for name in names:
                os.kill(system.call("processes")[name], signal.SIGKILL)
            if not names:
                system.call("scale", 2)
            assert [one.end().ids for one in running] == expected
            result = system.complete(requests[-1])
            assert result.ids == expected[-1] and result.drafts.num_drafts > 0
            assert draft == "mtp" or result.drafts.accepted_at == [5, 5, 5]


def draft_always(host: Any) -> None:
    driver = host.services.driver
    made = Speculation(FixedPolicy(3), driver.drafter, has_ngrams=False)
    driver._scheduler.between_steps(lambda: setattr(driver._scheduler, "speculation", made))
