"""A Ray cluster of two nodes at the ends of a shaped link, each with an address of its own."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.shaped_link import ShapedLink

CHECKOUT = Path(__file__).resolve().parents[1]
_PORT = 6379
_STORE_BYTES = 100 << 20
_START_S = 120.0
_ALIVE = "import ray, sys; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"


@dataclass(frozen=True)
class TwoNodes:
    """A running cluster; node 0 is the head."""

    link: ShapedLink
    environment: dict[str, str]

    @property
    def addresses(self) -> list[str]:
        """Of both nodes."""
        return self.link.addresses

    def start(self, *arguments: str, **pipes: int) -> "subprocess.Popen[str]":
        """Start `python ARGUMENTS` on the head's end of the link, as a process of the cluster."""
        command = self.link.command(0, [sys.executable, *arguments])
        return subprocess.Popen(command, cwd=CHECKOUT, env=self.environment, text=True, **pipes)

    def run(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """`start`, to the end."""
        command = self.link.command(0, [sys.executable, *arguments])
        return subprocess.run(
            command, cwd=CHECKOUT, env=self.environment, text=True, capture_output=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip


@contextlib.contextmanager
def two_nodes(num_cpus: int, prefix: str = "hotcold") -> Iterator[TwoNodes]:
    """Start the cluster, with `num_cpus` Ray CPUs a node; at the end no process of it is left.

    Errors:  OSError or CalledProcessError without the rights; RuntimeError if Ray does not start
    """
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))  # short: it holds unix sockets
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    with ShapedLink(prefix) as link:
        head, other = link.addresses
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment = kept | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), kept.get("PYTHONPATH")])),
            "RAY_ADDRESS": f"{head}:{_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        common = [f"--num-cpus={num_cpus}", f"--object-store-memory={_STORE_BYTES}", "--block"]
        here = ["--head", f"--port={_PORT}", f"--node-ip-address={head}", f"--temp-dir={folder}/r"]
        here.append("--include-dashboard=false")
        there = [f"--address={head}:{_PORT}", f"--node-ip-address={other}"]
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            cluster = TwoNodes(link, environment)
            for end, options in enumerate((here, there)):
                nodes.append(_start(link, end, [*options, *common], environment, folder))
                _await_nodes(cluster, nodes, folder)
            yield cluster
        finally:
            for node in nodes:
                _end(node)
            shutil.rmtree(folder, ignore_errors=True)


def _start(
    link: ShapedLink, end: int, options: list[str], environment: dict[str, str], folder: Path
) -> "subprocess.Popen[bytes]":
    command = link.command(end, [sys.executable, "-m", "ray.scripts.scripts", "start", *options])
    own = {k: v for k, v in environment.items() if k != "RAY_ADDRESS"}
    with (folder / f"log{end}").open("wb") as log:
        return subprocess.Popen(command, env=own, stdout=log, stderr=log)


def _await_nodes(
    cluster: TwoNodes, nodes: "list[subprocess.Popen[bytes]]", folder: Path
) -> None:
    """Wait until the cluster has as many nodes as were started."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and all(node.poll() is None for node in nodes):
        found = cluster.run("-c", _ALIVE)
        if found.stdout.strip() == str(len(nodes)):
            return
        time.sleep(0.3)
    logs = "\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("log*")))
    raise RuntimeError(f"a Ray node did not start:\n{logs}")


def _end(node: "subprocess.Popen[bytes]") -> None:
    """End a node and all that it started, what left its group too."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(node.pid)
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for one in alive:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(alive, timeout=5)
    node.wait(10)
