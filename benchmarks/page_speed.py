"""The chat page in a browser: bytes, time until it can be used, frames while an answer streams.

    python -m benchmarks.page_speed
    python -m benchmarks.page_speed --address http://127.0.0.1:8124/ --usable "#question textarea"

Without an address the page is served here over a stand-in that answers `--rate` tokens a second, so
no model takes the cores. The browser draws without a GPU; a machine with a screen has it easier.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from tests.e2e.browser import chromium
from tests.e2e.page_server import served_page
from tests.e2e.stand_in import StandIn

_USABLE = "body[data-chat=ready] #question textarea"
_FRAMES = """seconds => new Promise(resolve => {
    const times = [];
    const draw = now => {
        times.push(now);
        if (now - times[0] < 1000 * seconds) requestAnimationFrame(draw);
        else resolve(times);
    };
    requestAnimationFrame(draw);
})"""


@contextmanager
def page_at(address: str | None, rate: float, num_tokens: int) -> Iterator[str]:
    """The address, or that of a page served here."""
    if address is not None:
        yield address
        return
    stand_in = StandIn(tokens_per_s=rate, num_tokens=num_tokens)
    with served_page(stand_in, "demo", client=stand_in) as found:
        yield found


def opened(browser: Any, address: str, usable: str) -> tuple[Any, dict[str, float]]:
    """A page of a visitor whose browser has kept nothing; what it took to open.

    Units:  usable_s from the request to a field that can be written in; bytes as sent, compressed
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    network = context.new_cdp_session(page)
    network.send("Network.enable")
    sizes: list[float] = []
    network.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(address, wait_until="commit")
    page.wait_for_selector(usable)
    usable_s = page.evaluate("performance.now()") / 1000
    page.wait_for_timeout(1500)
    return page, {"usable_s": usable_s, "bytes": sum(sizes), "requests": len(sizes)}


def frames(page: Any, seconds: float) -> dict[str, float]:
    """Frames while an answer streams. Units: gaps in ms."""
    page.fill("#question textarea", "What does textwrap.dedent do?")
    page.press("#question textarea", "Enter")
    page.wait_for_selector("#chat .message.bot p")
    said = "document.querySelector('#chat .message.bot').innerText.length"
    before = page.evaluate(said)
    times = page.evaluate(_FRAMES, seconds)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {
        "frames_per_s": 1000 * len(gaps) / sum(gaps),
        "gap_median_ms": statistics.median(gaps),
        "gap_p99_ms": sorted(gaps)[int(0.99 * len(gaps))],
        "late_share": sum(gap > 25 for gap in gaps) / len(gaps),
        "letters_per_s": (page.evaluate(said) - before) / seconds,
    }


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Medians over `runs` visitors."""
    found: list[dict[str, float]] = []
    num_tokens = int(arguments.rate * (arguments.seconds + 10))
    with (
        page_at(arguments.address, arguments.rate, num_tokens) as address,
        chromium() as browser,
    ):
        for _ in range(arguments.runs):
            page, opening = opened(browser, address, arguments.usable)
            found.append(opening | frames(page, arguments.seconds))
            page.context.close()
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def main() -> None:
    """Print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of a page that is served already")
    parser.add_argument("--usable", default=_USABLE, help="what can be seen when it can be used")
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of frames; an answer ends at 512 tokens"
    )
    parser.add_argument("--runs", type=int, default=3)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
