"""CPU services on a second host, with an address of its own and a link of 1 ms to the first."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.host_files import require_same_model
from actors.hosts import node_ids, service_nodes
from actors.messages import SystemConfig
from actors.shards import service_specs
from benchmarks.hosts_client import Client
from benchmarks.shaped_link import is_permitted
from benchmarks.two_hosts import Plan, measure
from benchmarks.two_nodes import TwoNodes, two_nodes
from model.config import ModelConfig
from model.errors import CheckpointError, UsageError
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    """Two nodes with four Ray CPUs each."""
    if reason := is_permitted():
        pytest.skip(reason)
    with two_nodes(num_cpus=4) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def client(cluster: TwoNodes) -> Iterator[Client]:
    """Runs systems on the first node, one after another."""
    found = cluster.client()
    found.tell(nodes=2)
    yield found
    found.end()


@pytest.fixture(scope="module")
def measured(
    cluster: TwoNodes, client: Client, tiny: Callable[..., TinyCheckpoint]
) -> dict[str, Any]:
    """A system of four CPU services, which goes on running, and how it has answered."""
    checkpoint = tiny("llama-relu")
    plan = Plan(checkpoint.path, checkpoint.ids[:10].tolist(), GREEDY_TOKENS, 1, 4, (1.0,))
    (row,) = measure(cluster, client, "two hosts, relay", plan)
    return row


@pytest.mark.timeout(400)
def test_the_same_tokens_as_on_one_host(
    measured: dict[str, Any], tiny: Callable[..., TinyCheckpoint]
) -> None:
    """Two services a host; services are where they should be, the tokens are transformers'."""
    assert measured["ids"] == tiny("llama-relu").greedy_ids
    places = {"driver": 0, "gpu": 0, "cpu0": 0, "cpu1": 1, "cpu2": 0, "cpu3": 1}
    assert measured["hosts"] == places
    # Each layer waits for the far host once, and the link delays packets by half of that each way.
    assert measured["ms_a_layer"] >= 1


@pytest.mark.timeout(400)
def test_lost_services_of_both_hosts_change_no_token(
    measured: dict[str, Any],
    cluster: TwoNodes,
    client: Client,
    tiny: Callable[..., TinyCheckpoint],
) -> None:
    """One of the far host is killed, one of the near host is stopped."""
    checkpoint = tiny("llama-relu")
    request = {"prompt_ids": checkpoint.ids[:10].tolist(), "num_tokens": GREEDY_TOKENS}
    before = client.tell(processes=True)["processes"]
    signals = {before["cpu1"]: signal.SIGKILL, before["cpu2"]: signal.SIGSTOP}
    assert client.tell(**request, signals=signals)["ids"] == checkpoint.greedy_ids
    assert client.tell(**request)["ids"] == checkpoint.greedy_ids  # meets a fault that came late
    after = client.tell(processes=True)["processes"]
    assert {name for name in after if after[name] != before[name]} == {"cpu1", "cpu2"}
    assert cluster.link.end_of(after["cpu1"]) == 1 and cluster.link.end_of(after["cpu2"]) == 0
    assert not any(psutil.pid_exists(pid) for pid in signals)


def test_services_are_dealt_to_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        {"NodeManagerAddress": f"10.0.0.{i}", "NodeID": f"id{i}", "Alive": i < 4} for i in range(5)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    system = SystemConfig("m", num_cpu_actors=4, hosts=("10.0.0.3", "10.0.0.1"))
    assert service_nodes(system, "own") == ["id3", "id3", "id1", "id3", "id1"]
    assert service_nodes(SystemConfig("m", num_cpu_actors=2), "own") == ["own"] * 3
    for address in ("10.0.0.4", "10.0.0.9"):
        with pytest.raises(UsageError, match=f"no Ray node is at {address}, there are") as caught:
            node_ids(["10.0.0.3", address])
        assert "\n" not in str(caught.value)


def test_the_copy_of_the_model_is_checked(
    tiny: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny("llama-relu").path, path)
    system = SystemConfig(str(path), num_cpu_actors=2, hosts=("a", "b"))
    spec = service_specs(system, ModelConfig.from_directory(path))[2]
    require_same_model(spec)
    shutil.rmtree(path)
    shutil.copytree(tiny("opt-postnorm").path, path)
    with pytest.raises(CheckpointError, match=r"the cpu1 service, on .* is another model than"):
        require_same_model(spec)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="copy the model's files to") as caught:
        require_same_model(spec)
    assert "\n" not in str(caught.value)
