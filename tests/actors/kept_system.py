"""A whole system on a real Ray that tests share, in whatever file they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import psutil
import ray

from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.actors.system import System
from hotcold.model.sampling import SamplingParams
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint

CONTEXT = 60_000  # some ten seconds of decoding, for what happens meanwhile
NAME = "system-of-tests"


def config_of(checkpoint: TinyCheckpoint, num_cpu_actors: int, exchange: str) -> SystemConfig:
    """A system of so many CPU services, reached in that way."""
    return SystemConfig(
        str(checkpoint.path),
        num_cpu_actors=num_cpu_actors,
        num_threads=2,
        context_length=CONTEXT,
        kv_dtype="float32",
        prefill_chunk=64,
        exchange=exchange,
    )


def greedy(checkpoint: TinyCheckpoint, **changes: Any) -> GenerateRequest:
    """A request for the tokens that transformers would give, and further ones."""
    sampling = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    return GenerateRequest(replace(sampling, **changes), prompt_ids=checkpoint.ids[:10].tolist())


class KeptSystem:
    """Serves test after test; where one has ended it, the next has a new one.

    It is to be as good as new after every fault that it survives, so nobody starts it anew then.
    """

    def __init__(self, checkpoint: TinyCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._running: System | None = None

    @property
    def system(self) -> System:
        """Running, with two CPU services unless a test has changed that."""
        if self._running is None:
            self._running = System.start(config_of(self.checkpoint, 2, "arena"), name=NAME)
        return self._running

    def end(self) -> None:
        """Stop it, or what is left of it."""
        if self._running is not None:
            self._running.stop()
            self._running = None


def in_driver(system: System, function: Callable[[Any], Any]) -> Any:
    """What a function of the driver's actor returns in its process."""
    return ray.get(system.driver.__ray_call__.remote(function))


def forget_failures(host: Any) -> None:
    """As if a minute had passed for the driver."""
    host.services.policy._failures.clear()
    host.services.policy._blamed_s.clear()


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Whether `condition` came true; time in which this process was stopped does not count."""
    for _ in range(int(limit_s / 0.05)):
        if condition():
            return True
        time.sleep(0.05)
    return False


def all_gone(pids: Iterable[int]) -> bool:
    """Whether these processes end."""
    return wait_until(lambda: not any(_is_running(pid) for pid in pids))


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
