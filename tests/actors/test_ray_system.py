"""Whole systems on a real Ray: the same tokens, and what happens when a part dies or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hotcold.actors.processes.reports import LOADING_KERNELS
from hotcold.actors.protocol.messages import GenerateRequest, Generation
from hotcold.actors.system import System
from hotcold.model.errors import ServiceError
from tests.actors.batching import Background
from tests.actors.kept_system import CONTEXT, KeptSystem, all_gone, greedy, wait_until
from tests.e2e.word_model import words_of
from tests.tiny_checkpoint import Tiny, TinyCheckpoint

pytestmark = pytest.mark.usefixtures("local_ray")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def llama(kept: KeptSystem) -> TinyCheckpoint:
    return kept.checkpoint


@pytest.fixture
def running(kept: KeptSystem) -> System:
    return kept.system


# --- serving ---------------------------------------------------------------------------------


def test_many_streams_at_once(running: System, llama: TinyCheckpoint) -> None:
    """More than run at once, from many threads: each stream shows its own tokens and no other's."""
    prompts = [llama.ids[n : n + size].tolist() for n, size in enumerate([10, 1, 20, 32] * 3)]
    requests = [GenerateRequest(greedy(llama).sampling, prompt_ids=ids) for ids in prompts]
    alone = [running.complete(request).ids for request in requests]
    assert alone[0] == llama.greedy_ids and len(set(map(tuple, alone))) > 8
    shown: list[list[str]] = [[] for _ in requests]

    def ask(number: int) -> None:
        for event in running.generate(requests[number]):
            shown[number] += event.text.split()

    askers = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(len(requests))]
    for asker in askers:
        asker.start()
    assert running.call("describe").max_batch == 8  # control calls come through
    for asker in askers:
        asker.join(200)
    assert shown == [words_of(ids) for ids in alone]


def test_idle_services_use_no_processor(running: System, llama: TinyCheckpoint) -> None:
    running.complete(greedy(llama))

    def used_while_idle() -> float:
        before = running.call("cpu_seconds")
        time.sleep(1)
        after = running.call("cpu_seconds")
        assert set(after) == {"gpu", "cpu0", "cpu1"}
        return max(after[name] - before[name] for name in after)

    # Once idle they prepare for long prompts, for as long as compiling takes; then for nothing.
    assert any(used_while_idle() < 0.05 for _ in range(100))


def run_script(*arguments: str, **environment: str) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", "tests.actors.ray_script", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


# --- failures --------------------------------------------------------------------------------


class Long:
    """A request that takes ten seconds, in a thread of its own; its first token has come."""

    def __init__(self, system: System, llama: TinyCheckpoint) -> None:
        came = threading.Event()

        def generate() -> Generation | None:
            result = None
            request = replace(greedy(llama, max_tokens=CONTEXT), request_id="long")
            for event in system.generate(request):
                came.set()
                result = event.result
            return result

        self._asking = Background(generate)
        assert came.wait(150)

    def end(self) -> Any:
        """What came of it: the result, or the error."""
        return self._asking.end()


def test_waiting_streams_do_not_lock_out_control(running: System, llama: TinyCheckpoint) -> None:
    long = Long(running, llama)
    for _ in range(70):
        running.driver.generate.options(num_returns="streaming").remote(greedy(llama))
    assert running.call("describe").context_length == CONTEXT
    running.cancel("long")
    assert long.end().finish_reason == "cancelled"
    assert running.complete(greedy(llama)).ids == llama.greedy_ids


def test_a_stuck_driver_is_named(
    running: System, llama: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as soon as it goes on, so does the system."""
    monkeypatch.setattr("hotcold.actors.system.DRIVER_POLLS", 15)
    driver = running.call("processes")["driver"]
    long = Long(running, llama)
    os.kill(driver, signal.SIGSTOP)
    try:
        asked = Background(partial(running.complete, greedy(llama)))
        for error in (long.end(), asked.end()):
            assert isinstance(error, ServiceError), error
            assert "the driver does not answer" in str(error)
    finally:
        os.kill(driver, signal.SIGCONT)
    assert running.complete(greedy(llama)).ids == llama.greedy_ids


# --- a Ray of its own ------------------------------------------------------------------------


def test_nothing_stays_behind(tiny: Tiny) -> None:
    """Start Ray and a system in a process, stop both: no process, no file in shared memory."""
    before, checkpoint = set(os.listdir("/dev/shm")), tiny("falcon-bias")
    prompt = ",".join(map(str, checkpoint.ids[:10]))
    found = run_script(str(checkpoint.path), prompt, "dense")
    assert found["ids"] == checkpoint.greedy_ids
    progress = found["progress"]
    assert progress[-1]["stage"] == "ready"
    assert progress[-1]["loaded_bytes"] == progress[-1]["total_bytes"] > 0
    # Those that load weights may be compiled while some are loaded, the others only then.
    after = [report for report in progress if report["stage"] == LOADING_KERNELS]
    assert all(report["loaded_bytes"] == report["total_bytes"] for report in after)
    assert not found["ray"]  # it was started for the system, so it ended with it
    assert set(found["processes"]) == {"driver", "gpu", "cpu0", "cpu1"}
    assert all_gone(found["processes"].values())
    assert found["mapped"], "the arena is in shared memory"
    assert all(name.startswith("plasma") for name in found["mapped"])
    assert wait_until(lambda: not ours(set(os.listdir("/dev/shm")) - before, found))


def ours(new_files: set[str], found: dict[str, Any]) -> set[str]:
    """Files that the script left; another Ray or a browser may come and go meanwhile."""
    others = ("plasma", ".org.chromium.", ".com.google.")
    mapped = {name.removesuffix(" (deleted)") for name in found["mapped"]}
    return (new_files & mapped) | {name for name in new_files if not name.startswith(others)}
