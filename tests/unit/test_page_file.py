"""Pages in a file: what is read is what was written, or nothing, whatever happened to the file."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from hotcold.model.files.page_file import (
    BLOCK,
    SLOTS_A_TABLE,
    LockedFileError,
    PageFile,
)

PAGE = 3000  # no multiple of any unit
IDENTITY = b"a model, a format, a machine"


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int, num_bytes: int = PAGE) -> bytes:
    return random.Random(number).randbytes(num_bytes)


def in_pieces(page: bytes | bytearray) -> list[memoryview]:
    """As a KV cache has a page: several pieces, here of unequal sizes."""
    view, cuts = memoryview(page), [0, 1, len(page) // 3, len(page) // 3, len(page)]
    return [view[first:last] for first, last in pairwise(cuts)]


def opened(
    path: Path,
    max_pages: int = 1000,
    identity: bytes = IDENTITY,
    page: int = PAGE,
) -> PageFile:
    """A file that has room for so many pages."""
    unit = BLOCK if page >= BLOCK else 512
    slot = -(-page // unit) * unit
    tables = -(-max_pages // SLOTS_A_TABLE)
    most = BLOCK * (1 + tables) + max_pages * slot
    return PageFile(path, identity, page, lambda num_bytes: num_bytes <= most)


def write(file: PageFile, *numbers: int) -> list[bytes]:
    return [given for n in numbers for given in file.write(key(n), in_pieces(content(n)))]


def read(file: PageFile, number: int) -> bytes | None:
    page = bytearray(file.page_bytes)
    return bytes(page) if file.read(key(number), in_pieces(page)) else None


def require_true(file: PageFile, numbers: range) -> set[int]:
    """Each page is right or not there; returns those that are there."""
    found = {number: read(file, number) for number in numbers}
    assert all(page in (None, content(number)) for number, page in found.items())
    return {number for number, page in found.items() if page is not None}


def test_pages_come_back_in_a_later_process(tmp_path: Path) -> None:
    path = tmp_path / "a.pages"
    file = opened(path)
    assert write(file, *range(150)) == []  # three tables
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert file.num_bytes == path.stat().st_size
    file.close()
    file = opened(path)
    assert file.note == "" and file.keys() == {key(number) for number in range(150)}
    assert require_true(file, range(151)) == set(range(150))
    file.close()


def test_the_least_recently_used_pages_go_first(tmp_path: Path) -> None:
    file = opened(tmp_path / "a.pages", max_pages=4)
    assert write(file, 0, 1, 2, 3) == []
    file.touch([key(0), key(1)])  # the first one is used last
    assert write(file, 4) == [key(2)]
    assert write(file, 3) == []  # it is there: used
    assert write(file, 5, 6) == [key(1), key(0)]
    file.close()
    file = opened(tmp_path / "a.pages", max_pages=4)  # the order is on file
    assert write(file, 7, 8) == [key(4), key(3)]
    assert require_true(file, range(9)) == {5, 6, 7, 8}
    file.close()


def test_a_smaller_limit_keeps_the_pages_used_last(tmp_path: Path) -> None:
    path = tmp_path / "a.pages"
    file = opened(path)
    write(file, *range(100))
    file.touch([key(2), key(99)])
    file.close()
    file = opened(path, max_pages=5)
    assert require_true(file, range(100)) == {2, 99, 98, 97, 96}
    assert path.stat().st_size == file.num_bytes <= BLOCK * 2 + 5 * 3072
    assert write(file, 100) == [key(96)]
    file.close()
    file = opened(path, max_pages=5)
    assert file.note == "" and require_true(file, range(101)) == {2, 97, 98, 99, 100}
    file.close()


@pytest.mark.parametrize("page", [17, 3 * BLOCK + 1])
def test_any_size_of_page(tmp_path: Path, page: int) -> None:
    file = opened(tmp_path / "a.pages", 3, page=page)
    for number in range(5):
        file.write(key(number), in_pieces(content(number, page)))
    assert [read(file, n) for n in range(5)] == [None, None, *(content(n, page) for n in (2, 3, 4))]
    file.close()


def test_a_file_that_is_open_or_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pages"
    file = opened(path)
    with pytest.raises(LockedFileError):
        opened(path)
    file.close()
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="open to others"):
        opened(path)


@pytest.mark.parametrize(("identity", "page"), [(b"another model", PAGE), (IDENTITY, PAGE + 1)])
def test_a_file_of_another_model_is_begun_anew(tmp_path: Path, identity: bytes, page: int) -> None:
    path = tmp_path / "a.pages"
    file = opened(path)
    write(file, 1, 2)
    file.close()
    file = opened(path, identity=identity, page=page)
    assert not file.keys() and file.note and "\n" not in file.note and read(file, 1) is None
    file.close()


def test_a_page_in_another_place_is_refused(tmp_path: Path) -> None:
    """Each entry with its page is whole, but they stand in each other's slots."""
    path = tmp_path / "a.pages"
    file = opened(path)
    write(file, 1, 2)
    slot = file.slot_bytes
    file.close()
    bytes_now = bytearray(path.read_bytes())
    table, first = BLOCK, 2 * BLOCK
    for at, size in ((table, 64), (first, slot)):
        one, two = bytes_now[at : at + size], bytes_now[at + size : at + 2 * size]
        bytes_now[at : at + 2 * size] = two + one
    path.write_bytes(bytes_now)
    file = opened(path)
    assert file.keys() == set() and "2 of its pages are damaged" in file.note
    file.close()


def test_flipped_bytes(tmp_path: Path) -> None:
    """A byte that differs anywhere costs pages; it never changes one."""
    path = tmp_path / "a.pages"
    file = opened(path)
    write(file, *range(5))
    file.close()
    good = path.read_bytes()
    chosen = random.Random(3)
    used = [*range(80), *range(BLOCK, BLOCK + 5 * 64)]
    pages = chosen.sample(range(2 * BLOCK, len(good)), 40)
    num_lost = 0
    for place in [*used, *pages]:
        damaged = bytearray(good)
        damaged[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        file = opened(path)
        there = require_true(file, range(5))
        padding = place >= 2 * BLOCK and (place - 2 * BLOCK) % file.slot_bytes >= PAGE
        assert len(there) == (0 if place < BLOCK else 5 if padding else 4), place
        assert (file.note == "") == (place >= 2 * BLOCK)
        assert file.keys() == {key(number) for number in there}  # damaged ones are forgotten
        num_lost += len(there) < 5
        file.close()
    assert num_lost > 300


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "a.pages"
    file = opened(path)
    write(file, *range(70))
    file.close()
    good = path.read_bytes()
    chosen = random.Random(4)
    for size in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, *chosen.sample(range(len(good)), 20)]:
        path.write_bytes(good[:size])
        file = opened(path)
        there = require_true(file, range(70))
        assert there == set(range(len(there)))
        write(file, *range(70, 75))
        file.close()
        file = opened(path)
        assert file.note == "" and require_true(file, range(75)) == there | set(range(70, 75))
        file.close()


ROOT = Path(__file__).resolve().parents[2]
_WRITER = """
    import sys, random
    from pathlib import Path
    from tests.unit.test_page_file import opened, write
    file, number = opened(Path(sys.argv[1]), 40), int(sys.argv[2])
    print(len(file.keys()), flush=True)
    while True:
        write(file, number)
        number += 1
"""


def test_a_writer_killed_at_any_moment(tmp_path: Path) -> None:
    path, chosen = tmp_path / "a.pages", random.Random(5)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for start in range(0, 3_000_000, 1_000_000):
        command = [sys.executable, "-c", textwrap.dedent(_WRITER), str(path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            size = path.stat().st_size
            while path.stat().st_size == size and size < 40 * 3072:  # it writes
                pass
            for _ in range(chosen.randrange(100_000)):
                pass
            writer.send_signal(signal.SIGKILL)
        file = opened(path, 40)
        found = file.keys()
        numbers = [int.from_bytes(one, "little") for one in found]
        assert len(numbers) >= 1
        lost = [number for number in numbers if read(file, number) != content(number)]
        assert lost == []  # an entry is written last
        file.close()


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_full_disk(tmp_path: Path, num_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    file = opened(tmp_path / "a.pages")
    write(file, *range(num_before))
    monkeypatch.setattr(os, "posix_fallocate", full)
    if num_before:
        assert write(file, 10, 11) == [key(0), key(1)]
        assert require_true(file, range(12)) == {2, 10, 11}
    else:
        with pytest.raises(OSError, match="No space left"):
            write(file, 10)
        assert file.keys() == set()
    file.close()
    file = opened(tmp_path / "a.pages")
    assert file.note == "" and len(file.keys()) == num_before
    file.close()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_reads_and_writes_that_stop_half_way(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., int] = getattr(os, call)

    def partly(descriptor: int, pieces: list[memoryview], place: int) -> int:
        first = next(piece for piece in pieces if piece.nbytes)
        return real(descriptor, [first[: max(1, first.nbytes // 2)]], place)

    monkeypatch.setattr(os, call, partly)
    file = opened(tmp_path / "a.pages")
    write(file, *range(3))
    assert require_true(file, range(3)) == {0, 1, 2}
    file.close()
