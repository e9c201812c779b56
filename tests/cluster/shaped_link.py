"""Two network namespaces with addresses of their own and a link between them, as slow as wanted.

The link is this process: it reads packets from a TUN device in each namespace and writes them to
the other after the time that a wire of that speed and length would have taken. (Kernels without
netem cannot delay packets themselves.) For Linux and root alone.
"""

import contextlib
import fcntl
import heapq
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 9000
_NAME_BYTES = 16
_QUEUE_PACKETS = 4000


class ShapedLink:
    """A link of two ends; `delay_s` one way and `bits_per_s` each way may change while it is up.

    Errors:  OSError or CalledProcessError where this process may not make namespaces
    """

    def __init__(self, bits_per_s: float = 1e9, delay_s: float = 0.0) -> None:
        """The namespaces are named after this process, which has one link at a time."""
        self.bits_per_s, self.delay_s = bits_per_s, delay_s
        prefix = f"hotcold{os.getpid() % 1_000_000}"
        self.namespaces = [f"{prefix}-a", f"{prefix}-b"]
        subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.addresses = [f"{subnet}.1", f"{subnet}.2"]
        self._files: list[int] = []
        self._ended = threading.Event()
        try:
            for namespace, address in zip(self.namespaces, self.addresses, strict=True):
                self._open(namespace, address)
        except BaseException:
            self.close()
            raise
        self._threads = [
            threading.Thread(target=self._carry, args=(source, target), daemon=True)
            for source, target in (self._files, self._files[::-1])
        ]
        for thread in self._threads:
            thread.start()

    def command(self, end: int, command: Sequence[str]) -> list[str]:
        """`command` as it is run at one end of the link, 0 or 1."""
        return ["ip", "netns", "exec", self.namespaces[end], *command]

    def end_of(self, pid: int) -> int:
        """At which end of the link a process is, 0 or 1. Errors: ValueError if at neither."""
        return self.namespaces.index(_ip("netns", "identify", str(pid)).strip())

    def end_processes(self) -> None:
        """Kill every process at both ends, and wait until they are gone."""
        for namespace in self.namespaces:
            while pids := _ip("netns", "pids", namespace).split():
                for pid in map(int, pids):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
                time.sleep(0.05)

    def close(self) -> None:
        """Take the link and the namespaces away."""
        self._ended.set()
        for thread in getattr(self, "_threads", []):
            thread.join(5)
        for file in self._files:
            os.close(file)
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def __enter__(self) -> "ShapedLink":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, namespace: str, address: str) -> None:
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        file = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        self._files.append(file)
        name = namespace.encode()[: _NAME_BYTES - 1]
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name, _IFF_TUN | _IFF_NO_PI))
        device = name.decode()
        _ip("link", "set", device, "netns", namespace)
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
        _ip("-n", namespace, "link", "set", device, "up", "mtu", str(_MTU), "txqueuelen", "1000")

    def _carry(self, source: int, target: int) -> None:
        """Bring packets from one end to the other, in order, each at its time."""
        waiting: list[tuple[float, int, bytes]] = []
        free_at, number = 0.0, 0  # when the last bit of the packet before has left
        while not self._ended.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _write(target, heapq.heappop(waiting)[2])
            timeout_s = min(0.1, waiting[0][0] - now) if waiting else 0.1
            if len(waiting) < _QUEUE_PACKETS and _readable(source, timeout_s):
                packet = os.read(source, _MTU + 100)
                free_at = max(free_at, time.monotonic()) + 8 * len(packet) / self.bits_per_s
                heapq.heappush(waiting, (free_at + self.delay_s, number, packet))
                number += 1


def is_permitted() -> str:
    """ "" where links can be made, else why not, in a few words."""
    try:
        ShapedLink().close()
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"network namespaces are not permitted: {said.strip()}"
    return ""


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def _readable(file: int, timeout_s: float) -> bool:
    return bool(select.select([file], [], [], max(0.0, timeout_s))[0])


def _write(file: int, packet: bytes) -> None:
    try:
        os.write(file, packet)
    except OSError:
        return  # a full or closed device loses packets, as buffers do
