"""A program under limits of memory and of the disk, by cgroups (version 1, as root), and its peak.

python -m benchmarks.limited_run --memory 3GiB --disk 500MB --file MODEL.gguf -- PROGRAM ...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

import click
import numpy as np

from benchmarks.process_memory import PAGE_BYTES, page_frames
from hotcold.jobs.support.options import Bytes
from hotcold.model.mapped_file import forget_pages

_CGROUPS = Path("/sys/fs/cgroup")
PEAK = "memory.max_usage_in_bytes"
_MEMORY, _DISK = _CGROUPS / "memory", _CGROUPS / "blkio"
_READ_LIMIT = "blkio.throttle.read_bps_device"
_POLLS, _POLL_S = 50, 0.1
_WORD_BYTES = 8
_NEAR = 512  # frames that are looked up in one read


@dataclass(frozen=True)
class Limits:
    """Units: bytes, bytes a second that are read from the disk; 0: no limit."""

    memory_bytes: int = 0
    disk_bytes_per_s: int = 0


@dataclass(frozen=True)
class Peak:
    """The most that a cgroup had, and of what that was made when looks saw most. Units: bytes."""

    total: int = 0
    resident: int = 0
    page_cache: int = 0
    after_s: float = 0.0
    others: int = 0  # mapped pages of files that another cgroup had read before; the most seen


def run_limited(
    command: Sequence[str], limits: Limits, files: Sequence[Path], others_every_s: float = 0.0
) -> tuple[str, Peak]:
    """Standard output of a command in cgroups of its own, and the most memory that it had.

    `files` are not in the page cache when it begins; the disk is the one that has the first.
    Pages of others are looked for every `others_every_s`, never if that is 0.
    Errors:  click.ClickException where the command fails, or the disk cannot be limited
    """
    for file in files:
        forget_pages(file)
    with ExitStack() as stack:
        memory = stack.enter_context(memory_cgroup(limits.memory_bytes))
        disk = None
        if limits.disk_bytes_per_s:
            disk = stack.enter_context(disk_cgroup(files[0], limits.disk_bytes_per_s))
        out = stack.enter_context(TemporaryFile("w+"))
        err = stack.enter_context(TemporaryFile())
        joins = joining([memory, disk])
        running = subprocess.Popen(command, stdout=out, stderr=err, preexec_fn=joins)
        peak = _watched(running, memory, others_every_s)
        out.seek(0)
        err.seek(0)
        if running.returncode:
            text = err.read().decode(errors="replace")[-2000:]
            raise click.ClickException(f"{' '.join(command)}\n{text}")
        return out.read(), peak


def joining(folders: Sequence[Path | None]) -> Callable[[], None]:
    """What a program calls before it begins, to be in these cgroups."""

    def join() -> None:
        for folder in folders:
            if folder is not None:
                (folder / "cgroup.procs").write_text("0")

    return join


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path | None]:
    """A memory cgroup of its own for what joins it; None where none can be made."""
    with ExitStack() as stack:
        folder = None
        with suppress(OSError):
            folder = stack.enter_context(_cgroup(_MEMORY))
            if limit_bytes:
                (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield folder


@contextmanager
def disk_cgroup(file: Path, bytes_per_s: int) -> Iterator[Path]:
    """A cgroup whose processes read no more than that from the disk that has a file.

    Errors:  click.ClickException where the kernel offers none
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(_cgroup(_DISK))
            (folder / _READ_LIMIT).write_text(f"{disk_of(file)} {bytes_per_s}")
        except OSError as problem:
            raise click.ClickException(f"reads of {file} cannot be limited: {problem}") from None
        yield folder


def unlimit(folder: Path) -> None:
    """Let the processes of a cgroup read at the disk's own speed; what waited is read at once."""
    for line in (folder / _READ_LIMIT).read_text().splitlines():
        (folder / _READ_LIMIT).write_text(f"{line.split()[0]} 0")


def disk_of(file: Path, devices: Path = Path("/sys/dev/block")) -> str:
    """MAJOR:MINOR of the whole disk that has a file. Errors: OSError."""
    number = file.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    device = (devices / name).resolve(strict=True)
    if not (device / "partition").exists():
        return name
    return (device.parent / "dev").read_text().strip()


@contextmanager
def _cgroup(root: Path) -> Iterator[Path]:
    folder = root / f"hotcold-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for _ in range(_POLLS):
            with suppress(OSError):  # what was started in it may still be ending
                folder.rmdir()
                break
            time.sleep(_POLL_S)


def _watched(running: subprocess.Popen[bytes], folder: Path | None, others_every_s: float) -> Peak:
    """The most that a cgroup has until a program ends."""
    peak, started, others = Peak(), time.monotonic(), 0
    next_look = others_every_s
    while running.poll() is None:
        seconds = time.monotonic() - started
        if folder is not None:
            peak = _look(folder, peak, seconds)
            if others_every_s and seconds >= next_look:
                others = max(others, others_bytes(folder))
                next_look = seconds + others_every_s
        time.sleep(_POLL_S)
    if folder is None:
        return peak
    most = int((folder / PEAK).read_text())
    return replace(peak, total=most, others=others)


def _look(folder: Path, peak: Peak, seconds: float) -> Peak:
    """What the cgroup has now, where that is more."""
    total = int((folder / "memory.usage_in_bytes").read_text())
    if total <= peak.total:
        return peak
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = {name: int(value) for name, value in (line.split() for line in lines)}
    return Peak(total, stat["rss"], stat["cache"], seconds)


def others_bytes(folder: Path) -> int:
    """Bytes of mapped pages of files that are counted for other memory cgroups than this.

    A page of a library counts for whoever read it first.
    """
    own = folder.stat().st_ino
    pids = map(int, (folder / "cgroup.procs").read_text().split())
    owners = _owners(page_frames(pids, of_files=True))
    return int((owners != own).sum()) * PAGE_BYTES


def _owners(frames: np.ndarray) -> np.ndarray:
    """Inodes of the memory cgroups that frames, sorted and unique, are counted for."""
    if not frames.size:
        return np.empty(0, np.uint64)
    parts = np.split(frames, np.flatnonzero(np.diff(frames) > _NEAR) + 1)
    found = []
    with Path("/proc/kpagecgroup").open("rb", buffering=0) as table:
        for part in parts:
            first = int(part[0])
            table.seek(first * _WORD_BYTES)
            words = np.frombuffer(table.read((int(part[-1]) - first + 1) * _WORD_BYTES), np.uint64)
            found.append(words[(part - part[0]).astype(np.int64)])
    return np.concatenate(found)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True)
@click.option("--memory", type=Bytes(), default="0", help="Bytes; no limit without it.")
@click.option("--disk", type=Bytes(), default="0", help="Bytes a second; no limit without it.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Not to be in the page cache at first; the first one's disk is limited.",
)
def main(command: Sequence[str], memory: int, disk: int, files: Sequence[Path]) -> None:
    """Run COMMAND; say on standard error what memory it took."""
    if disk and not files:
        raise click.UsageError("--disk needs a --file of that disk")
    text, peak = run_limited(command, Limits(memory, disk), files)
    sys.stdout.write(text)
    click.echo(json.dumps(asdict(peak)), err=True)


if __name__ == "__main__":
    main()
