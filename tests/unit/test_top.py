"""`hotcold top`: what it draws of a system, whom it asks, and its end."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

from hotcold.actors.telemetry.snapshot import ActorHealth, NeuronMap, Speed, Telemetry
from hotcold.jobs.commands import top
from hotcold.jobs.running.client import Client, GoneError, LoadingError
from hotcold.jobs.running.registry import Record
from hotcold.jobs.top_picture import drawn, picture
from hotcold.jobs.top_watch import watch
from hotcold.model.errors import ServiceError
from hotcold.ui.telemetry import map_json, telemetry_json
from tests.e2e.commands import Outcome, run_main
from tests.e2e.stand_in import mixture_map

LAYERS, BUCKETS = 4, 64


def telemetry(num_steps: int = 10, num_running: int = 1) -> Telemetry:
    """Of 4 layers with 640 neurons; layer 0 is hot in its first half, others compute ever more."""
    each = np.full((LAYERS, BUCKETS), 10)
    hot, computed = np.zeros_like(each), np.zeros_like(each, dtype=float)
    hot[0, :32] = 10
    for layer, share in enumerate((0.1, 0.5, 3.0, 6.0)):
        computed[layer, 32:] = share
    gates = computed + 1
    neurons = NeuronMap(
        each, hot, computed.astype(int), gates.astype(int), computed, gates, num_steps
    )
    times = {"attention": 0.5, "ffn": 1.0, "head": 0.1, "predictor": 0.0, "exchange": 0.18,
             "python": 0.22, "total": 2.0}  # fmt: skip
    speed = Speed(123.44, times, 0.1, 0.2) if num_running else Speed(0.0, {}, 0.0, 0.0)
    actors = (
        ActorHealth("driver", "alive", 7, 1 << 28, "cpu"),
        ActorHealth("gpu", "alive", 8, 1 << 29, "cpu"),
        ActorHealth("cpu0", "silent", 9, 1 << 30, "cpu"),
        ActorHealth("cpu1", "restarting", 0, 0, ""),
    )
    return Telemetry(
        "exact", 3725.0, num_running, 2, 5, 8, speed, neurons, actors, 4 << 30, 3 << 30
    )


def told(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(telemetry_json(telemetry(**changes)), allow_nan=False))


PICTURE = """\
words  exact  up 1:02:05  123.4 tokens/s  1 running, 2 waiting  5 of 8 KV pages

layer  its neurons, in the checkpoint's order    hot   fire  gates
    0  ◆◆◆◆◆◆◆◆◆◆◆◆◆◆◆◆················        50.0%   0.5%  10.5%
    1                  ░░░░░░░░░░░░░░░░         0.0%   2.5%  12.5%
    2                  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓         0.0%  15.0%  25.0%
    3                  ████████████████         0.0%  30.0%  40.0%
computed of a cell: · few  ░ over 2%  ▒ 10%  ▓ 25%  █ 50%; ◆ hot, on the GPU

a step takes 2.00 ms: attention 25%  head 5%  ffn 50%  python 11%
exchange 9%: 9 a step, 20 µs each beside the services' work
service    state       device     memory  busy  process
driver     alive       cpu     256.0 MiB   11%  7
attention  alive       cpu     512.0 MiB   30%  8
cpu0       silent      cpu      1.00 GiB   50%  9
cpu1       restarting  -               -     -  -
this machine: 3.00 GiB of 4.00 GiB in use"""


def test_the_picture() -> None:
    assert drawn(picture("words", told(), 80), 100, False) == PICTURE
    coloured = drawn(picture("words", told(), 80), 100, True)
    assert "\x1b[" in coloured


def test_drafts_by_source() -> None:
    found = told() | {"drafts": {"ngram": [8, 2], "mtp": [10, 9]}, "tokens_per_step": 2.1}
    text = drawn(picture("words", found, 200), 200, False)
    assert "gives 2.1 tokens, 25% of drafts by ngram taken, 90% of drafts by mtp taken: " in text


def test_a_system_that_does_nothing() -> None:
    text = drawn(picture("words", told(num_steps=0, num_running=0), 80), 80, False)
    assert "idle" in text and "no neuron has been counted yet" in text and "no step" in text
    assert "driver     alive" in text and "%" not in text


class StandIn(Client):
    """Says what a test gives, one after the other; raises what is an error."""

    def __init__(self, *found: dict[str, Any] | Exception) -> None:
        super().__init__(Record("words", 1, socket="words.sock"))
        self._found = [copy.deepcopy(one) for one in found]
        self.num_asked = 0

    def telemetry(self) -> dict[str, Any]:
        self.num_asked += 1
        found = self._found.pop(0) if len(self._found) > 1 else self._found[0]
        if isinstance(found, Exception):
            raise found
        return found


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command over such a system."""

    def of(system: StandIn, *arguments: str) -> Outcome:
        monkeypatch.setattr(top, "_chosen", lambda name: system)
        monkeypatch.setattr(top, "_COUNT_S", 0.0)
        return run_main("top", *arguments)

    return of


def test_one_picture_where_nobody_watches(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = drawn(picture("words", told(), 100), 100, False)
    for arguments in ((), ("--once",)):
        assert run(StandIn(told()), *arguments) == Outcome(0, f"{text}\n", "")
    system = StandIn(told(num_steps=0), told())  # services count once somebody looks
    assert run(system, "--once").out.count("◆") > 1 and system.num_asked == 2
    unknown = told(num_steps=0, num_running=0)
    unknown["actors"][1]["pid"] = 0
    system = StandIn(unknown, told(num_steps=0, num_running=0))
    assert "attention  alive       cpu" in run(system, "--once").out and system.num_asked == 2
    assert run(StandIn(told()), "--json").report == told()
    failed = run(StandIn(ServiceError("the system 'words' does not answer")))
    assert failed.refusal == "hotcold: error: the system 'words' does not answer"


@pytest.mark.parametrize(
    ("names", "asked", "error"),
    [
        ([], [], "no system is running; `hotcold serve` or --keep starts one"),
        ([], ["a"], "no system named 'a' is running; none does"),
        (["a", "b"], [], "several systems run: a, b; name one, as in `hotcold top NAME`"),
        (["a", "b"], ["c"], "no system named 'c' is running; these do: a, b"),
        (["a", "b"], ["b"], "the system 'b' has ended"),  # nobody answers there
        (["a"], [], "the system 'a' has ended"),
    ],
)
def test_whom_it_asks(
    names: list[str], asked: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Record(name, 1, socket=f"{name}.sock") for name in names]
    monkeypatch.setattr(top, "listed", lambda: found)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert error in run_main("top", *asked).refusal


@contextmanager
def keys(text: str) -> Iterator[tuple[Any, Vt100_Output, io.StringIO]]:
    """A terminal at which these are pressed."""
    shown = io.StringIO()
    output = Vt100_Output(shown, lambda: _Size(), term="xterm")  # type: ignore[arg-type,return-value]
    with create_pipe_input() as pressed:
        pressed.send_text(text)
        yield pressed, output, shown


class _Size:
    rows, columns = 30, 100


def test_on_the_whole_screen_until_q() -> None:
    class Pressing(StandIn):
        def telemetry(self) -> dict[str, Any]:
            found = super().telemetry()
            if "idle" in shown.getvalue() or self.num_asked > 300:  # once all was drawn
                pressed.send_text("q")
            return found

    gone = told(num_steps=0, num_running=0)
    system = Pressing(LoadingError("the model is loading"), told(), gone)
    with keys("") as (pressed, output, shown):
        watch(system, pressed, output, each_s=0.1)
        text = shown.getvalue()
    assert "\x1b[?1049h" in text and "\x1b[?1049l" in text.rpartition("\x1b[?25h")[2]  # put back
    assert "loading" in text and "tokens/s" in text and "q ends" in text and "idle" in text
    assert "no neuron" not in text  # the last figures stay


def test_it_ends_with_the_system_and_with_ctrl_c() -> None:
    with keys("") as (pressed, output, _), pytest.raises(GoneError):
        watch(StandIn(told(), GoneError("the system 'words' has ended")), pressed, output, 0.01)
    with keys("\x03") as (pressed, output, _), pytest.raises(KeyboardInterrupt):
        watch(StandIn(told()), pressed, output, 0.01)


def test_experts_are_told() -> None:
    """A mixture of 40 experts a layer and a shared one, its first layer dense."""
    found = told()
    neurons = mixture_map()
    found["map"] = json.loads(json.dumps(map_json(neurons), allow_nan=False))
    assert neurons.experts is not None
    chosen = neurons.experts.chosen[1:, :40] / 100
    most = -np.sort(-chosen.ravel())
    needed = int((most.cumsum() < 0.8 * most.sum()).sum()) + 1
    text = drawn(picture("words", found, 120), 120, False)
    assert "layer  its experts" in text
    assert (
        f"\nexperts: 4 of 40 a token; {needed / 440:.0%} of them are 80% of the choices, the most "
        f"wanted has {chosen.max():.0%} of the tokens, {(chosen == 0).sum()} of 440 none\n"
    ) in text
    for width, cells in ((120, 41), (70, 32), (40, 8)):
        lines = drawn(picture("words", found, width), width, False).splitlines()
        assert max(map(len, lines)) <= width
        assert lines[3].count("▓") == cells  # a third of a dense layer fires
    found["map"]["experts"]["chosen"] = np.zeros((12, 41)).tolist()
    assert "experts: 4 of 40 a token\n" in drawn(picture("words", found, 120), 120, False)
