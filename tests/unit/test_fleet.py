"""A fleet's turns, and what its command and file may say."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from tests.e2e.commands import run_main

pytest.importorskip("ray.serve")
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest
from ray.serve.schema import ServeDeploySchema

from hotcold.ui.api.errors import ApiError
from hotcold.ui.fleet.application import app
from hotcold.ui.fleet.arguments import FleetArgs
from hotcold.ui.fleet.models import _places, fleet_models
from hotcold.ui.fleet.order import Order
from hotcold.ui.fleet.router import PrefixRouter
from hotcold.ui.fleet.turns import Turns


def test_the_client_with_fewest_is_next_and_the_one_with_most_is_refused() -> None:
    order: list[str] = []
    running: Counter[str] = Counter()
    room = 2

    async def ask(turns: Turns, client: str) -> None:
        async with turns.turn(client):
            running[client] += 1
            order.append(client)
            assert running.total() <= room
            await asyncio.sleep(0.01)
            running[client] -= 1

    async def many() -> list[Any]:
        turns = Turns(lambda: room, 6)
        asked = [asyncio.create_task(ask(turns, client)) for client in "aaaaaaaaabb"]
        await asyncio.sleep(0)
        asked[3].cancel()  # while it waits: its place is another's
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(many())
    refused = [error for error in found if isinstance(error, ApiError)]
    assert {(one.status, one.headers["Retry-After"]) for one in refused} == {(429, "1")}
    assert len(refused) == 3
    assert found[-2:] == [None, None]  # none of the second client's
    assert order[:2] == ["a", "a"] and set(order[2:5]) == {"a", "b"}


def test_requests_that_come_together_are_shared_out() -> None:
    """Each is chosen for before a replica has taken the one before it."""
    facts = {"num_parallel": 4, "identity": "", "share_tokens": 0, "num_pages": 9}
    replicas: list[Any] = [
        SimpleNamespace(
            replica_id=ReplicaID(name, DeploymentID("model")),
            replica_metadata=facts,
            routing_stats=None,
        )
        for name in "ab"
    ]

    async def first_choices(count: int, asked: list[Any]) -> Counter[ReplicaID]:
        order = Order(GenerateRequest(SamplingParams(), prompt_ids=[1, 2]), "", [])
        for _ in range(count):
            asked.append(PendingRequest([order], {}, RequestMetadata("", uuid.uuid4().hex)))
        ranks = [await router.choose_replicas(replicas, one) for one in asked]
        return Counter(rank[0][0].replica_id for rank in ranks)

    async def run() -> None:
        asked: list[Any] = []
        assert sorted((await first_choices(8, asked)).values()) == [4, 4]
        assert sorted((await first_choices(0, asked)).values()) == [4, 4]  # once more each
        router._replicas = {one.replica_id: one for one in replicas}
        for request in asked[:4]:
            router.on_request_routed(request, replicas[0].replica_id, None)
        asked.clear()  # the others are cancelled
        assert await first_choices(4, asked) == {replicas[1].replica_id: 4}

    router = PrefixRouter(DeploymentID("model"), DeploymentHandleSource.REPLICA)
    router.initialize_state()
    asyncio.run(run())


def test_a_file_is_one_of_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are those that were given, and the application is made of them."""
    # In a cluster of enough nodes, whatever Ray this process has.
    monkeypatch.setattr("hotcold.ui.fleet.application.require_nodes", lambda *_: None)
    path = tmp_path / "fleet.yaml"
    line = ["fleet", "--replicas", "2", "--max-replicas", "3", "--threads", "1", "--cpu-memory"]
    line += ["2GiB", "--nnodes", "2"]
    assert run_main(*line, "--write", str(path)).status == 0
    values = yaml.safe_load(path.read_text())
    (one,) = ServeDeploySchema.model_validate(values).applications
    args = FleetArgs.model_validate(one.args)
    assert args.system.num_threads == 1 and args.system.cpu_memory_bytes == 2 << 30
    assert (args.replicas, args.max_replicas, args.nnodes) == (2, 3, 2)
    assert app(args) is not None


def test_a_system_on_two_nodes_has_a_share_of_each() -> None:
    """The first has its GPU; each node has another share, as long as there is room."""
    args = [FleetArgs(nnodes=count, options={"threads": 1}) for count in (1, 2)]
    alone, shared = (fleet_models([], one.system)[0] for one in args)
    assert shared.bundle["memory"] < alone.bundle["memory"]
    first, second = replace(shared, bundle=shared.bundle | {"GPU": 1.0}).bundles
    assert first == second | {"GPU": 1.0}
    nodes = [{"CPU": 2.0, "memory": 1e12} for _ in range(3)]
    for _ in range(3):
        one, other = _places(shared.bundles, nodes)
        assert one is not other
        for node in (one, other):
            node |= {name: node[name] - shared.bundle[name] for name in node}
    assert _places(shared.bundles, nodes) == []


def test_a_rayservice_holds_it(tmp_path: Path) -> None:
    """Its pods have what a replica reserves; it is as KubeRay's schema says, if that is here."""
    path, models = tmp_path / "fleet.yaml", tmp_path / "models"
    for name in ("one", "two"):
        shutil.copytree(DEMO_DIRECTORY, models / name)
    line = ["fleet", str(models), "--replicas", "0", "--max-replicas", "2", "--threads", "3"]
    line += ["--nnodes", "2", "--write", str(path), "--kuberay"]
    assert run_main(*line, "--device", "cuda").status == 0
    groups = yaml.safe_load(path.read_text())["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [(one["groupName"], one["maxReplicas"]) for one in groups] == [("gpu", 4), ("cpu", 4)]
    (gpu,), (cpu,) = (one["template"]["spec"]["containers"] for one in groups)
    assert gpu["resources"]["limits"] == cpu["resources"]["limits"] | {"nvidia.com/gpu": "1"}
    assert run_main(*line).status == 0
    manifest = yaml.safe_load(path.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (one,) = ServeDeploySchema.model_validate(config).applications
    args = FleetArgs.model_validate(one.args)
    assert args.models == [str(models / name) for name in ("one", "two")]
    cluster = manifest["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (group,) = cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == (0, 8)
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert limits["cpu"] == "3"
    (need,) = {model.bundle["memory"] for model in fleet_models(args.models, args.system)}
    assert need < int(limits["memory"].removesuffix("Gi")) << 30 < 3 * need
    if crd := os.environ.get(
        "HOTCOLD_KUBERAY_CRD"
    ):  # KubeRay's helm-chart: ray.io_rayservices.yaml
        version = yaml.safe_load(Path(crd).read_text())["spec"]["versions"][0]
        _require_schema(manifest, version["schema"]["openAPIV3Schema"])


def _require_schema(value: Any, schema: dict[str, Any]) -> None:
    """Check a value's types, and that an object has all required keys and no others."""
    if value is None or "x-kubernetes-int-or-string" in schema:
        return
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    assert isinstance(value, kinds[schema["type"]]), (value, schema)
    assert value in schema.get("enum", [value])
    if isinstance(value, dict) and "properties" in schema:
        missing, properties = set(schema.get("required", ())) - value.keys(), schema["properties"]
        assert not missing and not value.keys() - properties.keys(), (value.keys(), schema)
        for name, one in value.items():
            if name != "metadata":  # Kubernetes' own
                _require_schema(one, properties[name])
    for one in value if isinstance(value, list) else []:
        _require_schema(one, schema["items"])


@pytest.mark.parametrize(
    ("options", "told"),
    [({"treads": 2}, "no option of a system"), ({"hosts": ["10.0.0.1"]}, "give --nnodes")],
)
def test_wrong_options_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        app(FleetArgs(options=options))
