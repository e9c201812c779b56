"""What is kept on disk is this user's alone: compiled kernels are unpickled, or run by a GPU."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hotcold.cuda_kernels import compiled
from hotcold.cuda_kernels.source import Entry
from hotcold.numba_kernels import own_cache
from tests.full_disk import files_of_at_most


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder; the current one is elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    own_cache._tell_once.cache_clear()
    yield tmp_path / "home"
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("chosen", [None, "", "cache", "./cache"])
def test_it_is_never_below_the_current_folder(
    chosen: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert own_cache.own_folder("room") == home / ".cache" / "hotcold" / "room"


def test_it_is_made_for_its_owner_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    before = os.umask(0)
    try:
        made = own_cache.own_folder("room")
    finally:
        os.umask(before)
    for one in (made, made.parent):
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
    assert own_cache.own_folder("room") == made


@pytest.mark.parametrize(
    ("which", "mode"), [("hotcold", 0o775), ("hotcold/room", 0o757), ("hotcold", 0o1777)]
)
def test_one_that_others_may_write_is_not_used(
    which: str, mode: int, home: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    (home / which).mkdir(parents=True)
    (home / which).chmod(mode)
    for _ in range(2):
        with pytest.raises(PermissionError):
            own_cache.own_folder("room")
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"{home}/hotcold" in told and "XDG_CACHE_HOME" in told


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
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)  # nor is another user's used
    with pytest.raises(PermissionError):
        own_cache.own_folder("room")


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


@pytest.mark.parametrize("damage", ["none", "another byte", "cut", "others may write", "full"])
def test_a_gpus_kernel_is_read_where_it_is_whole(
    damage: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is compiled again, and kept where there is room."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    made: list[bytes] = []

    def compile_using_nvrtc(source: str, options: Any, filename: str) -> tuple[bytes, None]:
        made.append(b"code %d" % len(made))
        return made[-1], None

    cuda = ModuleType("cupy.cuda")
    cuda.__dict__.update(
        Device=lambda: SimpleNamespace(compute_capability="90"),
        compiler=SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    entry = Entry("gates", "GATES")
    monkeypatch.setattr(compiled, "entry_source", lambda entry: "source")
    assert compiled.compiled_code(entry) == compiled.compiled_code(entry) == b"code 0"
    (file,) = (home / "hotcold" / "cuda").iterdir()
    if damage in ("another byte", "cut"):
        file.write_bytes(file.read_bytes()[:-1] + b"?" * (damage != "cut"))
    elif damage == "others may write":
        file.parent.chmod(0o777)
    elif damage == "full":
        file.unlink()
        with files_of_at_most(2):
            assert compiled.compiled_code(entry) == b"code 1"
        assert not list(file.parent.iterdir())
    for _ in range(2):
        found = compiled.compiled_code(entry)
    assert found == made[-1] and len(made) == {"none": 1, "others may write": 3, "full": 3}.get(
        damage, 2
    )
