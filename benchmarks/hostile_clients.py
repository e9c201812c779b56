"""Clients of a server that harm: they do not ask, do not read, or ask for too much."""

import json
import random
import select
import socket
import threading

from benchmarks.load_clients import CONTEXT, Tally, post
from benchmarks.runs import Json

_POLL_S = 0.2
_HELD = 24  # silent connections at once
_BEGUN = (
    b"",
    b"POST /v1/compl",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
)
# With what stands beside each token it is some megabytes: more than sockets hold.
_LONG: Json = {
    "prompt": [5], "max_tokens": CONTEXT - 2, "n": 4, "logprobs": 20, "ignore_eos": True,
    "stream": True,
}  # fmt: skip
_BOMBS = (
    b'{"prompt": [%s], "n": 128}' % b",".join([b"[1]"] * 250_000),
    b'{"prompt": [%s]}' % b",".join([b"-1"] * 300_000),
    b'{"prompt": "a", "stop": [%s]}' % b",".join([b"1"] * 500_000),
    b'{"prompt": "a", "logit_bias": {%s}}' % b",".join([b'"a": "b"'] * 15_000),
    b"x" * (5 << 20),
)


def connect(port: int, receive_bytes: int = 0) -> socket.socket:
    """A connection, with a small buffer for what it receives where one is given."""
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect(("127.0.0.1", port))
    return made


class SilentClient:
    """Holds connections on which it asks nothing, or half a question, for as long as it may."""

    def __init__(self, port: int, tally: Tally) -> None:
        self._port, self._tally = port, tally

    def run_until(self, ended: threading.Event) -> None:
        """Open another one for each that the server cuts off, until `ended` is set."""
        held: list[socket.socket] = []
        while not ended.is_set():
            while len(held) < _HELD:
                held.append(connect(self._port))
                held[-1].sendall(_BEGUN[len(held) % len(_BEGUN)])
            for one in select.select(held, [], [], _POLL_S)[0]:
                held.remove(one)
                one.close()
                self._tally.add("silent, cut off")
        for one in held:
            one.close()


class StalledReader:
    """Asks for a long stream and reads nothing of it."""

    def __init__(self, port: int, tally: Tally) -> None:
        self._port, self._tally = port, tally

    def run_until(self, ended: threading.Event) -> None:
        """Ask again whenever the server has cut the connection off, until `ended` is set."""
        body = json.dumps(_LONG).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        while not ended.is_set():
            with connect(self._port, receive_bytes=4096) as client:
                client.sendall(f"{head}\r\n\r\n".encode() + body)
                lost = select.poll()
                lost.register(client, select.POLLERR | select.POLLHUP)
                while not ended.is_set():
                    if lost.poll(_POLL_S * 1000):
                        self._tally.add("stalled, cut off")
                        break


class Flood:
    """Asks for far too much, again and again."""

    def __init__(self, port: int, tally: Tally) -> None:
        self._port, self._tally, self._random = port, tally, random.Random(1)

    def run_until(self, ended: threading.Event) -> None:
        """Ask until `ended` is set; each must be refused."""
        while not ended.is_set():
            body = self._random.choice(_BOMBS)
            try:
                connection, response = post(self._port, body)
                text = response.read()
                connection.close()
            except ConnectionError:  # refused before all of it was sent
                self._tally.add("too much, cut off")
                continue
            if response.status in (400, 413) and len(text) < 3000:
                self._tally.add("too much, refused")
            else:
                self._tally.add_wrong(f"{body[:60]!r} was answered {response.status}: {text!r}")
