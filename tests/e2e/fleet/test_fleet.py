"""Two systems behind one door, on Ray Serve: streams that outlive theirs, routing, limits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve")
from ray import serve

from hotcold.actors.protocol.messages import DriverLoad, GenerateRequest, SystemConfig
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.fleet.application import NAME
from tests.actors.batching import batching, complete
from tests.conftest import TinyCheckpoint
from tests.e2e.fleet.doors import KEYS, Stream, asked, of, two_replicas, until

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.3, "seed": 5, "repeat_penalty": 1.1, "logprobs": 1},
}

ALONE: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.2, "seed": 3}]


@pytest.fixture(scope="module")
def door(deployed: Callable[..., str]) -> Iterator[httpx.Client]:
    """A client of the fleet's door."""
    url = deployed(two_replicas)
    with httpx.Client(base_url=url, headers=of(KEYS[0]), timeout=600) as found:
        yield found


def replicas() -> list[tuple[DriverLoad, dict[str, int]]]:
    """What each replica is busy with, and its processes."""
    handle = serve.get_deployment_handle("demo", NAME)
    found: list[tuple[DriverLoad, dict[str, int]]] = handle.broadcast("status").results(
        timeout_s=30
    )
    return found


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
    serve.run(two_replicas(), name=NAME)
    assert [one.end() for one in streams] == alone
    until(lambda: len(replicas()) == 2 and not before & {at["driver"] for _, at in replicas()})
