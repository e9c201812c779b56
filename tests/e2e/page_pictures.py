"""Pictures of the page for README and docs, and what an idle page costs, with the demo model.

    python -m tests.e2e.page_pictures docs
    python -m tests.e2e.page_pictures docs --states
    python -m tests.e2e.page_pictures --idle-s 60

The placement is planned for a made-up machine with a GPU that has room for a part of the model.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.system import System
from hotcold.model.errors import ServiceError
from hotcold.placement.machine.description import write_machine
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES
from tests.e2e.browser import chromium
from tests.e2e.commands import run
from tests.e2e.page_server import served_page
from tests.e2e.page_visit import TIMEOUT_MS, ask
from tests.e2e.stand_in import StandIn
from tests.placement_cases import make_machine

DEMO = Path(__file__).resolve().parents[2] / "demo"
_QUESTIONS = ("What does textwrap.dedent do?", "What does os.path.join do?")
_POLLS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 760}},
    "dark": {"viewport": {"width": 1280, "height": 760}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 760}, "has_touch": True, "is_mobile": True},
}
_SETTLE_MS = 700
_GAP = 8  # pixels between pictures in one file
_QUALITY = 55
_WIDEST = 1680
_COLOURS = 256
_GPU_BYTES = GPU_RESERVE_BYTES + (10 << 20)


@contextmanager
def planned_demo() -> Iterator[Path]:
    """A copy of the demo model with a plan beside it."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "demo"
        shutil.copytree(DEMO, model)
        machine = Path(name) / "machine.json"
        write_machine(machine, make_machine(gpu_bytes=(_GPU_BYTES,)))
        plan = model / "hotcold" / "plan-with-a-gpu.safetensors"
        done = run(
            "plan", model, "--machine", machine, "--mode", "sign", "--out", plan,
            "--context", "512", "--cpu-actors", "2", timeout_s=300,
        )  # fmt: skip
        if done.status:
            raise RuntimeError(done.err)
        yield model


@contextmanager
def opened_page(model: Path, width: int, height: int) -> Iterator[Any]:
    """The page in a browser, in mode sign."""
    predictors = model / "hotcold" / "predictors-sign.safetensors"
    config = SystemConfig(
        str(model), mode="sign", num_cpu_actors=2, num_threads=2, context_length=1024,
        predictors_path=str(predictors),
    )  # fmt: skip
    with (
        System.start(config) as system,
        served_page(system, "hotcold demo") as address,
        chromium() as browser,
    ):
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(address)
        page.wait_for_selector("body[data-chat=ready] #question textarea")
        yield page


def take_pictures(folder: Path) -> None:
    """Write chat.png and placement.png."""
    with planned_demo() as model, opened_page(model, 1280, 800) as page:
        for number, question in enumerate(_QUESTIONS):
            if number:
                page.click("#new")
                page.wait_for_selector("#chat .message", state="detached")
            ask(page, question)
            page.wait_for_function(
                "q => document.querySelector('#status').innerText.includes('tokens at') &&"
                " document.querySelector('#chat .message.user')?.innerText.trim() == q",
                arg=question,
            )
        page.wait_for_function(
            "document.querySelector('#live [data-polling]')?.dataset.polling == 'no'"
        )
        write_png(page, folder / "chat.png")
        page.get_by_role("tab", name="Placement").click()
        page.wait_for_selector("#placement table")
        page.locator("#plan input").click()
        page.get_by_role("option", name="plan-with-a-gpu").click()
        page.wait_for_function("document.querySelector('#placement').innerText.includes('A plan')")
        page.wait_for_function("!document.querySelector('[role=listbox], [role=option]')")
        write_png(page, folder / "placement.png")


def write_png(page: Any, file: Path) -> None:
    """A picture of the page in as many colours as it needs."""
    from PIL import Image

    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shown.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


def take_states(folder: Path) -> None:
    """Write page-light.webp, page-dark.webp and page-phone.webp: four states in each."""
    stand_in = StandIn()
    with (
        served_page(stand_in, "demo", client=stand_in) as address,
        chromium() as browser,
    ):
        for name, options in _POLLS.items():
            stand_in.reset()
            stand_in.tokens_per_s = 30.0
            page = browser.new_context(**options).new_page()
            page.set_default_timeout(TIMEOUT_MS)
            page.goto(address)
            page.wait_for_selector("body[data-chat=ready] #question textarea")
            shown = list(_states(page, stand_in, name == "phone"))
            columns = 4 if name == "phone" else 2
            write_together(shown, columns, folder / f"page-{name}.webp")
            page.context.close()


def _states(page: Any, stand_in: StandIn, is_phone: bool) -> Iterator[bytes]:
    """Pictures of a page: empty, answering, an error; the settings, or what a phone hides."""
    if not is_phone:
        page.wait_for_selector("#live [data-actor=driver]")
    page.wait_for_timeout(_SETTLE_MS)
    yield page.screenshot()
    ask(page, _QUESTIONS[0])
    page.wait_for_selector("#chat .message.bot ol")
    yield page.screenshot()
    page.wait_for_selector("body[data-chat=ready]")
    if is_phone:
        page.get_by_role("button", name="Neurons", exact=True).click()
        page.wait_for_timeout(_SETTLE_MS)
        yield page.screenshot()
        page.get_by_role("button", name="Neurons", exact=True).click()
        page.get_by_role("button", name="Conversations").click()
    else:
        page.click("#new")
        stand_in.num_tokens, stand_in.error = 0, ServiceError("the cpu0 service died")
        page.wait_for_selector("#welcome h2")
        page.wait_for_selector("#chat .message", state="detached")
        ask(page, _QUESTIONS[1])
        page.wait_for_selector("#chat .problem")
        page.wait_for_timeout(_SETTLE_MS)
        yield page.screenshot()
        page.get_by_role("button", name="Settings").click()
    page.wait_for_timeout(_SETTLE_MS)
    yield page.screenshot()


def write_together(pictures: list[bytes], columns: int, file: Path) -> None:
    """Pictures of one size beside and below one another, as WebP of at most `_WIDEST` pixels."""
    from PIL import Image

    taken = [Image.open(io.BytesIO(picture)) for picture in pictures]
    scale = min(1.0, _WIDEST / columns / taken[0].width)
    size = [round(scale * each) for each in taken[0].size]
    width, height = (each + _GAP for each in size)
    rows = -(-len(taken) // columns)
    whole = Image.new("RGB", (width * columns - _GAP, height * rows - _GAP), "#8d9097")
    for number, picture in enumerate(taken):
        shown = picture.resize((size[0], size[1]))
        whole.paste(shown, (number % columns * width, number // columns * height))
    whole.save(file, quality=_QUALITY, method=6)


def idle_cost(seconds: float) -> dict[str, float]:
    """Shares of a core that the server and the system's actors take.

    With nobody there, and with a page open that can be seen while nothing runs.
    """
    config = SystemConfig(str(DEMO), num_cpu_actors=2, num_threads=2, context_length=1024)
    with (
        System.start(config) as system,
        served_page(system, "hotcold demo") as address,
        chromium() as browser,
    ):
        actors = list(system.call("processes").values())
        alone = _shares_of_a_core(actors, seconds)
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector('#live [data-polling="no"]', state="attached")
        opened = _shares_of_a_core(actors, seconds)
    return {
        "server_alone": alone[0],
        "server_with_page": opened[0],
        "actors_alone": alone[1],
        "actors_with_page": opened[1],
    }


def _shares_of_a_core(actors: list[int], seconds: float) -> tuple[float, float]:
    before = _cpu_s([os.getpid()]), _cpu_s(actors)
    time.sleep(seconds)
    after = _cpu_s([os.getpid()]), _cpu_s(actors)
    return (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds


def _cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(found.user + found.system for found in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--states", action="store_true", help="only its states, over a stand-in")
    parser.add_argument("--idle-s", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.folder is not None and arguments.states:
        take_states(arguments.folder)
    elif arguments.folder is not None:
        take_pictures(arguments.folder)
    if arguments.idle_s:
        print(json.dumps(idle_cost(arguments.idle_s)))


if __name__ == "__main__":
    main()
