"""Commands attach to this user's Ray cluster, and to nobody else's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hotcold.actors.processes import cluster
from hotcold.model.errors import ServiceError, UsageError

ANOTHER = os.geteuid() + 1


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `ray start` leaves the cluster's address."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def port() -> Iterator[int]:
    """Of a head that says something to whoever connects."""

    def answer() -> None:
        with suppress(OSError):  # it is shut down
            while True:
                listener.accept()[0].sendall(b"settings")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer)
        answering.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        answering.join()


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A head that is stopped: its kernel takes connections, and nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listener.getsockname()[1]}")
        yield listener


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that Ray was told to connect to."""
    found: list[str] = []

    def init(address: str, **_: Any) -> None:
        found.append(address)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delenv("RAY_AUTH_MODE")  # Ray sets it where there is a token
    monkeypatch.setattr(cluster, "keep_stdout_clean", lambda: None)
    return found


def test_ones_own_is_taken(
    named: Path, port: int, connected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of another host, which has no port here."""
    named.write_text(f"127.0.0.1:{port}\n")
    cluster.connect("auto")
    monkeypatch.setattr(cluster, "listeners", lambda asked: {ANOTHER})
    monkeypatch.setattr(cluster, "_require_head", lambda address: None)
    named.write_text("192.0.2.77:6379")
    cluster.connect("auto")
    assert connected == [f"127.0.0.1:{port}", "192.0.2.77:6379"]


def test_a_head_that_does_not_answer_is_not_waited_for(
    frozen: socket.socket, connected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_ANSWERED_S", 0.05)
    with pytest.raises(ServiceError, match=r"no Ray cluster answers at 127.*: timed out"):
        cluster.connect()
    assert connected == []
    monkeypatch.setenv("RAY_USE_TLS", "1")  # where a client has to begin
    cluster.connect()
    assert connected == [os.environ["RAY_ADDRESS"]]


def test_sigterm_ends_a_command_that_waits_for_a_head(frozen: socket.socket) -> None:
    """Within Ray it would take effect more than a minute later, after lines of Ray's own."""
    command = [sys.executable, "-m", "hotcold.jobs.stop", "--system", "x"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with process, frozen.accept()[0]:
        process.terminate()
        out, _ = process.communicate(timeout=40)
    assert (process.returncode, out) == (143, b"")


def test_where_there_is_none_no_other_is_looked_for(named: Path, connected: list[str]) -> None:
    with pytest.raises(ServiceError, match="no Ray cluster answers on this machine; start one"):
        cluster.connect("auto")
    assert connected == []


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "folder"])
def test_what_another_user_has_put_there_is_not(
    named: Path, port: int, connected: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    named.write_text(f"127.0.0.1:{port}")
    if kind == "file":
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    elif kind == "link":
        named.symlink_to(named.rename(named.with_name("elsewhere")))
    else:
        named.unlink()
        os.mkfifo(named) if kind == "pipe" else named.mkdir()
    with pytest.raises((UsageError, ServiceError), match="RAY_ADDRESS"):
        cluster.connect("auto")
    assert connected == []


def test_a_port_that_another_user_has_taken_since_is_not(
    named: Path, port: int, connected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named.write_text(f"127.0.0.1:{port}")
    monkeypatch.setattr(cluster, "listeners", lambda asked: {ANOTHER})
    with pytest.raises(UsageError, match="another user's"):
        cluster.connect("auto")
    assert connected == []


@pytest.mark.parametrize(("family", "host"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")])
def test_the_user_of_a_port(family: str, host: str) -> None:
    with socket.socket(getattr(socket, family)) as one:
        one.bind((host, 0))
        port = one.getsockname()[1]
        assert cluster.listeners(port) == set()
        one.listen()
        assert cluster.listeners(port) == {os.geteuid()}
