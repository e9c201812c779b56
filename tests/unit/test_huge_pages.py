"""What doctor says of huge pages: on made-up systems, and on this one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from hotcold.jobs.support import doctor_checks
from hotcold.jobs.support.doctor_checks import Finding, check_machine
from hotcold.model.weights.memory import HUGE_PAGE_BYTES, aligned_empty
from hotcold.placement.machine.memory_pages import (
    HugePageProbe,
    huge_bytes_around,
    probe_huge_pages,
)
from hotcold.placement.machine.survey import survey

MIB = 1 << 20
_PR_SET_THP_DISABLE = 41


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def finding(root: Path) -> Finding:
    """What doctor finds with the settings below `root`."""
    return next(found for found in check_machine(survey(root)) if found.subject == "huge pages")


def settings(root: Path, enabled: str, defrag: str = "always defer [madvise] never\n") -> Path:
    folder = root / "sys/kernel/mm/transparent_hugepage"
    write(folder / "enabled", enabled)
    write(folder / "defrag", defrag)
    return root


def pretend(monkeypatch: pytest.MonkeyPatch, probe: HugePageProbe | None) -> None:
    monkeypatch.setattr(doctor_checks, "probe_huge_pages", lambda: probe)


@pytest.mark.parametrize(
    ("enabled", "got_mib", "level", "texts"),
    [
        ("[always] madvise never\n", 64, "ok", ["always", "64 of 64 MiB in huge pages"]),
        ("always [madvise] never\n", 10, "note", ["10 of 64 MiB", "refuses the rest", "as root"]),
        ("always madvise [never]\n", 0, "note", ["weights get none", "echo madvise >"]),
        ("[always] madvise never\n", None, "note", ["could not be tried"]),
    ],
)
def test_what_doctor_says(
    enabled: str,
    got_mib: int | None,
    level: str,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, None if got_mib is None else HugePageProbe(got_mib * MIB, 64 * MIB))
    found = finding(settings(tmp_path, enabled))
    assert found.level == level
    assert "\n" not in found.text
    for text in texts:
        assert text in found.text


def thp_disabled(value: int) -> bool:
    """Forbid, or allow again, huge pages to this process; whether the system did."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_THP_DISABLE, value, 0, 0, 0) == 0)


def test_this_system() -> None:
    probe = probe_huge_pages(8 * MIB)
    if probe is None:
        pytest.skip("no smaps here")
    assert probe.num_bytes == 8 * MIB
    assert 0 <= probe.huge_bytes <= probe.num_bytes
    assert probe.huge_bytes % HUGE_PAGE_BYTES == 0
    if not probe.huge_bytes or not thp_disabled(1):
        pytest.skip("no huge pages to forbid here")
    try:
        assert probe_huge_pages(8 * MIB) == HugePageProbe(0, 8 * MIB)
    finally:
        assert thp_disabled(0)


def test_small_pages_where_asked() -> None:
    before = probe_huge_pages(8 * MIB)
    if before is None or not before.huge_bytes:
        pytest.skip("no huge pages here")
    array = aligned_empty((8 * MIB,), np.uint8, huge_pages=False)
    array[:] = 1
    assert huge_bytes_around(array.ctypes.data, 8 * MIB, Path("/proc/self/smaps")) == 0
