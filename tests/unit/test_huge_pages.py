"""What doctor says of huge pages: on made-up systems, and on this one."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.jobs.support import doctor_checks
from hotcold.jobs.support.doctor_checks import Finding, check_machine
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.weights.memory import HUGE_PAGE_BYTES, aligned_empty
from hotcold.placement.machine import memory_pages
from hotcold.placement.machine.memory_pages import (
    HugePageProbe,
    huge_bytes_around,
    probe_huge_pages,
)
from hotcold.placement.machine.survey import survey
from hotcold.placement.machine.sysfs import read_huge_page_setting

MIB = 1 << 20
_PR_SET_THP_DISABLE = 41
SMAPS = """\
00400000-00500000 r-xp 00000000 00:01 7 /usr/bin/python
Rss:                1024 kB
AnonHugePages:      4096 kB
7f0000000000-7f0004000000 rw-p 00000000 00:00 0
Rss:               65536 kB
AnonHugePages:     20480 kB
FilePmdMapped:         0 kB
VmFlags: rd wr mr mw me ac hg
7f0004000000-7f0006000000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
7f0006000000-7f0008000000 rw-p 00000000 00:00 0
AnonHugePages:    999424 kB
"""


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


def test_mappings_are_found_by_address(tmp_path: Path) -> None:
    smaps = write(tmp_path / "smaps", SMAPS)
    assert huge_bytes_around(0x7F0000200000, 8 * MIB, smaps) == 20 * MIB
    assert huge_bytes_around(0x7F0000200000, 64 * MIB, smaps) == 22 * MIB
    assert huge_bytes_around(0x7F0004000000, MIB, smaps) == 2 * MIB
    assert huge_bytes_around(0x7F0008000000, MIB, smaps) is None
    assert huge_bytes_around(0x7F0000000000, MIB, tmp_path / "none") is None


def test_settings(tmp_path: Path) -> None:
    settings(tmp_path, "always [madvise] never\n", "always defer [defer+madvise] madvise never\n")
    machine = survey(tmp_path)
    assert (machine.huge_pages, machine.huge_page_defrag) == ("madvise", "defer+madvise")
    assert read_huge_page_setting(tmp_path / "none", "defrag") == "unknown"


@pytest.mark.parametrize(
    ("enabled", "got_mib", "level", "texts"),
    [
        ("[always] madvise never\n", 64, "ok", ["always", "64 of 64 MiB in huge pages"]),
        ("always [madvise] never\n", 64, "ok", ["madvise", "64 of 64 MiB in huge pages"]),
        ("always [madvise] never\n", 10, "note", ["10 of 64 MiB", "refuses the rest", "as root"]),
        ("always [madvise] never\n", 0, "note", ["0 of 64 MiB", "refuses them", "as root"]),
        ("always madvise [never]\n", 0, "note", ["weights get none", "echo madvise >"]),
        ("", 0, "note", ["0 of 64 MiB", "this kernel has none"]),
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


def test_nothing_to_probe_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_huge_pages(4 * MIB, tmp_path / "none") is None

    def refuse(shape: tuple[int, ...], dtype: object) -> None:
        raise MemoryBudgetError("no")

    monkeypatch.setattr(memory_pages, "aligned_empty", refuse)
    assert probe_huge_pages(4 * MIB) is None


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


def test_doctor_on_this_system() -> None:
    machine = survey()
    found = next(item for item in check_machine(machine) if item.subject == "huge pages")
    assert machine.huge_pages in found.text
    if machine.huge_pages == "never":
        assert found.level == "note"
    silent = replace(machine, huge_pages="never")
    assert next(f for f in check_machine(silent) if f.subject == "huge pages").level == "note"
