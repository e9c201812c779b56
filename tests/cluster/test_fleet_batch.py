"""A file of requests, submitted as a job to a fleet: killed, gone on with, each answered once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("ray.serve")
from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import batching, complete
from tests.cluster.head import Head
from tests.cluster.request_files import read_lines, write_lines
from tests.conftest import TinyCheckpoint
from tests.e2e.fleet.doors import free_port

NUM_REQUESTS = 200
FLEET = ("--replicas", "2", "--threads", "1", "--parallel", "2", "--context", "512")
_SHORT: list[tuple[int, dict[str, Any]]] = [
    (16, {"temperature": 0}), (24, {"temperature": 1.2, "seed": 3}),
]  # fmt: skip
_LONG: list[tuple[int, dict[str, Any]]] = [
    (240, {"temperature": 0, "logprobs": 1}), (200, {"temperature": 1.3, "seed": 5}),
]  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"prompt": f"def part_{number}(", "max_tokens": tokens, **fields}
    for number, (tokens, fields) in enumerate(5 * _SHORT + 2 * _LONG)
]


@contextmanager
def fleet_of(head: Head, *flags: str) -> Iterator[httpx.Client]:
    """A client of a fleet of two replicas of the demo model."""
    port = free_port()
    with head.beside("hotcold", "fleet", *FLEET, *flags, "--port", str(port)) as fleet:
        assert fleet.stdout is not None
        for line in fleet.stdout:
            if "serves at" in line:
                break
        threading.Thread(target=fleet.stdout.read, daemon=True).start()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            yield client
        fleet.send_signal(signal.SIGINT)
        fleet.wait(120)


@pytest.fixture(scope="module")
def door(head: Head) -> Iterator[httpx.Client]:
    with fleet_of(head) as client:
        yield client


def texts_alone() -> list[str]:
    """What each kind gets in one process without Ray, nothing beside it."""
    with batching(TinyCheckpoint(DEMO_DIRECTORY), context=512, kv_dtype="float16") as (_, driver):
        found = []
        for kind in KINDS:
            fields = {key: one for key, one in kind.items() if key not in ("prompt", "logprobs")}
            sampling = SamplingParams(**fields, ignore_eos=True)
            found.append(complete(driver, GenerateRequest(sampling, prompt=kind["prompt"])).text)
        return found


def until(condition: Callable[[], Any]) -> Any:
    """What it gives once it gives something."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        with suppress(psutil.Error, FileNotFoundError):
            if found := condition():
                return found
        time.sleep(0.05)
    raise AssertionError("it does not come to that")


def processes(head: Head, *words: str) -> list[psutil.Process]:
    """Those of the cluster that have these words in their command line, children first."""
    found = []
    for one in reversed(head.process.children(recursive=True)):
        with suppress(psutil.Error):
            if all(word in " ".join(one.cmdline()) for word in words):
                found.append(one)
    return found


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@pytest.mark.thorough
def test_a_batch_is_answered_once(head: Head, door: httpx.Client, tmp_path: Path) -> None:
    """Through kills of the job, the door and a replica, beside others; token for token."""
    expected = texts_alone()
    lines: list[Any] = []
    for number in range(NUM_REQUESTS):
        body = KINDS[number % len(KINDS)] | {"ignore_eos": True}
        url = {"method": "POST", "url": "/v1/completions", "body": body}
        lines.append({"custom_id": f"r{number}", **(url if number % 2 else body)})
    bad = {"custom_id": "hot", "prompt": "x", "temperature": "hot"}
    lines[20:20] = ["not JSON", bad, {"custom_id": "nowhere", "url": "/v1/files", "body": {}}]
    lines.append(lines[0])
    requests = write_lines(tmp_path / "in.jsonl", lines)
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    command = ("hotcold", "batch", str(requests), str(out))

    job = head.submit(*command)
    until(lambda: count(out) >= 40)
    status, log = head.run_beside(*command)
    assert status == 1 and "another job writes to" in log and log.count("\n") == 1
    for one in processes(head, *command[1:]):
        one.kill()
    assert job.wait(60) != 0
    num_before = count(out)
    assert num_before < NUM_REQUESTS
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_7", "custom')

    job = head.submit(*command)
    until(lambda: count(out) >= num_before + 10)
    killed, *_ = processes(head, "ray::ServeReplica:hotcold:door")
    killed.kill()
    until(lambda: count(out) >= num_before + 40)  # by the next door
    with ThreadPoolExecutor(8) as pool:
        ask = [KINDS[number % len(KINDS)] | {"ignore_eos": True} for number in range(24)]
        others = [pool.submit(door.post, "/v1/completions", json=body) for body in ask]
        until(lambda: count(out) >= num_before + 60)
        replica, *_ = processes(head, "ray::ServeReplica:hotcold:demo")
        replica.kill()
        for number, one in enumerate(others):
            assert one.result().json()["choices"][0]["text"] == expected[number % len(KINDS)]
    log, _ = job.communicate(timeout=600)
    assert job.returncode == 0, log
    assert "were there already" in log

    answers = read_lines(out)
    assert sorted(one["custom_id"] for one in answers) == sorted(
        f"r{number}" for number in range(NUM_REQUESTS)
    )
    for one in answers:
        number, response = int(one["custom_id"][1:]), one["response"]
        assert one["error"] is None and response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == expected[number % len(KINDS)]
    failures = {one["custom_id"]: one for one in read_lines(errors)}
    assert failures.keys() == {"line-21", "hot", "nowhere"}
    assert failures["line-21"]["error"]["message"].startswith("line 21: not JSON")
    assert failures["hot"]["response"]["status_code"] == 400
    assert "/v1/files" in failures["nowhere"]["error"]["message"]

    written = out.read_bytes(), errors.read_bytes()
    status, log = head.run_beside(*command)
    assert status == 0, log
    assert "0 requests answered, 0 with an error, 204 were there already" in log
    assert (out.read_bytes(), errors.read_bytes()) == written
