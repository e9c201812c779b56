"""Reads of a file, timed: what is read is counted, and what cannot be read is said."""

from __future__ import annotations

import importlib
import io
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from hotcold.jobs.support import console as console_of_commands
from hotcold.model.bundles.direct_io import open_direct
from hotcold.numba_kernels.measure import read_places, read_places_by_ring
from hotcold.numba_kernels.storage import RING_DEPTH
from hotcold.numba_kernels.storage.direct_file import SHORT
from hotcold.numba_kernels.storage.io_ring import (
    OPERATION,
    close_ring,
    has_rings,
    new_ring,
    register_buffers,
)
from hotcold.placement.machine import measure_disk as measure
from hotcold.placement.machine.measure_disk import measure_bursts, measure_disk

doctor = importlib.import_module(
    "hotcold.jobs.commands.doctor"
)  # the package names the command so too


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are of reads for a twentieth of a second."""
    monkeypatch.setattr(measure, "_SIZE_S", 0.05)


def test_every_place_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "f"
    content = np.random.default_rng(1).integers(0, 256, 8 * 4096).astype(np.uint8)
    file.write_bytes(content.tobytes())
    opened, into = open_direct(file), np.zeros(2 * 4096, np.uint8)
    start = -into.ctypes.data % 4096
    page, taken = into[start : start + 4096], np.zeros(1, np.int32)
    places = np.array([4096, 3 * 4096])
    assert read_places(*opened, places, 4096, 10**12, taken, page) == 0
    np.testing.assert_array_equal(page, content[3 * 4096 : 4 * 4096])
    assert taken[0] == 3  # the last look found nothing
    taken[:] = 0
    assert read_places(*opened, np.array([8 * 4096]), 4096, 10**12, taken, page) == SHORT


@pytest.mark.parametrize(("depth", "is_kept"), [(1, False), (3, True), (64, True)])
def test_a_ring_reads_every_place_once(tmp_path: Path, depth: int, is_kept: bool) -> None:
    """More places than reads at once, and more than the ring has entries."""
    ring = new_ring(depth)
    if ring is None:
        pytest.skip("no io_uring here")
    file = tmp_path / "f"
    content = np.random.default_rng(1).integers(0, 256, 50 * 4096).astype(np.uint8)
    file.write_bytes(content.tobytes())
    opened, done = open_direct(file), np.zeros(1, np.int64)
    space = np.zeros((depth + 1) * 4096, np.uint8)
    start = -space.ctypes.data % 4096
    into = space[start : start + depth * 4096].reshape(depth, 4096)
    if is_kept:
        plain = int(ring.facts[OPERATION])
        register_buffers(ring, np.zeros(0, np.uint8))  # which the kernel refuses to lock
        assert ring.facts[OPERATION] == plain
        register_buffers(ring, into)
        assert ring.facts[OPERATION] != plain
    for first in range(50):
        places = np.arange(first, 50) * 4096
        read = read_places_by_ring(ring, opened.descriptor, places, 4096, 10**12, done, into)
        assert read == 0 and done[0] == 50 - first
        pages = {bytes(content[p : p + 4096]) for p in places[-depth:]}
        assert bytes(content[-4096:]) in {bytes(page) for page in into}
        assert depth > 1 or {bytes(page) for page in into} == pages
    beyond = np.array([0, 50 * 4096, 0, 0])
    args = (opened.descriptor, beyond, 4096, 10**12, done, into)
    assert read_places_by_ring(ring, *args) == SHORT
    assert read_places_by_ring(ring, 10**6, *args[1:]) == 9  # EBADF
    close_ring(ring)


def test_rates_and_what_is_too_short(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(1 << 20))
    assert all(rate > 0 for rate in measure_disk(file, (4096, 1 << 16), 3))
    with pytest.raises(OSError, match="of a file of 1048576"):
        measure_disk(file, (2 << 20,))
    with pytest.raises(OSError, match="of a file of 1048576"):
        measure_bursts(file, 1 << 16, 17)


def test_bursts_are_faster_than_a_limit_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that lets a megabyte pass at once, then two a second; the clock is its own."""
    file, clock, spare = tmp_path / "f", [0.0], [1 << 20]
    file.write_bytes(bytes(2 << 20))

    def passes(seconds: float) -> None:
        clock[0] += seconds
        spare[0] = min(1 << 20, spare[0] + round(seconds * (2 << 20)))

    def read(ring, descriptor, places, size, max_ns, done, into) -> int:
        done[0], until = 0, clock[0] + max_ns / 1e9
        for _ in places:
            if clock[0] >= until:
                break
            passes(1e-4)
            if spare[0] < size:
                passes((size - spare[0]) / (2 << 20))
            spare[0], done[0] = spare[0] - size, done[0] + 1
        return 0

    ring = object(), np.zeros(RING_DEPTH << 16, np.uint8)
    monkeypatch.setattr(measure, "_ring_of", lambda *args: nullcontext(ring))
    monkeypatch.setattr(measure, "read_places_by_ring", read)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=passes))
    burst, long = measure_bursts(file, 1 << 16, 8)
    assert long == pytest.approx(2 << 20, rel=0.05)
    assert burst == pytest.approx((1 << 16) / 1e-4, rel=0.01)


def test_doctor_says_how_fast_a_models_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_READ_SIZES", (4096, 8192))
    (tmp_path / "small").write_bytes(bytes(4096))
    (tmp_path / "weights").write_bytes(bytes(1 << 16))
    assert doctor._disk(tmp_path) == {}  # too small to say anything
    monkeypatch.setattr(doctor, "_MIN_FILE_BYTES", 1 << 16)
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(console_of_commands, "stderr_console", lambda: terminal)
    found = doctor._disk(tmp_path)
    assert "reading weights" in shown.getvalue() and "━" in shown.getvalue()
    assert list(found) == ["1", "16", *(["128"] if has_rings() else [])] and all(
        rate > 0 for rates in found.values() for rate in rates
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(doctor._disk_table(found))
    text = console.export_text()
    assert "16 at a time" in text and "GB/s of 8 KiB" in text
    assert ("128 at a time" in text) == has_rings()
