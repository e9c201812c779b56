"""Two systems behind one door, on Ray Serve: streams that outlive theirs, routing, limits."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
import ray

from hotcold.actors.launch import start_local_ray
from hotcold.actors.protocol.messages import DriverLoad, GenerateRequest, SystemConfig
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from tests.actors.batching import batching, complete
from tests.conftest import TinyCheckpoint

pytest.importorskip("ray.serve")
from ray import serve

from hotcold.ui.fleet.application import NAME, FleetArgs, application

pytestmark = pytest.mark.timeout(300)
KEYS = ("first-key-of-the-fleet", "other-key-of-the-fleet")
ARGS = FleetArgs(
    replicas=2,
    options={"threads": 1, "context": 512, "kv-tokens": 4096, "parallel": 2},
    queue=2,
    drain=0.5,
)
START_S = 120.0
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.3, "seed": 5, "repeat_penalty": 1.1, "logprobs": 1},
}

ALONE: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.2, "seed": 3}]


@contextmanager
def served(make: Callable[[], serve.Application]) -> Iterator[str]:
    """The address of an application that is made in a Ray of this process."""
    start_local_ray(2, 200 << 20)
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(make(), name=NAME)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def door() -> Iterator[httpx.Client]:
    """A client of the fleet's door."""
    with served(made) as url, httpx.Client(base_url=url, headers=of(KEYS[0]), timeout=120) as found:
        yield found


def made() -> serve.Application:
    return application(ARGS, KEYS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
        return number


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def replicas() -> list[tuple[DriverLoad, dict[str, int]]]:
    """What each replica is busy with, and its processes."""
    handle = serve.get_deployment_handle("demo", NAME)
    found: list[tuple[DriverLoad, dict[str, int]]] = handle.broadcast("status").results(
        timeout_s=30
    )
    return found


def until(condition: Callable[[], bool]) -> None:
    """Return once it holds."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(Exception):  # a replica that is just ending
            if condition():
                return
        time.sleep(0.2)
    raise AssertionError("it does not come to that")


def asked(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, **fields}


class Stream(threading.Thread):
    """A streamed completion; `has_begun` is set once some of it has come."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.text, self.logprobs, self.finish = "", list[Any](), None
        self.has_begun = threading.Event()
        self._client, self._body = client, {**body, "stream": True}
        self.start()

    def run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                self.text += choice["text"]
                self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                self.finish = choice["finish_reason"]
                if len(self.text) > 40:
                    self.has_begun.set()

    def end(self) -> tuple[str, list[Any], Any]:
        self.join(120)
        assert not self.is_alive()
        return self.text, self.logprobs, self.finish


@pytest.mark.parametrize(("way", "killed"), [("greedy", "driver"), ("sampled", "replica")])
def test_a_stream_outlives_its_system(door: httpx.Client, way: str, killed: str) -> None:
    """Killed in the middle: the same tokens, to the last bit of their logprobs."""
    until(lambda: len(replicas()) == 2)
    body = asked("def total(values):", **ASKED[way])
    alone = Stream(door, body).end()
    stream = Stream(door, body)
    assert stream.has_begun.wait(60)
    busy = [processes[killed] for load, processes in replicas() if load.num_running]
    assert len(busy) == 1
    os.kill(busy[0], signal.SIGKILL)
    assert stream.end() == alone
    assert alone[2] == "length"
    until(lambda: len(replicas()) == 2 and busy[0] not in [at[killed] for _, at in replicas()])


def test_answers_are_those_of_one_system(door: httpx.Client) -> None:
    """Token for token as in one process without Ray."""
    with batching(TinyCheckpoint(DEMO_DIRECTORY)) as (_, driver):
        for number, fields in enumerate(ALONE):
            sampling = SamplingParams(max_tokens=60, ignore_eos=True, **fields)
            prompt = f"for number in range({number}):"
            expected = complete(driver, GenerateRequest(sampling, prompt=prompt))
            body = asked(prompt, **fields) | {"max_tokens": 60}
            found = door.post("/v1/completions", json=body).json()
            assert found["choices"][0]["text"] == expected.text


def test_a_prompt_goes_where_its_beginning_was_read(door: httpx.Client) -> None:
    until(lambda: len(replicas()) == 2)
    cached = []
    for turn in range(3):
        for start in (100, 200, 300):  # tokens; what is left to read takes no time at any speed
            body = asked([start] * 448 + [turn + 1] * 2, max_tokens=2)
            usage = door.post("/v1/completions", json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert min(cached[3:]) >= 384


def test_a_full_fleet_says_when_to_come_back(door: httpx.Client) -> None:
    """Those that it takes are answered; a client of few requests is none of those that are not."""
    until(lambda: len(replicas()) == 2)
    body = asked("class Queue:", max_tokens=300)
    with ThreadPoolExecutor(24) as pool:
        many = [pool.submit(door.post, "/v1/completions", json=body) for _ in range(20)]
        assert any(one.result().status_code == 429 for one in as_completed(many))
        few = door.post("/v1/completions", json=body, headers=of(KEYS[1]))
        answers = [one.result() for one in many]
    assert few.status_code == 200
    refused = [one for one in answers if one.status_code != 200]
    assert 0 < len(refused) < 20
    for one in refused:
        assert one.status_code == 429
        assert int(one.headers["retry-after"]) >= 1
        assert one.json()["error"]["code"] == "queue_full"


def test_the_doors_are_the_servers(door: httpx.Client) -> None:
    """All of its routes, its keys and its health."""
    config = SystemConfig(str(DEMO_DIRECTORY), context_length=512)
    own = create_app(ServedModels([Backend(config, ServerSettings("demo"))])).openapi()
    assert door.get("/openapi.json").json()["paths"].keys() == own["paths"].keys()
    assert door.get("/v1/models", headers=of("x" * 16)).status_code == 401
    assert door.get("/health").json()["status"] == "ok"
    assert "requests" in door.get("/metrics").text
    wrong = asked("x", temperature="hot")
    assert door.post("/v1/completions", json=wrong).status_code == 400
    grammar = asked("x", response_format={"type": "json_schema", "json_schema": {"schema": 1}})
    assert door.post("/v1/completions", json=grammar).status_code == 400
    texts = {"input": ["one", "two"]}
    assert len(door.post("/v1/embeddings", json=texts).json()["data"]) == 2
    told = door.post(
        "/api/chat",
        json={"model": "demo", "stream": False, "messages": [{"role": "user", "content": "Hi"}]},
    )
    assert told.json()["done"]


def test_an_upgrade_ends_no_stream(door: httpx.Client) -> None:
    """Every replica and the door are replaced, and wait half a second at most for what runs."""
    until(lambda: len(replicas()) == 2)
    bodies = [asked(f"def part_{one}(", **fields) for one, fields in enumerate(ASKED.values())]
    alone = [Stream(door, body).end() for body in bodies]
    before = {processes["driver"] for _, processes in replicas()}
    streams = [Stream(door, body) for body in bodies]
    assert all(one.has_begun.wait(60) for one in streams)
    serve.run(made(), name=NAME)
    assert [one.end() for one in streams] == alone
    until(lambda: len(replicas()) == 2 and not before & {at["driver"] for _, at in replicas()})
