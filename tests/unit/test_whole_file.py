"""Files that others find whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.files.whole_file import write_first, write_whole


def test_the_last_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"one", b"two"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_the_first_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"two"):
        write_first(path, content)
        assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [write_first, write_whole])
def test_nothing_is_left_of_what_fails(tmp_path: Path, write) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "inside").touch()
    if write is write_whole:
        with pytest.raises(OSError):
            write(tmp_path / "file", b"one")
    else:
        write(tmp_path / "file", b"one")  # somebody has been there
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
