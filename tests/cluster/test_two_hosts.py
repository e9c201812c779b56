"""CPU services on a second host, with an address of its own and a link of 1 ms to the first."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.host_files import require_same_model
from actors.messages import SystemConfig
from actors.shards import service_specs
from benchmarks.hosts_client import Client
from benchmarks.shaped_link import is_permitted
from benchmarks.two_nodes import TwoNodes, two_nodes
from model.config import ModelConfig
from model.errors import CheckpointError
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint

REASON = is_permitted()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON or "-"), pytest.mark.timeout(300)]

Cluster = tuple[TwoNodes, Client]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Both nodes, and a process on the first."""
    with two_nodes(num_cpus=2, prefix="hctest") as nodes:
        client = nodes.client()
        assert sorted(client.tell(nodes=2)["nodes"]) == sorted(nodes.addresses)
        yield nodes, client
        client.end()


def system_of(path: Path, hosts: list[str], **changes: Any) -> dict[str, Any]:
    """Two CPU services for each of `hosts`, as JSON."""
    config = SystemConfig(
        str(path),
        num_cpu_actors=2 * len(hosts),
        num_threads=2,
        context_length=128,
        kv_dtype="float32",
        prefill_chunk=32,
    )
    return {**vars(config), "hosts": hosts, **changes}


def namespace_of(pid: int) -> str:
    """The network namespace that a process is in."""
    done = subprocess.run(["ip", "netns", "identify", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()


def test_the_same_tokens_as_on_one_host(
    cluster: Cluster, tiny: Callable[..., TinyCheckpoint]
) -> None:
    """Services are where they should be, and the tokens are those of transformers."""
    nodes, client = cluster
    checkpoint = tiny("llama-relu")
    processes = client.tell(system=system_of(checkpoint.path, nodes.addresses))["processes"]
    places = {name: namespace_of(pid) for name, pid in processes.items()}
    first, second = nodes.link.namespaces
    assert places == {
        "driver": first, "gpu": first, "cpu0": first, "cpu1": second, "cpu2": first, "cpu3": second,
    }  # fmt: skip
    nodes.link.delay_s = 0.5e-3
    prompt = checkpoint.ids[:10].tolist()
    answer = client.tell(prompt_ids=prompt, num_tokens=GREEDY_TOKENS)
    assert answer["ids"] == checkpoint.greedy_ids
    # Each layer of each step waits for the far host once.
    num_layers = ModelConfig.from_directory(checkpoint.path).num_layers
    assert answer["per_token_ms"]["total"] >= 1.0 * num_layers


def test_a_host_without_the_model_or_without_ray(
    cluster: Cluster, tiny: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    """One line says what is missing where."""
    nodes, client = cluster
    with pytest.raises(RuntimeError, match=r"no Ray node is at 10\.9\.9\.9") as caught:
        client.tell(system=system_of(tiny("llama-relu").path, [nodes.addresses[0], "10.9.9.9"]))
    assert "\n" not in str(caught.value)
    assert nodes.addresses[1] in str(caught.value)


def test_the_copy_of_the_model_is_checked(
    tiny: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    """In this process: both hosts of the cluster above have one file system."""
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
