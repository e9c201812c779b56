"""The files for Ray's cluster launcher and for KubeRay are what these take."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from hotcold.actors.processes.cluster import NUMA_NODE

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_FILES = ["cluster.yaml", "clusters/aws.yaml"]


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return config


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_ray_accepts_it(name: str) -> None:
    validate_config(prepare_config(read(name)))


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_nothing_listens_beyond_the_machine_without_a_token(name: str) -> None:
    config = read(name)
    head, worker = (" ".join(config[f"{kind}_start_ray_commands"]) for kind in ("head", "worker"))
    assert "--dashboard-host=127.0.0.1" in head
    for start in (head, worker):
        assert start.count("ray start") == start.count("RAY_AUTH_MODE=token") == 1
        assert "RAY_worker_niceness=0" in start
    assert "~/.ray/auth_token" in config["file_mounts"]
    # Ray makes it readable for everybody.
    assert "chmod 600 ~/.ray/auth_token" in config["setup_commands"]


def test_node_types_offer_numa_nodes() -> None:
    config = read("clusters/aws.yaml")
    types = config["available_node_types"]
    assert set(types) == {"head", "gpu", "cpu"}
    assert all(kind["resources"][NUMA_NODE] >= 1 for kind in types.values())
    assert types["gpu"]["resources"]["GPU"] == 1
    assert "GPU" not in types["cpu"]["resources"]
    prepared = prepare_config(config)
    assert prepared["head_node_type"] in prepared["available_node_types"]


def test_the_manifest_has_the_oldest_ray_that_is_admitted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = (one for one in project["dependencies"] if one.startswith("ray>"))
    assert read("clusters/kuberay.yaml")["spec"]["rayVersion"] == found.partition(">=")[2] + ".0"


def groups() -> list[dict[str, Any]]:
    spec = read("clusters/kuberay.yaml")["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_the_kuberay_manifest_is_whole() -> None:
    manifest = read("clusters/kuberay.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    assert [group.get("groupName", "head") for group in groups()] == ["head", "gpu", "cpu"]
    for group in groups():
        if "groupName" in group:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        # Ray is started by a shell, so the value is quoted twice.
        resources = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert resources[NUMA_NODE] >= 1
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        # Whole cores, and as many at most as at least: else the pod gets no cores of its own.
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"]["cpu"].isdecimal()
        variables = {variable["name"] for variable in container["env"]}
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_worker_niceness"} <= variables
