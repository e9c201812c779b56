"""What a raylet runs in place of a worker: what it asks for, and what it does unanswered."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.private_ray import fork_server, forked_worker


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that workers are asked for at; its name would be too long with its folder's."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("workers")
        listener.listen()
        listener.settimeout(60)
        yield listener


def asking(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", forked_worker.__file__, *arguments]
    environment = {**os.environ, fork_server.ADDRESS: "workers", "PYTHONPATH": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def test_it_hands_on_all_that_a_worker_needs(tmp_path: Path, server: socket.socket) -> None:
    with asking(tmp_path, "--one", "two three") as process:
        asked, _ = server.accept()
        request, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
        arguments, environment, folder = json.loads(request)
        os.write(streams[1], b"said by the worker")
        for stream in streams:
            os.close(stream)
        asked.send(b"forked")
        assert process.communicate(timeout=60)[0] == "said by the worker"
    assert process.returncode == 0
    assert arguments == ["--one", "two three"]
    assert environment[fork_server.ADDRESS] == "workers"
    assert Path(folder) == tmp_path


@pytest.mark.parametrize("how", ["none", "ends"])
def test_unanswered_it_becomes_a_worker(tmp_path: Path, server: socket.socket, how: str) -> None:
    worker = tmp_path / "ray" / "_private" / "workers" / "default_worker.py"  # takes Ray's place
    worker.parent.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    worker.write_text("import sys; print(sys.argv[1:])")
    if how == "none":
        server.close()
    with asking(tmp_path, "--one", "two three") as process:
        if how == "ends":
            server.accept()[0].close()
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert said == "['--one', 'two three']\n"
