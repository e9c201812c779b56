"""A head that offers no CPUs, as on Kubernetes: a system runs on a node that comes, or never."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hotcold.actors.processes import cluster
from tests.cluster.head import running_head
from tests.cluster.request_files import GREEDY, read_lines, write_lines
from tests.conftest import TinyCheckpoint

_EMPTY_LISTS = (
    "cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands",
    "setup_commands", "head_setup_commands", "worker_setup_commands", "head_start_ray_commands",
    "worker_start_ray_commands",
)  # fmt: skip
# An autoscaler that never brings a node by itself: the test does.
CONFIG: dict[str, object] = {
    **{key: [] for key in _EMPTY_LISTS},
    **{key: {} for key in ("auth", "head_node", "worker_nodes", "file_mounts")},
    "cluster_name": "c",
    "max_workers": 0,
    "provider": {"type": "fake_multinode"},
    "available_node_types": {"head": {"resources": {"CPU": 0}, "node_config": {}}},
    "head_node_type": "head",
    "file_mounts_sync_continuously": False,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 60,
}


@pytest.mark.thorough
def test_a_node_that_the_autoscaler_brings_is_waited_for(
    checkpoint: TinyCheckpoint, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_FAKE_CLUSTER", "1")
    monkeypatch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
    config, out = tmp_path / "config.json", tmp_path / "out.jsonl"
    config.write_text(json.dumps(CONFIG))
    asked = {"id": 1, "ids": checkpoint.ids[:10].tolist(), "sampling": GREEDY}
    requests = write_lines(tmp_path / "in.jsonl", [asked])
    command = ["python", "-m", "jobs.generate", "--requests", str(requests), "--out", str(out)]
    with (
        running_head(0, f"--autoscaling-config={config}") as head,
        head.beside(*command, "--model", str(model), "--threads", "2") as running,
    ):
        assert running.stdout is not None
        log = [running.stdout.readline()]
        while log[-1] and "waiting for a node of 2 CPUs" not in log[-1]:
            log.append(running.stdout.readline())
        assert log[-1], log
        with head.joined(num_cpus=2):
            rest, _ = running.communicate(timeout=600)
            assert running.returncode == 0, rest
    assert [answer["ids"] for answer in read_lines(out)] == [checkpoint.greedy_ids]


@pytest.mark.parametrize(
    ("types", "can_grow"),
    [({"ab12": "node_ab12"}, False), ({"10.0.0.1": "head", "10.0.0.2": "node_10"}, True)],
)
def test_whether_an_autoscaler_reports(
    types: dict[str, str], can_grow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A monitor reports without one, too, and an autoscaler's first status may have no report."""
    states = iter([b"", b"{}", json.dumps({"autoscaler_report": {"node_type_mapping": types}})])

    def get(key: str, namespace: str | None = None) -> object:
        return next(states) if namespace is None else None

    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_get", get)
    monkeypatch.setattr("ray._private.worker._global_node", None)
    assert cluster.can_grow() == can_grow


def test_a_ray_of_this_process_has_no_autoscaler_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = SimpleNamespace(is_head=lambda: True)
    monkeypatch.setattr("ray._private.worker._global_node", own)
    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_get", None)  # is not asked
    assert not cluster.can_grow()
