"""Pictures of the page for README and docs, with the demo model.

    python -m tests.e2e.page_pictures docs
    python -m tests.e2e.page_pictures docs --states

The placement is planned for a made-up machine with a GPU that has room for a part of the model.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.system import System
from hotcold.model.errors import ServiceError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.placement.machine.description import write_machine
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES
from tests.e2e.browser import chromium
from tests.e2e.commands import run
from tests.e2e.page_server import served_page
from tests.e2e.page_visit import TIMEOUT_MS, ask, begin_anew, wait_for_answer
from tests.e2e.stand_in import StandIn
from tests.placement_cases import make_machine

_QUESTIONS = ("What does textwrap.dedent do?", "What does os.path.join do?")
_VIEWS: dict[str, dict[str, Any]] = {
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
        shutil.copytree(DEMO_DIRECTORY, model)
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


def opened(browser: Any, address: str, **options: Any) -> Any:
    """The page, once one can ask."""
    page = browser.new_page(**options)
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(address)
    page.wait_for_selector("body[data-chat=ready] #question textarea")
    return page


def take_pictures(folder: Path) -> None:
    """Write chat.png and placement.png, of mode sign."""
    with planned_demo() as model:
        predictors = model / "hotcold" / "predictors-sign.safetensors"
        config = SystemConfig(
            str(model), mode="sign", num_cpu_actors=2, num_threads=2, context_length=1024,
            predictors_path=str(predictors),
        )  # fmt: skip
        with (
            System.start(config) as system,
            served_page({"hotcold demo": system}) as address,
            chromium() as browser,
        ):
            page = opened(browser, address, viewport={"width": 1280, "height": 800})
            for question in _QUESTIONS:
                begin_anew(page)
                ask(page, question)
                wait_for_answer(page)
            page.wait_for_selector("#live [data-polling=no]")
            write_png(page, folder / "chat.png")
            page.get_by_role("tab", name="Placement").click()
            page.wait_for_selector("#placement table")
            page.locator("#plan input").click()
            page.get_by_role("option", name="plan-with-a-gpu").click()
            page.locator("#placement", has_text="A plan").wait_for()
            page.wait_for_selector("[role=listbox], [role=option]", state="detached")
            write_png(page, folder / "placement.png")


def write_png(page: Any, file: Path) -> None:
    """A picture of the page in as many colours as it needs."""
    from PIL import Image

    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shown.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


def take_states(folder: Path) -> None:
    """Write page-light.webp, page-dark.webp and page-phone.webp: four states in each."""
    stand_in = StandIn()
    with served_page({"demo": stand_in}) as address, chromium() as browser:
        for name, options in _VIEWS.items():
            stand_in.reset()
            stand_in.tokens_per_s = 30.0
            page = opened(browser, address, **options)
            shown = list(_states(page, stand_in, name == "phone"))
            columns = 4 if name == "phone" else 2
            write_together(shown, columns, folder / f"page-{name}.webp")
            page.close()


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
        begin_anew(page)
        stand_in.num_tokens, stand_in.error = 0, ServiceError("the cpu0 service died")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--states", action="store_true", help="only its states, over a stand-in")
    arguments = parser.parse_args()
    (take_states if arguments.states else take_pictures)(arguments.folder)


if __name__ == "__main__":
    main()
