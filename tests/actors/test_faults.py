"""Services of a real system killed, stopped and broken while requests run: the tokens stay."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from actors.exchange.recovery import MOST_FAILURES
from actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from actors.protocol.step_sizes import ProductChoice
from actors.system import System
from model.errors import ServiceError
from model.sampling import SamplingParams
from tests.actors.batching import Asking
from tests.conftest import TinyCheckpoint

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

Tiny = Callable[..., TinyCheckpoint]
CONTEXT = 4096


def call_where_loaded(host: Any, pid: int, function: Callable[[Any], None]) -> bool:
    """Whether process `pid` has loaded, and so was given to `function`, or is no more."""
    if os.getpid() != pid:
        return True
    if host._service is None or not hasattr(host._service, "wires"):
        return False
    function(host)
    return True


class Eight:
    """A system, eight requests that take a while, and what they give undisturbed."""

    def __init__(self, system: System, num_tokens: int) -> None:
        self.system = system
        random = np.random.default_rng(1)
        self.requests = [
            GenerateRequest(
                SamplingParams(max_tokens=num_tokens, temperature=n % 2, seed=n, ignore_eos=True),
                prompt_ids=random.integers(0, 101, size).tolist(),
            )
            for n, size in enumerate([1, 10, 33, 64, 100, 200, 300, 300])
        ]
        self.expected = self.complete(lambda: None)

    def complete(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        """All side by side; `meanwhile` is called when the first tokens have come."""
        running = [Asking(partial(self.system.complete, request)) for request in self.requests]
        meanwhile()
        results = [asked.end() for asked in running]
        assert all(isinstance(result, Generation) for result in results), results
        return [result.ids for result in results]

    def pids(self) -> dict[str, int]:
        found: dict[str, int] = self.system.call("processes")
        return found

    def handle(self, service: int) -> Any:
        """The actor of a service, as its driver knows it."""
        return ray.get(
            self.system._driver.__ray_call__.remote(lambda host: host.services.connection.handles)
        )[service]

    def in_service(self, service: int, function: Callable[[Any], None]) -> None:
        """Run a function in the process that a service has now, and in no later one.

        What takes its place while the answer is on its way must not be spoiled as well.
        """
        handle, pid = self.handle(service), list(self.pids().values())[1 + service]
        for _ in range(300):
            # The first call to a fresh process may meet the end of the one before it.
            with suppress(ray.exceptions.ActorUnavailableError):
                if ray.get(handle.__ray_call__.remote(call_where_loaded, pid, function)):
                    return
            threading.Event().wait(0.1)
        raise AssertionError("the service does not come back")

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


def config_of(checkpoint: TinyCheckpoint, exchange: str = "arena") -> SystemConfig:
    """A system whose prompts are multiplied as no process with bfloat16 would choose by itself."""
    return SystemConfig(
        str(checkpoint.path),
        num_cpu_actors=2,
        num_threads=2,
        context_length=CONTEXT,
        kv_positions=8 * CONTEXT,
        kv_dtype="float32",
        prefill_chunk=64,
        exchange=exchange,
        products=ProductChoice(bfloat16=False, integers=False),
    )


@pytest.fixture(scope="module")
def eight(local_ray: None, tiny: Tiny) -> Iterator[Eight]:
    """Shared by tests: a system is to be as good as new after every fault."""
    with System.start(config_of(tiny("llama-gqa", "float16"))) as system:
        yield Eight(system, 300)


def fault_after(eight: Eight, name: str, number: signal.Signals, wait_s: float) -> None:
    pid = eight.pids()[name]
    threading.Event().wait(wait_s)
    os.kill(pid, number)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("cpu0", signal.SIGKILL),
        ("gpu", signal.SIGKILL),
        ("gpu", signal.SIGSTOP),
    ],
)
def test_a_lost_service_changes_no_token(
    eight: Eight, name: str, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somewhere in a batch of eight: in a prompt, or later."""
    before = eight.pids()
    wait_s = float(np.random.default_rng().uniform(0.0, 0.5))
    found = eight.complete(lambda: fault_after(eight, name, number, wait_s))
    assert found == eight.expected
    after = eight.pids()
    assert {key for key in after if after[key] != before[key]} <= {name}
    if after == before:  # the fault came after the last token: the next request meets it
        assert eight.complete(lambda: None) == eight.expected
        assert eight.pids() != before
    assert not psutil.pid_exists(before[name])
    assert eight.system.call("progress").stage == "ready"
    assert capfd.readouterr().out == ""  # where a user's answers stand


@pytest.mark.parametrize("service", [0, 1])
def test_a_service_that_answers_nan_is_replaced(eight: Eight, service: int) -> None:
    def spoil(host: Any) -> None:
        arrays = host._service.arrays
        matrix = arrays.qkv if host.spec.index == 0 else arrays.down
        matrix[:] = 0x7E00  # a float16 NaN, as bits

    before = list(eight.pids().values())
    found = eight.complete(lambda: eight.in_service(service, spoil))
    if list(eight.pids().values()) == before:
        assert eight.complete(lambda: None) == eight.expected
    assert found == eight.expected
    after = list(eight.pids().values())
    assert [n for n in range(4) if after[n] != before[n]] == [1 + service]


def test_a_service_without_memory_is_replaced(eight: Eight) -> None:
    def spoil(host: Any) -> None:
        def combine(*arguments: Any) -> None:
            raise MemoryError("no room")

        host._service._products.get().combine = combine

    before = eight.pids()["cpu1"]
    eight.in_service(2, spoil)
    assert eight.complete(lambda: None) == eight.expected
    assert eight.pids()["cpu1"] != before


def test_a_second_failure_during_recovery(eight: Eight) -> None:
    """The process that is loading is killed too, and meanwhile another service."""
    before = eight.pids()

    def fault() -> None:
        os.kill(before["cpu0"], signal.SIGKILL)
        os.kill(eight.next_pid(1, before["cpu0"]), signal.SIGKILL)
        os.kill(before["gpu"], signal.SIGKILL)

    # Endless, so that the faults come in the middle of it.
    stream = eight.system.generate(
        GenerateRequest(
            SamplingParams(max_tokens=CONTEXT - 100, temperature=0.0, ignore_eos=True),
            prompt_ids=[5],
        )
    )
    endless = Asking(lambda: list(stream)[-1].result)
    threading.Event().wait(0.1)
    fault()
    result = endless.end()
    assert isinstance(result, Generation) and len(result.ids) == CONTEXT - 100
    assert eight.complete(lambda: None) == eight.expected
    after = eight.pids()
    assert after["gpu"] != before["gpu"] and after["cpu0"] != before["cpu0"]
    assert after["cpu1"] == before["cpu1"]


def test_actor_calls_recover_too(tiny: Tiny) -> None:
    with System.start(config_of(tiny("llama-gqa", "float16"), "calls")) as system:
        eight = Eight(system, 12)
        for name in ("gpu", "cpu1"):
            before = eight.pids()
            found = eight.complete(partial(fault_after, eight, name, signal.SIGKILL, 0.1))
            assert found == eight.expected
            assert eight.complete(lambda: None) == eight.expected
            assert eight.pids()[name] != before[name]


def test_after_ten_failures_it_gives_up(tiny: Tiny) -> None:
    """And the driver's death takes all processes with it; the next start is clean."""
    with System.start(config_of(tiny("llama-gqa", "float16"))) as system:
        eight = Eight(system, 5)
        before = eight.pids()

        def fail_often(host: Any) -> None:
            for _ in range(MOST_FAILURES - 2):
                host.services.policy.count("gpu", "a test")
                host.services.policy.recovered()

        ray.get(system._driver.__ray_call__.remote(fail_often))
        os.kill(before["cpu1"], signal.SIGKILL)
        assert eight.complete(lambda: None) == eight.expected
        second = eight.next_pid(2, before["cpu1"])
        os.kill(second, signal.SIGKILL)
        for _ in range(2):  # those that come later hear it too
            with pytest.raises(ServiceError, match=r"10 failures in a minute.* cpu1 .* died") as e:
                system.complete(eight.requests[0])
            assert "\n" not in str(e.value)
        last = eight.next_pid(2, second)
        os.kill(before["driver"], signal.SIGKILL)
        with pytest.raises(ServiceError, match="the driver"):
            system.complete(eight.requests[0])
        left = {*before.values(), last}
        for _ in range(600):
            if not any(psutil.pid_exists(pid) for pid in left):
                break
            threading.Event().wait(0.05)
        assert not any(psutil.pid_exists(pid) for pid in left)
    with System.start(config_of(tiny("llama-gqa", "float16"))) as system:
        assert system.complete(eight.requests[0]).ids == eight.expected[0]
