"""Runs the command line as its users do: in a process of its own, with a Ray folder of its own.

Or, where it is to refuse something, in this process, where it can start nothing.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hotcold.jobs.cli import main
from tests.nothing_starts import nothing_starts

CHECKOUT = Path(__file__).resolve().parents[2]
_NO_PROCESS_LEFT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str
    started_ray: bool = False
    left: list[str] = field(default_factory=list)  # processes that outlived the command

    @property
    def error_lines(self) -> list[str]:
        return self.err.splitlines()

    @property
    def report(self) -> dict[str, Any]:
        """The JSON of a command that did well."""
        assert self.status == 0, self.err
        return dict(json.loads(self.out.splitlines()[-1]))

    @property
    def refusal(self) -> str:
        """The one line of a command that was refused."""
        assert self.status in (1, 2) and self.out == "", (self.status, self.out)
        (line,) = self.error_lines
        return line


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A folder for RAY_TMPDIR; its name is short, as the paths of Ray's sockets must be."""
    folder = Path(tempfile.mkdtemp(prefix="hc-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path, changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command whose Ray lives in `folder`."""
    python_path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": python_path,
        "PYTHONUNBUFFERED": "",
        "RAY_TMPDIR": str(folder),
        "RAY_worker_niceness": "0",  # of a program's own Ray, whose workers else wait for all else
        **(changes or {}),
    }


def command_line(arguments: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "hotcold.jobs.cli", *map(str, arguments)]


def run(
    *arguments: str | Path,
    stdin: str | bytes | None = "",
    changes: Mapping[str, str] | None = None,
    timeout_s: float = 150.0,
) -> Outcome:
    """Run a command to its end. `stdin` None: there is no standard input at all."""
    line = command_line(arguments)
    if stdin is None:
        line = ["sh", "-c", 'exec "$@" <&-', "sh", *line]
    given = stdin.encode() if isinstance(stdin, str) else stdin
    with ray_folder() as folder:
        made_at = folder.stat().st_mtime_ns
        done = subprocess.run(
            line, input=given, capture_output=True, env=environment(folder, changes),
            timeout=timeout_s, check=False,
        )  # fmt: skip
        return Outcome(
            status=done.returncode,
            out=done.stdout.decode(),
            err=done.stderr.decode(),
            started_ray=folder.stat().st_mtime_ns != made_at,
            left=processes_left(folder),
        )


def run_here(*arguments: object, stdin: str | bytes = "", stdin_errors: str = "strict") -> Outcome:
    """Run a command in this process; `stdin_errors` is Python's treatment of what is no UTF-8.

    Errors:  AssertionError where it starts Ray or a process
    """
    given = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
    out, err = io.StringIO(), io.StringIO()
    with (
        nothing_starts(),
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.setattr("sys.stdin", io.TextIOWrapper(given, "utf-8", stdin_errors))
        status = main([*map(str, arguments)])
    return Outcome(status, out.getvalue(), err.getvalue())


def run_main(*arguments: object) -> Outcome:
    """Run a command in this process, which may start what it needs there."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([*map(str, arguments)])
    return Outcome(status, out.getvalue(), err.getvalue())


def processes_left(folder: Path, timeout_s: float = _NO_PROCESS_LEFT_S) -> list[str]:
    """Names of the processes that still have `folder` as their Ray folder."""
    end = time.monotonic() + timeout_s
    while (names := _names(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    return names


def _names(folder: Path) -> list[str]:
    """Read from /proc itself: tests ask again and again, and psutil takes ten times as long."""
    wanted = f"RAY_TMPDIR={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                pid_and_name, _, rest = (process / "stat").read_text().rpartition(")")
                if rest.split()[0] not in ("Z", "X"):
                    found.append(pid_and_name.partition("(")[2])
        except OSError:  # it has ended, or is another user's
            continue
    return found
