"""What a raylet runs in place of a worker: what it asks for, and what it does unanswered; and the
server that answers, on a machine that has no more of something.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotcold.actors.private_ray import fork_server, forked_worker
from hotcold.model.current_folder import environment_of_python


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that workers are asked for at; its name would be too long with its folder's."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("workers")
        listener.listen()
        listener.settimeout(60)
        yield listener


def run_worker(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, forked_worker.__file__, *arguments]
    environment = {**os.environ, fork_server.ADDRESS: "workers", "PYTHONPATH": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", ["none", "ends"])
def test_unanswered_it_becomes_a_worker(tmp_path: Path, server: socket.socket, how: str) -> None:
    worker = tmp_path / "ray" / "_private" / "workers" / "default_worker.py"  # takes Ray's place
    worker.parent.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    worker.write_text("import sys; print(sys.argv[1:])")
    if how == "none":
        server.close()
    with run_worker(tmp_path, "--one", "two three") as process:
        if how == "ends":
            server.accept()[0].close()
        said = process.communicate(timeout=600)[0]
    assert process.returncode == 0
    assert said == "['--one', 'two three']\n"


# Forks run what they are asked for, which says where it runs.
ON_A_FULL_MACHINE = """
import errno, os, socket, sys
from hotcold.actors.private_ray import fork_server

accepts, forks = [errno.ECONNABORTED, errno.EMFILE], [errno.ENOMEM, errno.EAGAIN]

class Listener(socket.socket):
    def accept(self):
        if accepts:
            raise OSError(accepts.pop(), "full")
        return super().accept()

def fork(usual=os.fork):
    if forks:
        raise OSError(forks.pop(), "full")
    return usual()

def be_worker(asked, server):
    asked.send(b"forked")
    os._exit(0)

os.fork, fork_server._be_program = fork, be_worker
fork_server.socket.socket = Listener
fork_server._serve(socket.socket(fileno=int(sys.argv[1])))
"""


def test_a_server_outlives_what_the_machine_has_no_more_of(server: socket.socket) -> None:
    def answer() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(60)
            client.connect("workers")
            return client.recv(16)

    command = [sys.executable, "-c", ON_A_FULL_MACHINE, str(server.fileno())]
    environment = os.environ | environment_of_python()
    with subprocess.Popen(command, env=environment, pass_fds=[server.fileno()]) as process:
        # Whom it cannot fork a worker for becomes one, as whoever is not answered.
        assert [answer() for _ in range(4)] == [b"", b"", b"forked", b"forked"]
        process.kill()
