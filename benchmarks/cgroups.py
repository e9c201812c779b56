"""Limits of memory and of the disk by cgroups (version 1, as root), and a program's peak."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click

from benchmarks.frame import run
from hotcold.model.mapped_file import forget_pages

_ROOT = Path("/sys/fs/cgroup")
_READ_LIMIT = "blkio.throttle.read_bps_device"


def run_limited(
    command: Sequence[str], memory_bytes: int, disk_bytes_per_s: int, files: Sequence[Path]
) -> tuple[str, int]:
    """What a command prints, in cgroups of its own, and the most memory that it had.

    0 is no limit, and a peak that is not known. `files` are not in the page cache when it begins;
    the disk is the first one's. Errors: ClickException where it fails or cannot be limited
    """
    for file in files:
        forget_pages(file)
    with ExitStack() as stack:
        groups = [stack.enter_context(memory_cgroup(memory_bytes))]
        if disk_bytes_per_s:
            groups.append(stack.enter_context(disk_cgroup(files[0], disk_bytes_per_s)))
        memory, found = groups[0], list(filter(None, groups))

        def join() -> None:
            for folder in found:
                (folder / "cgroup.procs").write_text("0")

        said, _ = run(command, preexec_fn=join)
        peak = int((memory / "memory.max_usage_in_bytes").read_text()) if memory else 0
    return said, peak


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path | None]:
    """A memory cgroup for what joins it; None where none can be made."""
    with ExitStack() as stack:
        folder = None
        with suppress(OSError):
            folder = stack.enter_context(_cgroup(_ROOT / "memory"))
            if limit_bytes:
                (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield folder


@contextmanager
def disk_cgroup(file: Path, bytes_per_s: int) -> Iterator[Path]:
    """A cgroup that reads no more than that from the disk that has a file.

    Errors:  ClickException where the kernel offers none
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(_cgroup(_ROOT / "blkio"))
            number = file.stat().st_dev
            disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(True)
            whole = disk.parent if (disk / "partition").exists() else disk
            (folder / _READ_LIMIT).write_text(
                f"{(whole / 'dev').read_text().strip()} {bytes_per_s}"
            )
        except OSError as problem:
            raise click.ClickException(f"reads of {file} cannot be limited: {problem}") from None
        yield folder


def unlimit(folder: Path) -> None:
    """Let a cgroup read at the disk's own speed; what waited is read at once."""
    for line in (folder / _READ_LIMIT).read_text().splitlines():
        (folder / _READ_LIMIT).write_text(f"{line.split()[0]} 0")


@contextmanager
def _cgroup(root: Path) -> Iterator[Path]:
    folder = root / f"hotcold-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for _ in range(50):
            with suppress(OSError):  # what was started in it may still be ending
                folder.rmdir()
                break
            time.sleep(0.1)
