"""What is kept on disk is this user's alone: compiled kernels are unpickled, or run by a GPU."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import NullCache

from hotcold.cuda_kernels import compiled
from hotcold.jobs.support import loading
from hotcold.numba_kernels import one_compiler, own_cache
from hotcold.numba_kernels.load import convert
from hotcold.numba_kernels.one_compiler import KernelCache
from tests.full_disk import files_of_at_most

_FOLDERS: list[Callable[[], Path]] = [
    lambda: own_cache.own_folder("room"),
    compiled.cache_folder.__wrapped__,
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder; the current one is elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    own_cache._tell_once.cache_clear()
    yield tmp_path / "home"
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("folder", _FOLDERS, ids=["cpu", "gpu"])
@pytest.mark.parametrize("chosen", [None, "", "cache", "./cache"])
def test_it_is_never_below_the_current_folder(
    folder: Callable[[], Path], chosen: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert folder().parent == home / ".cache" / "hotcold"


@pytest.mark.parametrize("folder", _FOLDERS, ids=["cpu", "gpu"])
def test_it_is_made_for_its_owner_alone(
    folder: Callable[[], Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    before = os.umask(0)
    try:
        made = folder()
    finally:
        os.umask(before)
    for one in (made, made.parent):
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
    assert folder() == made


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
@pytest.mark.parametrize("which", ["hotcold", "hotcold/room", "hotcold/cuda"])
def test_one_that_others_may_write_is_not_used(
    which: str, mode: int, home: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    (home / which).mkdir(parents=True)
    (home / which).chmod(mode)
    assert home not in compiled.cache_folder.__wrapped__().parents or which == "hotcold/room"
    if which != "hotcold/cuda":
        for _ in range(2):
            with pytest.raises(PermissionError):
                own_cache.own_folder("room")
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and f"{home}/hotcold" in told and "XDG_CACHE_HOME" in told


def test_another_users_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    own_cache.own_folder("room")
    compiled.cache_folder.__wrapped__()
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(PermissionError):
        own_cache.own_folder("room")
    assert home not in compiled.cache_folder.__wrapped__().parents


def test_in_a_folder_open_to_all_anybody_could_swap_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(PermissionError):
        own_cache.own_folder("room")
    home.chmod(0o1777)
    assert own_cache.own_folder("room") == home / "hotcold" / "room"


def test_kernels_are_compiled_in_memory_then(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = convert.widen_kernel.py_func
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert isinstance(one_compiler._cache_of(kernel), KernelCache)
    (home / "hotcold").chmod(0o777)
    assert isinstance(one_compiler._cache_of(kernel), NullCache)


def test_a_full_folder_is_said_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    own_cache.tell_if_full()
    assert capsys.readouterr().err == "" and not list((home / "hotcold").iterdir())
    with files_of_at_most(1000):
        for _ in range(2):
            own_cache.tell_if_full()
    assert capsys.readouterr().err == (
        f"hotcold: nothing more can be kept in {home}/hotcold (File too large), so kernels are "
        "compiled at every start; make room there, or set XDG_CACHE_HOME to another folder\n"
    )


def test_a_full_folder_is_said_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Started(Exception):
        pass

    def start(*arguments: Any, **options: Any) -> None:
        said.append("started")
        raise Started

    monkeypatch.setattr(loading, "tell_if_full", lambda: said.append("full"))
    monkeypatch.setattr(loading, "tell_draft", lambda system: None)
    monkeypatch.setattr(loading, "require_bundles", lambda system: None)
    monkeypatch.setattr("hotcold.actors.system.System.start", start)
    system: Any = None
    with pytest.raises(Started), loading.running_system(system):
        pass
    assert said == ["full", "started"]


def test_a_gpus_kernel_for_which_there_is_no_room_is_this_processs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    path = compiled.cache_folder.__wrapped__() / "kernel"
    assert compiled._kept(path, b"code") == path and path.read_bytes() == b"code"
    write, tried = compiled._write, []

    def full(path: Path, code: bytes) -> None:
        tried.append(path)
        with files_of_at_most(2 if len(tried) == 1 else 100):
            write(path, code)

    monkeypatch.setattr(compiled, "_write", full)
    other = compiled._kept(path.with_name("another"), b"more code")
    assert home not in other.parents and other.read_bytes() == b"more code"
    assert [one.name for one in path.parent.iterdir()] == ["kernel"]
