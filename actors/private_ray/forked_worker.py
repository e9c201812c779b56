"""What a raylet runs in place of a worker: it asks the fork server for one, and is done then.

It is run by its path, without site packages, so that it starts at once.
"""

import json
import os
import socket
import sys
from contextlib import suppress

_TIMEOUT_S = 30.0  # with a server that still imports, or can accept nobody


def main() -> None:
    """Hand on arguments, environment, folder and streams; else be a worker that is not forked."""
    request = json.dumps((sys.argv[1:], dict(os.environ), os.getcwd())).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(_TIMEOUT_S)
        server.connect(os.environ["HOTCOLD_FORK_SERVER"])
        socket.send_fds(server, [request], [0, 1, 2])
        try:
            answer = server.recv(16)
        except TimeoutError:
            server.shutdown(socket.SHUT_RDWR)  # no worker can answer from now on, and so begin
            answer = server.recv(16)
        if answer:
            return
    command = [sys.executable, "-P", "-m", "ray._private.workers.default_worker", *sys.argv[1:]]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
