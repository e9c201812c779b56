"""What the raylet runs in place of a worker: it requests one from the fork server, and exits.

Run by its path, so that it imports little and starts at once.
"""

import json
import os
import socket
import sys
from contextlib import suppress

_WORKER = "ray._private.workers.default_worker"


def main() -> None:
    """Pass on arguments, environment and streams; where no server answers become a plain worker."""
    request = json.dumps((_WORKER, sys.argv[1:], dict(os.environ))).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ["HOTCOLD_FORK_SERVER"])
        socket.send_fds(server, [request], [0, 1, 2])
        if server.recv(16):
            return
    os.execv(sys.executable, [sys.executable, "-P", "-m", _WORKER, *sys.argv[1:]])


if __name__ == "__main__":
    main()
