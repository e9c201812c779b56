"""CPU services on a second host, with an address, files and a link of its own: the same bits."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup import host_files
from hotcold.actors.setup.account import service_bytes
from hotcold.actors.setup.connection import node_ids, service_nodes
from hotcold.actors.setup.host_files import require_same_model
from hotcold.actors.setup.preflight import read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.model.bundles.bundle_file import bundle_path, read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, MemoryBudgetError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.placement.profile import PROFILE_FILE, ActivationProfile, write_profile
from hotcold.predictors.predictor_file import predictors_path
from tests.cluster.hosts_client import Client
from tests.cluster.shaped_link import is_permitted
from tests.cluster.two_nodes import TwoNodes, two_nodes
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint
from tests.predictor_layers import write_sign_predictors

_NUM_RESTS = 156  # fewer neurons than the model has
_CPU1 = r"the cpu1 service, on .*: "


@dataclass(frozen=True)
class Hosts:
    """Two nodes: the first has the model at `path`, the second finds there what is in `far`."""

    nodes: TwoNodes
    client: Client
    checkpoint: TinyCheckpoint
    path: Path
    far: Path

    @property
    def geometry(self) -> BundleGeometry:
        return BundleGeometry.of(read_model(self.path))

    def system(self, mode: str, storage: NeuronStorage | None) -> SystemConfig:
        """On both hosts with neurons on `storage`, on the first with all in memory."""
        hosts = tuple(self.nodes.addresses[: 1 if storage is None else 2])
        return SystemConfig(
            str(self.path),
            mode=mode,
            num_cpu_actors=2,
            num_threads=2 // len(hosts),  # so both have the same neurons
            context_length=256,
            kv_dtype="float32",
            predictors_path=str(predictors_path(self.path, "sign")) if mode == "sign" else "",
            hosts=hosts,
            storage=storage,
        )

    def places(self, processes: dict[str, int]) -> dict[str, int]:
        """At which end of the link each process is."""
        return {name: self.nodes.link.end_of(pid) for name, pid in processes.items()}

    def stored(self, **changes: Any) -> NeuronStorage:
        file = bundle_path(self.path, self.geometry)
        return replace(NeuronStorage(str(file), 1000, _NUM_RESTS), **changes)

    def answers(self, kills: int | None = None) -> list[tuple[list[int], list[float]]]:
        """Tokens and logprobs after a short prompt, and after one of more than 32 tokens.

        `kills`: a process that is killed while the first are made.
        """
        ids, found = self.checkpoint.ids.tolist(), []
        signals = {} if kills is None else {str(kills): signal.SIGKILL}
        for prompt in (ids[:10], (ids * 3)[:70]):
            request = {"prompt_ids": prompt, "num_tokens": GREEDY_TOKENS, "num_logprobs": 0}
            told = self.client.tell(**request, signals=signals)
            found.append((told["ids"], told["logprobs"]))
            assert len(told["logprobs"]) == GREEDY_TOKENS
            signals = {}
        return found


@pytest.fixture(scope="module")
def hosts(
    tiny: Callable[..., TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    if reason := is_permitted():
        pytest.skip(reason)
    checkpoint, folder = tiny("llama-relu"), tmp_path_factory.mktemp("stored")
    path, far = folder / "model", folder / "far"
    shutil.copytree(checkpoint.path, path)
    shutil.rmtree(path / "hotcold", ignore_errors=True)
    shutil.copytree(path, far)
    with two_nodes(num_cpus=4, own_folders={path: far}) as nodes:
        client = nodes.client()
        try:
            client.tell(nodes=2)
            yield Hosts(nodes, client, checkpoint, path, far)
        finally:
            client.end()


def with_profile(path: Path) -> None:
    """By which a file of neurons has another order than without."""
    config = read_model(path)
    size = config.num_layers, config.ffn_size
    counts = np.random.default_rng(1).permutation(size[0] * size[1]).reshape(size).astype(np.int64)
    profile = ActivationProfile(counts, counts.size, "t", "t")
    write_profile(artifact_path(path, PROFILE_FILE), ModelIdentity.of(path), profile)


def test_the_same_tokens_also_when_services_are_lost(hosts: Hosts) -> None:
    """Of two services a host one each is killed.

    Each layer waits for the far host once, and the link delays packets by half of that each way.
    """
    near = hosts.nodes.addresses
    system = replace(
        hosts.system("exact", None), num_cpu_actors=4, num_threads=2, hosts=tuple(near)
    )
    hosts.nodes.link.delay_s = 0.5e-3
    before = hosts.client.start(system, "in memory")["processes"]
    places = {"driver": 0, "gpu": 0, "cpu0": 0, "cpu1": 1, "cpu2": 0, "cpu3": 1}
    assert hosts.places(before) == places
    ids, layers = hosts.checkpoint.ids[:10].tolist(), hosts.geometry.num_layers
    request: dict[str, Any] = {"prompt_ids": ids, "num_tokens": GREEDY_TOKENS}
    told = hosts.client.tell(**request)
    assert told["ids"] == hosts.checkpoint.greedy_ids
    assert 1e3 / told["decode_tokens_per_s"] / layers >= 1
    signals = dict.fromkeys((before["cpu0"], before["cpu1"]), signal.SIGKILL)
    for more in ({"signals": signals}, {}):  # the second meets a fault that came after the last
        assert hosts.client.tell(**request, **more)["ids"] == hosts.checkpoint.greedy_ids
    after = hosts.client.tell(processes=True)["processes"]
    assert [name for name in after if after[name] != before[name]] == ["cpu0", "cpu1"]
    assert hosts.places(after) == places
    hosts.nodes.link.delay_s = 0.0


@pytest.mark.thorough
def test_each_host_makes_its_file_and_the_bits_are_those_of_all_in_memory(hosts: Hosts) -> None:
    """Also while the far service is killed; the far file is in another order than the near one."""
    with_profile(hosts.far)
    hosts.client.start(hosts.system("exact", None), "in memory")
    expected = hosts.answers()
    assert expected[0][0] == hosts.checkpoint.greedy_ids
    before = hosts.client.start(hosts.system("exact", hosts.stored()), "stored")["processes"]
    assert hosts.places(before) == {"driver": 0, "gpu": 0, "cpu0": 0, "cpu1": 1}
    orders = [
        read_bundle_file(
            bundle_path(path, hosts.geometry), hosts.geometry, ModelIdentity.of(path)
        ).order
        for path in (hosts.path, hosts.far)
    ]
    assert any((one != other).any() for one, other in zip(*orders, strict=True))
    assert hosts.answers() == expected
    assert hosts.answers(kills=before["cpu1"]) == expected
    after = hosts.client.tell(processes=True)["processes"]
    assert [name for name in after if after[name] != before[name]] == ["cpu1"]
    assert hosts.nodes.link.end_of(after["cpu1"]) == 1
    told = hosts.client.tell(prompt_ids=hosts.checkpoint.ids[:10].tolist(), num_tokens=8)
    assert told["reads"]["bytes_read"] > 0


@pytest.mark.thorough
def test_predictors_that_the_other_host_lacks_cost_no_bit(hosts: Hosts) -> None:
    write_sign_predictors(hosts.path, 3)
    hosts.client.start(hosts.system("sign", None), "sign in memory")
    expected = hosts.answers()
    storage = hosts.stored(
        num_gates=_NUM_RESTS, predictors=str(predictors_path(hosts.path, "sign"))
    )
    told = hosts.client.start(hosts.system("sign", storage), "sign stored")
    assert [note for note in told["notes"] if "nothing is read ahead there" in note]
    assert hosts.answers() == expected


@pytest.mark.thorough
def test_a_foreign_file_on_the_other_host_is_one_line(hosts: Hosts) -> None:
    file = bundle_path(hosts.far, hosts.geometry)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"not this")
    there = bundle_path(hosts.path, hosts.geometry)
    with pytest.raises(RuntimeError, match=f"^{_CPU1}{there}: is no bundle file") as caught:
        hosts.client.start(hosts.system("exact", hosts.stored()), "foreign")
    assert "\n" not in str(caught.value) and "`hotcold pack`" in str(caught.value)


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
    found.append({"NodeManagerAddress": "10.0.0.3", "NodeID": "beside", "Alive": True})
    assert node_ids(["id3", "beside"]) == ["id3", "beside"]


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
        slots = 4 * config.hidden_size * (3 + 2 * 2) + 24 * (3 + 2)  # rows and tables
        assert service_bytes(stored, config) == slots
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
