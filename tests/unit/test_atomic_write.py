"""Files that others find whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hotcold.model.files import atomic_write
from hotcold.model.files.atomic_write import write_atomic, write_if_absent


@pytest.mark.parametrize("write", [write_if_absent, write_atomic])
def test_nothing_is_left_of_what_fails(tmp_path: Path, write) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "inside").touch()
    if write is write_atomic:
        with pytest.raises(OSError):
            write(tmp_path / "file", b"one")
    else:
        write(tmp_path / "file", b"one")  # a file that exists
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_writers_of_one_process_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads, or two containers with the same process number, that write at the same time."""
    path, both = tmp_path / "file", threading.Barrier(2)
    sync, failed = os.fsync, []
    contents = [bytes([letter]) * 100_000 for letter in b"ab"]

    def wait(descriptor: int) -> None:
        both.wait(60)  # the folder's too: each has then taken its name
        sync(descriptor)

    def write(content: bytes) -> None:
        try:
            write_atomic(path, content)
        except OSError as problem:
            failed.append(problem)

    monkeypatch.setattr(atomic_write.os, "fsync", wait)
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == [] and path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [write_if_absent, write_atomic])
def test_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write
) -> None:
    """The name is on the disk when the writer returns: a power loss leaves either file whole."""
    path, asked = tmp_path / "file", []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

    def noted(name: str, *arguments) -> None:
        is_file = name == "fsync" and os.path.isfile(f"/proc/self/fd/{arguments[0]}")
        size = os.fstat(arguments[0]).st_size if is_file else None
        asked.append((name, size))
        real[name](*arguments)

    for name in real:
        monkeypatch.setattr(
            atomic_write.os, name, lambda *arguments, name=name: noted(name, *arguments)
        )
    write(path, b"one")
    named = "link" if write is write_if_absent else "replace"
    assert asked == [("fsync", 3), (named, None), ("fsync", None)]


def test_what_a_killed_writer_has_left_goes(tmp_path: Path) -> None:
    """Once it is too old to be still written; other files stay."""
    path = tmp_path / "file"
    old, own, other = (tmp_path / f"file.{name}" for name in ("4711.part", "0aff.part", "x.part"))
    for part in (old, own, other):
        part.touch()
    for part in (old, other):
        os.utime(part, (1, 1))
    write_atomic(path, b"one")
    assert sorted(tmp_path.iterdir()) == sorted([path, own, other])


def test_the_first_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"two"):
        write_if_absent(path, content)
        assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
