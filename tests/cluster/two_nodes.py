"""A Ray cluster of two nodes at the ends of a shaped link, each with an address of its own."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts_client import Client
from tests.cluster.shaped_link import ShapedLink

CHECKOUT = Path(__file__).resolve().parents[2]
_PORT = 6379
_STORE_BYTES = 100 << 20


@dataclass(frozen=True)
class TwoNodes:
    """A running cluster; node 0 is the head."""

    link: ShapedLink
    environment: dict[str, str]

    @property
    def addresses(self) -> list[str]:
        """Of both nodes."""
        return self.link.addresses

    def client(self) -> Client:
        """A new `hosts_client` on the head's end of the link."""
        command = self.link.command(0, [sys.executable, "-m", "tests.cluster.hosts_client"])
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=self.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return Client(process)


@contextlib.contextmanager
def two_nodes(num_cpus: int, own_folders: Mapping[Path, Path] | None = None) -> Iterator[TwoNodes]:
    """Start both nodes, with `num_cpus` Ray CPUs each; at the end no process of them is left.

    At the path of each key in `own_folders` the second node finds the folder that is its value.
    It does not wait: `hosts_client` does.
    Errors:  OSError or CalledProcessError without the rights
    """
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))  # short: it holds unix sockets
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    with ShapedLink() as link:
        head, other = link.addresses
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment = kept | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), kept.get("PYTHONPATH")])),
            "RAY_ADDRESS": f"{head}:{_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_worker_niceness": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        common = [f"--num-cpus={num_cpus}", f"--object-store-memory={_STORE_BYTES}", "--block"]
        here = ["--head", f"--port={_PORT}", f"--node-ip-address={head}", f"--temp-dir={folder}/r"]
        here.append("--include-dashboard=false")
        there = [f"--address={head}:{_PORT}", f"--node-ip-address={other}"]
        try:
            _start(link, 0, [*here, *common], environment, folder, {})
            _start(link, 1, [*there, *common], environment, folder, own_folders or {})
            yield TwoNodes(link, environment)
        except BaseException:  # pytest shows what is printed
            print(*(log.read_text() for log in sorted(folder.glob("log*"))), sep="\n")
            raise
        finally:
            link.end_processes()
            shutil.rmtree(folder, ignore_errors=True)


def _start(
    link: ShapedLink,
    end: int,
    options: list[str],
    environment: dict[str, str],
    folder: Path,
    own_folders: Mapping[Path, Path],
) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    for path, folder_there in own_folders.items():  # `ip netns exec` gives it mounts of its own
        mounts = ["sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
        command = [*mounts, str(folder_there), str(path), *command]
    command = link.command(end, command)
    own = {k: v for k, v in environment.items() if k != "RAY_ADDRESS"}
    with (folder / f"log{end}").open("wb") as log:
        subprocess.Popen(command, env=own, stdout=log, stderr=log)
