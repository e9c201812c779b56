"""Whether each load of the page shows the live panel while other programs keep all cores busy.

    python -m tests.e2e.page_beside MODEL --loads 20

Each load is a new visitor, who asks something. It counts where the panel shows every actor, then
the figures of the answer's steps, each within `--patience-s`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.system import System
from hotcold.model.files.locate import locate_model
from tests.e2e.browser import chromium
from tests.e2e.page_server import served_page
from tests.e2e.page_visit import ask

_QUESTION = "Say what a list is in Python."
_ACTORS = "[...document.querySelectorAll('#live [data-actor]')].map(row => row.dataset.actor)"


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """So many programs that do nothing but compute."""
    programs = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def load(browser: Any, address: str, actors: list[str], patience_s: float) -> tuple[float, float]:
    """Seconds until a new visitor's panel has all actors, and its answer's figures."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(1000 * patience_s)
    began = time.monotonic()
    try:
        page.goto(address)
        page.wait_for_function(
            f"actors => JSON.stringify({_ACTORS}) == JSON.stringify(actors)", arg=actors
        )
        shown_s = time.monotonic() - began
        page.wait_for_selector("body[data-chat=ready][data-state=ready] #question textarea")
        ask(page, _QUESTION)
        page.wait_for_function(
            "document.querySelectorAll('#live [data-show=parts] tr').length > 0 &&"
            " Number(document.querySelector('#live [data-show=speed]').innerText) > 0"
        )
        return shown_s, time.monotonic() - began
    finally:
        context.close()


def main() -> None:
    from playwright.sync_api import TimeoutError as NotShown

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="programs beside it")
    parser.add_argument("--patience-s", type=float, default=30.0)
    arguments = parser.parse_args()
    config = SystemConfig(str(locate_model(arguments.model)), context_length=1024)
    with (
        System.start(config) as system,
        served_page(system, "model") as address,
        chromium() as browser,
    ):
        actors = [actor.name for actor in system.call("telemetry").actors]
        found = []
        with busy_cores(arguments.busy):
            for _ in range(arguments.loads):
                try:
                    found.append(load(browser, address, actors, arguments.patience_s))
                except NotShown as error:
                    print(error, file=sys.stderr)
    report: dict[str, Any] = {
        "loads": arguments.loads,
        "shown": len(found),
        "beside": arguments.busy,
    }
    for name, times in zip(("panel_s", "figures_s"), zip(*found, strict=True), strict=False):
        report[name] = {"median": statistics.median(times), "longest": max(times)}
    print(json.dumps(report))
    sys.exit(len(found) != arguments.loads)


if __name__ == "__main__":
    main()
