"""What the raylet runs in place of a worker: it requests one from the fork server, and exits.

Run by its path, without site packages, so that it starts at once.
"""

import json
import os
import socket
import sys
from contextlib import suppress

_WORKER = "ray._private.workers.default_worker"
_TIMEOUT_S = 30.0  # for a server that still imports


def main() -> None:
    """Pass on arguments, environment, folder and streams; on failure become a plain worker."""
    request = json.dumps((_WORKER, sys.argv[1:], dict(os.environ), os.getcwd())).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(_TIMEOUT_S)
        server.connect(os.environ["HOTCOLD_FORK_SERVER"])
        socket.send_fds(server, [request], [0, 1, 2])
        try:
            reply = server.recv(16)
        except TimeoutError:
            server.shutdown(socket.SHUT_RDWR)  # from now on no worker can reply, and so begin
            reply = server.recv(16)
        if reply:
            return
    os.execv(sys.executable, [sys.executable, "-P", "-m", _WORKER, *sys.argv[1:]])


if __name__ == "__main__":
    main()
