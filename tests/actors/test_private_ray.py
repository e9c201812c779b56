"""A private Ray: what it starts, what it leaves behind, and what happens where it cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors import launch
from actors.processes import private_ray
from actors.processes.session_folder import PREFIX, SessionFolder
from tests.actors.private_ray_script import Echo


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, with a short name."""
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process with a private Ray, and what it told of it."""
    command = [sys.executable, "-m", "tests.actors.private_ray_script"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def of_kind(told: dict[str, Any], kind: str) -> list[int]:
    """Process ids of those whose program has that in its name."""
    named = {pid: words.split(" --")[0].split("/")[-1] for pid, words in told["processes"].items()}
    return [int(pid) for pid, name in named.items() if kind in name]


def ended(pids: list[int]) -> bool:
    """Wait until these processes have ended."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=60)[1]


@pytest.mark.parametrize("how", ["shutdown", "exit", "interrupt"])
def test_nothing_stays_after_the_end(base: Path, how: str) -> None:
    with owner() as (process, told):
        assert told["said"] == "here"
        assert list(base.glob(f"{PREFIX}*")) == [Path(told["folders"][0])]
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        process.communicate(f"{how}\n".encode(), timeout=60)
        assert ended([int(pid) for pid in told["processes"]])
    assert not list(base.iterdir())


def test_it_starts_only_what_is_needed() -> None:
    with owner() as (process, told):
        process.communicate(b"exit\n", timeout=60)
    kinds = ("gcs_server", "raylet", "stand_in_agent", "ray::")
    counts = {kind: len(of_kind(told, kind)) for kind in kinds}
    assert counts == {"gcs_server": 1, "raylet": 1, "stand_in_agent": 2, "ray::": 3}
    assert len(told["processes"]) == 7
    assert told["has_memory"]  # of /dev/shm, all that its object store may fill
    assert told["monitor_every_ms"] == "0"


def test_all_end_with_an_owner_that_was_killed_and_its_folder_with_the_next_start(
    base: Path,
) -> None:
    with owner() as (living, told_by_living), owner() as (killed, told):
        foreign = base / f"{PREFIX}file"
        foreign.write_text("")
        elsewhere = base / "elsewhere"
        (elsewhere / "kept").mkdir(parents=True)
        (base / f"{PREFIX}link").symlink_to(elsewhere)
        killed.send_signal(signal.SIGKILL)
        assert ended([int(pid) for pid in told["processes"]])
        assert Path(told["folders"][0]).exists()
        with owner() as (_, told_by_next):
            left = set(base.glob(f"{PREFIX}*"))
            assert Path(told["folders"][0]) not in left
            for each in (told_by_living, told_by_next):
                assert Path(each["folders"][0]) in left
                assert psutil.pid_exists(of_kind(each, "gcs_server")[0])
                assert psutil.pid_exists(of_kind(each, "raylet")[0])
        living.communicate(b"exit\n", timeout=60)
    assert foreign.exists() and (elsewhere / "kept").exists()
    SessionFolder.remove_dead()
    assert sorted(path.name for path in base.iterdir()) == [
        "elsewhere",
        f"{PREFIX}file",
        f"{PREFIX}link",
    ]


def test_the_stand_ins_end_with_the_raylet() -> None:
    with owner() as (_, told):
        os.kill(of_kind(told, "raylet")[0], signal.SIGKILL)
        assert ended(of_kind(told, "stand_in_agent"))


def test_another_version_of_ray_is_started_as_it_wants(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise TypeError("the raylet's command has changed")

    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr(private_ray, "_with_command", unknown)
    launch.start_local_ray(1, 0)
    try:
        assert not list(base.glob(f"{PREFIX}*"))
        assert ray.get(Echo.remote().say.remote("here")) == "here"  # type: ignore[attr-defined]
        children = set(psutil.Process().children(recursive=True)) - before
        servers = [child for child in children if "gcs_server" in child.name()]
        assert len(servers) == 1  # that of the private one has been ended
    finally:
        ray.shutdown()
