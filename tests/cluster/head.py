"""A real Ray head with dashboard and token, beside whatever else runs on the machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_START_S = 600
_STARTS = 3  # Ray gives its node 30 s, which a busy machine may take
_STARTED = "Ray runtime started"  # what `ray start` says; the dashboard answers before its node


@dataclass
class Head:
    """A running head: submits jobs to it as a user does, from the checkout's folder."""

    process: psutil.Process
    address: str
    environment: dict[str, str]
    folder: Path

    def submit(self, *entrypoint: str, **environment: str) -> subprocess.Popen[str]:
        """Start `ray job submit`, which ends with the job and shows its log."""
        command = ["job", "submit", "--working-dir", ".", "--log-style", "record", "--"]
        return subprocess.Popen(
            [*_RAY, *command, *entrypoint],
            cwd=ROOT,
            env=self.environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *entrypoint: str, **environment: str) -> tuple[int, str]:
        """Submit a job and wait: exit status, and all that was printed."""
        job = self.submit(*entrypoint, **environment)
        out, _ = job.communicate(timeout=600)
        return job.returncode, out

    def run_beside(self, *command: str) -> tuple[int, str]:
        """Run a job's command as a process of this host, which is told of the cluster."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment | {"RAY_ADDRESS": self.address},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
        return done.returncode, done.stdout

    @contextlib.contextmanager
    def beside(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """As `run_beside`, while it runs."""
        environment = self.environment | {"RAY_ADDRESS": self.address, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @contextlib.contextmanager
    def joined(self, num_cpus: int) -> Iterator[psutil.Process]:
        """Another node, on this host too, once it runs; its first process."""
        log = self.folder / f"node{secrets.token_hex(4)}.log"
        command = [*_RAY, "start", f"--address={self.address}", "--block", f"--num-cpus={num_cpus}"]
        command += [f"--object-store-memory={100 << 20}"]
        started = _start(command, self.environment, log)
        try:
            _is_up(started, log)
            yield psutil.Process(started.pid)
        finally:
            _stop(started)

    def actors(self) -> dict[int, str]:
        """Process ids and titles of the running system's actors on this head."""
        found = {}
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if title.startswith(("ray::DriverActor", "ray::ServiceActor")):
                    found[process.pid] = title.strip()
        return found


@contextlib.contextmanager
def running_head(num_cpus: int, *options: str) -> Iterator[Head]:
    """A head with a token of its own; at the end every process that it started is gone."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))  # short: it holds unix sockets
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    port, dashboard, client, agent = _free_ports(4)
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "PYTHONPATH")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_worker_niceness": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [*_RAY, "start", "--head", "--block", f"--num-cpus={num_cpus}", f"--port={port}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--temp-dir={folder}/ray", f"--object-store-memory={100 << 20}", *options]
    log = folder / "log"
    for _ in range(_STARTS):
        started = _start(command, environment, log)
        if _is_up(started, log) and _has_dashboard(started, environment, token.read_text()):
            break
        _stop(started)
    try:
        if started.poll() is not None:
            raise RuntimeError(f"the head did not start:\n{log.read_text()[-3000:]}")
        yield Head(psutil.Process(started.pid), f"127.0.0.1:{port}", environment, folder)
    finally:
        _stop(started)
        shutil.rmtree(folder, ignore_errors=True)


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def _stop(started: subprocess.Popen[bytes]) -> None:
    """End a head and all that it started, unless it has ended by itself."""
    if started.poll() is None:
        _end(psutil.Process(started.pid))
        started.wait(10)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _is_up(started: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until `ray start` says so, or has ended."""
    deadline = time.monotonic() + _START_S
    while started.poll() is None and time.monotonic() < deadline:
        if _STARTED in log.read_text():
            return True
        time.sleep(0.1)
    return False


def _has_dashboard(
    started: subprocess.Popen[bytes], environment: dict[str, str], token: str
) -> bool:
    """Wait until the head answers, or has ended."""
    url = environment["RAY_API_SERVER_ADDRESS"] + "/api/jobs/"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    deadline = time.monotonic() + _START_S
    while started.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10):
            return True
        time.sleep(0.3)
    return False


def _end(process: psutil.Process) -> None:
    """Kill a process and all that it started, those that left its group too."""
    family = [process, *process.children(recursive=True)] if process.is_running() else []
    for one in family:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(family, timeout=10)
