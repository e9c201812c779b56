"""The fleets of these tests, and how one asks them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
from ray import serve

from hotcold.ui.fleet.application import application
from hotcold.ui.fleet.arguments import FleetArgs

KEYS = ("first-key-of-the-fleet", "other-key-of-the-fleet")
OPTIONS = {"threads": 1, "context": 512, "parallel": 2}
TWO_REPLICAS = FleetArgs(replicas=2, options={**OPTIONS, "kv-tokens": 4096}, queue=8, drain=0.5)
# A model's cache is so large that two replicas of the others fit where two models do not.
ON_DEMAND = FleetArgs(replicas=0, options={**OPTIONS, "kv-tokens": 1 << 17})
_COMES_S = 600.0


def two_replicas() -> serve.Application:
    """A fleet of the demo model, for clients with a key."""
    return application(TWO_REPLICAS, KEYS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
        return number


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def until(condition: Callable[[], bool]) -> None:
    """Return once it holds."""
    deadline = time.monotonic() + _COMES_S
    while time.monotonic() < deadline:
        with suppress(Exception):  # a replica that is just ending
            if condition():
                return
        time.sleep(0.2)
    raise AssertionError("it does not come to that")


def asked(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, **fields}


class Stream(threading.Thread):
    """A streamed completion; `has_begun` is set once some of it has come."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.text, self.logprobs, self.finish = "", list[Any](), None
        self.has_begun = threading.Event()
        self._client, self._body = client, {**body, "stream": True}
        self.start()

    def run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                self.text += choice["text"]
                self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                self.finish = choice["finish_reason"]
                if len(self.text) > 40:
                    self.has_begun.set()

    def end(self) -> tuple[str, list[Any], Any]:
        self.join(120)
        assert not self.is_alive()
        return self.text, self.logprobs, self.finish
