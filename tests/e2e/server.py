"""Runs `hotcold serve` as its users do, in a process of its own on a port of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.commands import command_line, environment, processes_left, ray_folder

WAIT_S = 600.0
# What OpenAI's client asks for; it takes long.
LONG: dict[str, Any] = {
    "prompt": "Return the",
    "max_tokens": 400,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


@dataclass
class Server:
    """A server that runs; `url` is where."""

    process: subprocess.Popen[str]
    folder: Path
    url: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=600)

    def post(self, path: str, content: dict) -> httpx.Response:
        return httpx.post(self.url + path, json=content, headers=self.headers, timeout=600)

    def metric(self, name: str) -> float:
        """The sum of a metric's values."""
        found = re.findall(rf"^{name}\{{[^\n]*\}} (\S+)$", self.get("/metrics").text, re.M)
        return sum(map(float, found))

    def press_ctrl_c(self) -> None:
        """A terminal tells all processes of the command."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Wait for the end: the status, and what is on standard error; nothing is left running."""
        _, err = self.process.communicate(timeout=WAIT_S)
        assert processes_left(self.folder) == []
        return self.process.returncode, err


@contextmanager
def serving(
    *arguments: str, changes: Mapping[str, str] | None = None, has_page: bool = False
) -> Iterator[Server]:
    """A server of the demo model, ready; stopped at the end unless it has stopped before."""
    options = [] if has_page else ["--no-page"]
    line = command_line(["serve", "--port", "0", "--log", "none", *options, *arguments])
    with ray_folder() as folder:
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(folder, changes), start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None and process.stderr is not None
            first = process.stdout.readline()
            found = re.search(r" at (http://\S+) ", first)
            assert found, process.stderr.read()
            told = process.stderr.readline()
            assert told.startswith("loading ") and told.endswith(
                f"; {found[1]} says how far it is\n"
            )
            yield Server(process, folder, found[1])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                _, err = process.communicate(timeout=WAIT_S)
                assert process.returncode == 0 and err == "", f"{process.returncode}: {err}"
            assert processes_left(folder) == []


def await_that(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; fail where it does not in time."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
