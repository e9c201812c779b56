"""CPU services on a second host, with an address of its own and a link of 1 ms to the first."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup import host_files
from hotcold.actors.setup.connection import node_ids, service_nodes
from hotcold.actors.setup.host_files import require_same_model, weight_bytes
from hotcold.actors.setup.shards import service_specs
from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, MemoryBudgetError, UsageError
from tests.cluster.head import ROOT
from tests.cluster.request_files import REQUESTS, texts, write_lines
from tests.cluster.shaped_link import is_permitted
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint

SYSTEM = "two hosts, relay"


def run_program(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.cluster.{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


PLACES = {"driver": 0, "gpu": 0, "cpu0": 0, "cpu1": 1, "cpu2": 0, "cpu3": 1}


def told(model: Path, checkpoint: TinyCheckpoint, report: Path, *options: object) -> dict[str, Any]:
    """What tests.cluster.two_hosts reports of two services a host, which are in their places."""
    arguments = ["--tokens", GREEDY_TOKENS, "--repeat", 1, "--round-trip", 1, "--cpu-actors", 4]
    arguments += ["--prompt-ids", ",".join(map(str, checkpoint.ids[:10])), "--system", SYSTEM]
    done = run_program("two_hosts", model, *arguments, *options, "--json", report)
    assert done.returncode == 0, done.stderr[-3000:]
    row: dict[str, Any]
    (row,) = json.loads(report.read_text())
    assert row["ids"] == checkpoint.greedy_ids
    assert row["hosts"] == PLACES
    # Each layer waits for the far host once, and the link delays packets by half of that each way.
    assert row["ms_a_layer"] >= 1
    return row


@pytest.mark.timeout(400)
def test_the_same_tokens_as_on_one_host(
    checkpoint: TinyCheckpoint, model: Path, tmp_path: Path
) -> None:
    """Tokens as transformers'."""
    if reason := is_permitted():
        pytest.skip(reason)
    told(model, checkpoint, tmp_path / "report.json")


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_same_tokens_when_services_are_lost(
    checkpoint: TinyCheckpoint, model: Path, expected_texts: dict[str, str], tmp_path: Path
) -> None:
    """One service of each host is lost.

    Then a command on one of the hosts asks what the other ways were asked.
    """
    if reason := is_permitted():
        pytest.skip(reason)
    out = tmp_path / "out.jsonl"
    requests = write_lines(tmp_path / "in.jsonl", REQUESTS)
    command = [sys.executable, "-m", "hotcold.jobs.generate", "--requests", str(requests)]
    command += ["--out", str(out), "--system", SYSTEM]
    then = ("--faults", "--then", shlex.join(command))
    row = told(model, checkpoint, tmp_path / "report.json", *then)
    assert texts(out) == expected_texts
    assert row["lost"]["ids"] == [checkpoint.greedy_ids] * 2
    assert row["lost"]["hosts"] == PLACES
    assert row["lost"]["replaced"] == ["cpu0", "cpu1"]  # cpu1 was killed, cpu0 stopped


def test_services_are_assigned_to_hosts(
    tiny: Callable[..., TinyCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        {"NodeManagerAddress": f"10.0.0.{i}", "NodeID": f"id{i}", "Alive": i < 4} for i in range(5)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    path, hosts = tiny("llama-relu").path, ("10.0.0.3", "10.0.0.1")
    config, system = read_config(path), SystemConfig(str(path), num_cpu_actors=4)
    specs = service_specs(replace(system, hosts=hosts), config)
    assert service_nodes(specs, hosts, "own") == ["id3", "id3", "id1", "id3", "id1"]
    assert [Topology(tuple(specs)).on_host(host) for host in hosts] == [[1, 3], [2, 4]]
    assert service_nodes(service_specs(system, config), (), "own") == ["own"] * 5
    for address in ("10.0.0.4", "10.0.0.9"):
        with pytest.raises(UsageError, match=f"no Ray node is at {address}, there are") as caught:
            node_ids(["10.0.0.3", address])
        assert "\n" not in str(caught.value)


def test_the_copy_of_the_model_is_checked(
    tiny: Callable[..., TinyCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny("llama-relu").path, path)
    system = SystemConfig(str(path), num_cpu_actors=2, hosts=("a", "b"))
    spec = service_specs(system, read_config(path))[2]
    require_same_model(spec)
    with monkeypatch.context() as patch:
        patch.setattr(host_files, "free_bytes", lambda: 100)
        with pytest.raises(MemoryBudgetError, match="are free; give more --hosts"):
            require_same_model(spec)
        stored = replace(spec, storage=NeuronStorage("f", 3, 2))
        with pytest.raises(MemoryBudgetError, match="give less --cpu-memory, which is of each"):
            require_same_model(stored)
        config = read_config(path)
        assert weight_bytes(stored, config) == 4 * config.hidden_size * (3 + 2 * 2)
    alone = service_specs(SystemConfig(str(path), num_cpu_actors=2), read_config(path))[2]
    require_same_model(alone)
    weights = path / "model.safetensors"
    content, found = bytearray(weights.read_bytes()), weights.stat()
    content[-1] ^= 1
    weights.write_bytes(content)  # in place
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"on .* is another model than on the driver's host"):
        require_same_model(spec)
    with pytest.raises(CheckpointError, match="may be another model than when the system started"):
        require_same_model(alone)
    shutil.rmtree(path)
    shutil.copytree(tiny("llama-relu").path, path)  # the same again, as on another host
    require_same_model(spec)
    shutil.rmtree(path)
    shutil.copytree(tiny("opt-postnorm").path, path)
    with pytest.raises(CheckpointError, match=r"the cpu1 service, on .* is another model than"):
        require_same_model(spec)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="copy the model's files to") as caught:
        require_same_model(spec)
    assert "\n" not in str(caught.value)
