"""Services of a real system killed, stopped and broken while requests run: the tokens stay."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from hotcold.actors.faults.recovery import MAX_FAILURES
from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.actors.system import System
from hotcold.model.errors import ServiceError
from hotcold.model.sampling import SamplingParams
from hotcold.model.synthetic.make import make_model
from hotcold.model.synthetic.shape import resolve_shape
from tests.actors import batching
from tests.actors.batching import Background
from tests.actors.kept_system import (
    CONTEXT,
    NAME,
    KeptSystem,
    all_gone,
    config_of,
    forget_failures,
    greedy,
    in_driver,
)

pytestmark = pytest.mark.usefixtures("local_ray")

ENDLESS = 2000  # tokens; in a second or so


SIZES = (1, 10, 33, 64, 100, 200, 300, 300)


class Eight:
    """A system, eight requests that take a while, and what they give undisturbed.

    Or fewer: a prompt of each of `sizes`.
    """

    def __init__(self, system: System, num_tokens: int, sizes: Sequence[int] = SIZES) -> None:
        self.system = system
        random = np.random.default_rng(1)
        self.requests = [
            GenerateRequest(
                SamplingParams(max_tokens=num_tokens, temperature=n % 2, seed=n, ignore_eos=True),
                prompt_ids=random.integers(0, 101, size).tolist(),
            )
            for n, size in enumerate(sizes)
        ]
        self.expected = self.complete(lambda: None)

    def complete(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        """All side by side; `meanwhile` is called when the first tokens have come."""
        running = [Background(partial(self.system.complete, request)) for request in self.requests]
        meanwhile()
        results = [asked.end() for asked in running]
        assert all(isinstance(result, Generation) for result in results), results
        return [result.ids for result in results]

    def pids(self) -> dict[str, int]:
        found: dict[str, int] = self.system.call("processes")
        return found

    def handle(self, service: int) -> Any:
        """The actor of a service, as its driver knows it."""
        return in_driver(self.system, lambda host: host.services.connection.handles)[service]

    def next_pid(self, service: int, old: int) -> int:
        """The process that takes the place of `old`, as soon as it answers."""
        handle = self.handle(service)
        for _ in range(600):
            with suppress(ray.exceptions.RayError):
                pid = int(ray.get(handle.ping.remote(), timeout=10))
                if pid != old:
                    return pid
            threading.Event().wait(0.05)
        raise AssertionError(f"{old} is not replaced")


@pytest.fixture(scope="module")
def batch(kept: KeptSystem) -> Eight:
    return Eight(kept.system, 300)


@pytest.fixture
def eight(batch: Eight) -> Eight:
    in_driver(batch.system, forget_failures)
    return batch


def fault_after(eight: Eight, name: str, number: signal.Signals, wait_s: float) -> None:
    pid = eight.pids()[name]
    threading.Event().wait(wait_s)
    os.kill(pid, number)


def test_a_lost_service_changes_no_token(eight: Eight, capfd: pytest.CaptureFixture[str]) -> None:
    """One that hangs, somewhere in a batch of eight: in a prompt, or later."""
    before = eight.pids()
    wait_s = float(np.random.default_rng().uniform(0.0, 0.5))
    found = eight.complete(lambda: fault_after(eight, "gpu", signal.SIGSTOP, wait_s))
    assert found == eight.expected
    after = eight.pids()
    assert {key for key in after if after[key] != before[key]} <= {"gpu"}
    if after == before:  # the fault came after the last token: the next request meets it
        assert eight.complete(lambda: None) == eight.expected
        assert eight.pids() != before
    assert not psutil.pid_exists(before["gpu"])
    assert eight.system.call("progress").stage == "ready"
    assert capfd.readouterr().out == ""  # where a user's answers stand


def test_a_second_failure_during_recovery(eight: Eight) -> None:
    """The process that is loading is killed too, and meanwhile another service."""
    before = eight.pids()

    def fault() -> None:
        os.kill(before["cpu0"], signal.SIGKILL)
        os.kill(eight.next_pid(1, before["cpu0"]), signal.SIGKILL)
        os.kill(before["gpu"], signal.SIGKILL)

    # Endless, so that the faults come in the middle of it.
    stream = eight.system.generate(batching.greedy([5], ENDLESS))
    endless = Background(lambda: list(stream)[-1].result)
    threading.Event().wait(0.1)
    fault()
    result = endless.end()
    assert isinstance(result, Generation) and len(result.ids) == ENDLESS
    assert eight.complete(lambda: None) == eight.expected
    after = eight.pids()
    assert after["gpu"] != before["gpu"] and after["cpu0"] != before["cpu0"]
    assert after["cpu1"] == before["cpu1"]


def test_after_ten_failures_it_gives_up(kept: KeptSystem, eight: Eight) -> None:
    """And the driver's death takes all processes with it."""
    before = eight.pids()

    def fail_often(host: Any) -> None:
        for _ in range(MAX_FAILURES - 1):
            host.services.policy.count({"gpu": "a test"})
            host.services.policy.recovered()

    in_driver(eight.system, fail_often)
    os.kill(before["cpu1"], signal.SIGKILL)
    for _ in range(2):  # those that come later hear it too
        with pytest.raises(ServiceError, match=r"10 failures in a minute.* cpu1 .* died") as e:
            eight.system.complete(eight.requests[0])
        assert "\n" not in str(e.value)
    last = eight.next_pid(2, before["cpu1"])
    os.kill(before["driver"], signal.SIGKILL)
    with pytest.raises(ServiceError, match="the driver"):
        eight.system.complete(eight.requests[0])
    assert all_gone([*before.values(), last])
    kept.end()
    assert System.attach(NAME) is None


@pytest.mark.thorough
def test_actor_calls_recover_too(kept: KeptSystem) -> None:
    """A system over actor calls, from the start to the death of its driver."""
    with System.start(config_of(kept.checkpoint, 1, "calls")) as system:
        eight = Eight(system, 12, (1, 10, 33, 100))  # in a process of its own each call costs more
        assert system.complete(greedy(kept.checkpoint)).ids == kept.checkpoint.greedy_ids
        assert system.call("scale", 2).num_cpu_actors == 2
        for name in ("gpu", "cpu1"):
            before = eight.pids()
            found = eight.complete(partial(fault_after, eight, name, signal.SIGKILL, 0.02))
            assert found == eight.expected
            assert eight.complete(lambda: None) == eight.expected
            assert eight.pids()[name] != before[name]
        pids = eight.pids()
        stream = system.generate(greedy(kept.checkpoint, max_tokens=CONTEXT))
        next(stream)
        os.kill(pids["driver"], signal.SIGKILL)
        with pytest.raises(ServiceError, match="the driver died") as caught:
            list(stream)
        assert "\n" not in str(caught.value)
        with pytest.raises(ServiceError, match="driver"):
            system.complete(greedy(kept.checkpoint))
    assert all_gone(pids.values())


@pytest.mark.thorough
def test_a_service_of_many_neurons_comes_back(local_ray: None, tmp_path: Path) -> None:
    """What Ray starts its process with again is small: larger things may be gone by then."""
    make_model(tmp_path, resolve_shape("tiny", {"ffn": 16384, "layers": 2}))
    with System.start(SystemConfig(str(tmp_path), num_cpu_actors=1, num_threads=2)) as system:
        eight = Eight(system, 12)
        ids = system.call("processes")
        assert sum(ids.nbytes for ids in neuron_ids(system)) > 100 << 10
        found = eight.complete(partial(fault_after, eight, "cpu0", signal.SIGKILL, 0.0))
        assert found == eight.expected == eight.complete(lambda: None)
        assert eight.pids()["cpu0"] != ids["cpu0"]


def neuron_ids(system: System) -> list[np.ndarray]:
    """Those of the first CPU service, by layers."""
    found: list[np.ndarray] = in_driver(
        system, lambda host: host.services.connection.specs[1].neuron_ids
    )
    return found
