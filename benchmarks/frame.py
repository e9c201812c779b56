"""What the benchmarks share: commands to run, medians and spreads, the machine, reports."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import click

from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError
from hotcold.placement.machine.sysfs import read_cpu

Json = dict[str, Any]
HERE = Path(__file__).resolve().parents[1]
EXISTING = click.Path(exists=True, path_type=Path)


@dataclass(frozen=True)
class Checkout:
    """Runs the commands of a checkout; without one those of the hotcold that is installed."""

    folder: Path | None = HERE
    changes: Mapping[str, str] = field(default_factory=dict)  # of the environment

    @property
    def _where(self) -> Json:
        """Options of Popen."""
        folders = [str(self.folder)] if self.folder else []
        paths = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
        changes = {"PYTHONPATH": os.pathsep.join(paths), **self.changes}
        return {"cwd": self.folder, "env": {**os.environ, **changes}}

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of hotcold; what it says to standard error is lost."""
        command = [sys.executable, "-m", "hotcold", *arguments]
        given: Json = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(command, **given, **self._where)

    def run(self, *arguments: str, module: str = "hotcold") -> str:
        """What it printed. Errors: ClickException with its last line where it failed."""
        return run([sys.executable, "-m", module, *arguments], **self._where)[0]

    def json(self, *arguments: str) -> Json:
        """The object that a command of hotcold printed last, of `--json`."""
        found: Json = json.loads(self.run(*arguments, "--json").splitlines()[-1])
        return found


hotcold = Checkout().json


def run(command: Sequence[str], **options: Any) -> tuple[str, int]:
    """What a program prints, and the most bytes that it had resident; `options` are Popen's.

    Errors:  ClickException with its last line where it failed
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        new: Json = {"start_new_session": True}  # to be ended with all that it starts
        process = subprocess.Popen(command, stdout=out, stderr=errors, **new, **options)
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:  # a time limit, or Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            last = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            raise click.ClickException(f"{' '.join(command)}: {last}")
        return out.read(), used.ru_maxrss * 1024


def objects(text: str) -> list[Json]:
    """The JSON objects that are a line of `text`; all else is a log's."""
    found = list[Json]()
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found += [json.loads(line)] if line.startswith("{") else []
    return found


def kilobytes(process_id: int, file: str, key: str) -> int:
    """A number of /proc/PID/FILE; 0 where the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/{file}").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
    return 0


def peak_bytes(process_ids: Iterable[int]) -> int:
    """The most that processes had resident together, what they share now counted once."""
    found = 0
    for pid in process_ids:
        shared = kilobytes(pid, "smaps_rollup", "Rss") - kilobytes(pid, "smaps_rollup", "Pss")
        found += kilobytes(pid, "status", "VmHWM") - shared
    return 1024 * found


@contextlib.contextmanager
def serving(checkout: Checkout, *arguments: str, port: int = 0) -> Iterator[subprocess.Popen[str]]:
    """`hotcold serve`, on a free port without one. Errors: ClickException where it ends."""
    with checkout.popen("serve", *arguments, "--port", str(port), "--log", "none") as server:
        try:
            for line in server.stdout or ():
                if line.startswith("hotcold serves "):
                    yield server
                    return
            raise click.ClickException("`hotcold serve` has ended")
        finally:
            server.terminate()


def spread(values: Sequence[float]) -> str:
    """The median, the least and the most."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def head(model: Path, threads: int) -> Json:
    """What every report says first: machine, date, shape."""
    config, forced = read_config(model), os.environ.get("NUMBA_CPU_NAME")
    name = f"{read_cpu().name} as {forced}" if forced else read_cpu().name
    machine = f"{name}, {threads} threads, Linux {platform.machine()}"
    return {"machine": machine, "date": date.today().isoformat(), "shape": shape_text(config)}


def shape_text(config: ModelConfig) -> str:
    """A model's sizes in a line."""
    ffn, experts = f"FFN {config.ffn_size}", config.experts
    if experts is not None:
        router = experts.router
        ffn = f"{router.num_chosen} of {router.num_experts} experts of {experts.size}"
    sizes = f"{config.num_layers} layers of d {config.hidden_size}, {ffn}"
    return f"{sizes}, vocabulary {config.vocab_size}, {config.dtype}"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None is an empty cell."""
    lines = [columns, ["---"] * len(columns), *rows]
    texts = [["" if cell is None else str(cell) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in texts)


def heading(report: Json, *more: str) -> str:
    """The line above a report's table."""
    return "; ".join([report["shape"], report["machine"], report["date"], *more]) + "\n\n"


def program(main: Callable[..., tuple[Json, str]]) -> click.Command:
    """A command of a function that returns its report and the report as Markdown.

    It has --json and --out beside its own options. A report's `wrong`, unless empty, fails it.
    """

    @functools.wraps(main)
    def run(as_json: bool, out: Path | None, **given: Any) -> None:
        try:
            report, text = main(**given)
        except HotcoldError as error:
            raise click.ClickException(str(error)) from None
        if out is not None:
            out.write_text(text)
        click.echo(json.dumps(report, default=str) if as_json else text, nl=as_json)
        if report.get("wrong"):
            raise click.ClickException(f"{len(report['wrong'])} things were wrong; see the report")

    out = click.option("--out", type=click.Path(path_type=Path), help="Also a file of Markdown.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, not Markdown.")
    settings = {"show_default": True, "max_content_width": 100}
    return click.command(context_settings=settings)(as_json(out(run)))


def progress(text: str) -> None:
    """Say on standard error how far a program is."""
    click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)
