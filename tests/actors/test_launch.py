"""A Ray of one's own on a machine that is so busy that Ray gives up starting its node.

The first start is of a private Ray, the others are plain ones.
"""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from hotcold.actors import launch
from hotcold.actors.private_ray import start, temp_folder
from hotcold.model.errors import HotcoldError

TIMED_OUT = "The current node timed out during startup. This could happen because ..."


class Starting:
    """Stands in for ray.init: fails as told, each time leaving a process behind."""

    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)
        self.left: list[subprocess.Popen[bytes]] = []

    def __call__(self, **options: Any) -> None:
        self.left.append(subprocess.Popen(["sleep", "1000"]))
        if self.errors:
            raise Exception(self.errors.pop(0))

    @property
    def num_running(self) -> int:
        return sum(process.poll() is None for process in self.left)


class NoServer:
    """Stands in for the process that workers are forked from."""

    @classmethod
    def take(cls) -> NoServer:
        return cls()

    def listen(self, address: Path) -> None:
        assert address.parent.exists()

    def end(self) -> None:
        pass


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_folder, "base_folder", lambda: tmp_path)
    monkeypatch.setattr(start, "ForkServer", NoServer)


@contextmanager
def starting(monkeypatch: pytest.MonkeyPatch, *errors: str) -> Iterator[Starting]:
    found = Starting(*errors)
    monkeypatch.setattr(ray, "init", found)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # of a failed start: this process's lives on
    monkeypatch.setattr(launch, "keep_stdout_clean", lambda: None)
    monkeypatch.setattr(launch, "require_closed", lambda: None)
    before = subprocess.Popen(["sleep", "1000"])
    try:
        yield found
        assert before.poll() is None  # no child of ours, except for Ray's, has been ended
    finally:
        for process in (*found.left, before):
            process.kill()
            process.wait()


def test_a_folder_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts in it all the same, and who looks for dead processes' folders leaves it."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(temp_folder.fcntl, "flock", flock)
    folder = temp_folder.TempFolder()
    temp_folder.TempFolder.remove_dead()
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_newer_ray_starts_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with starting(monkeypatch) as found:
        monkeypatch.setattr(ray, "__version__", "1000.0.0")
        launch.start_local_ray(1, 0)
        assert len(found.left) == 1
    assert "takes longer: version 1000.0.0 is newer than those that were tried" in caplog.text


@pytest.mark.parametrize(
    ("errors", "num_starts"),
    [((), 1), ((TIMED_OUT,) * 3, 4), ((TIMED_OUT,) * 5, 4), (("no such folder",) * 3, 2)],
)
def test_it_starts_again_without_what_was_left_or_gives_up(
    monkeypatch, errors: tuple[str, ...], num_starts: int
) -> None:
    with starting(monkeypatch, *errors) as found:
        if len(errors) < num_starts:
            launch.start_local_ray(1, 0)
            for process in found.left[:-1]:
                process.wait(60)
            assert found.num_running == 1
        else:
            with pytest.raises(Exception, match=errors[0][:20]):
                launch.start_local_ray(1, 0)
        assert len(found.left) == num_starts


@pytest.mark.parametrize(
    ("name", "value", "arena_bytes", "told"),
    [
        ("_MIN_FREE_BYTES", 1 << 60, 0, "where Ray writes its logs, has .* set RAY_TMPDIR"),
        ("_LOOPBACK", "192.0.2.1", 0, r"at 192.0.2.1 \(Cannot assign .*ip link set lo up"),
        ("_LOOPBACK", "127.0.0.1", 1 << 60, "shared memory are needed, and /dev/shm has"),
    ],
)
def test_what_ray_needs_is_looked_for_before_it_starts(
    monkeypatch, name: str, value: object, arena_bytes: int, told: str
) -> None:
    """It would not say what is missing; 192.0.2.1 is nobody's address."""
    monkeypatch.setattr(launch, name, value)
    with starting(monkeypatch) as found:
        with pytest.raises(HotcoldError, match=told):
            launch.start_local_ray(1, arena_bytes)
        assert not found.left
