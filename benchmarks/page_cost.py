"""What it costs to be watched: decoding with and without somebody at the page.

    python -m benchmarks.page_cost --rounds 400 --answers 1
    python -m benchmarks.page_cost MODEL --rounds 12 --answers 1 --tokens 80

A round answers some requests unwatched and as many while telemetry is asked for, as often as the
page asks; which comes first changes from round to round. The ratio of each round counts, for the
speed of a shared machine changes within seconds. CPU seconds are of driver and services.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import click

from actors.protocol.messages import GenerateRequest
from actors.setup.preflight import SystemOptions, prepare_system
from actors.system import System
from benchmarks.runs import median_interval, where_and_when
from model.files.locate import locate_model
from model.sampling import SamplingParams
from ui.page.live import telemetry_json

_POLL_S = 0.5  # as live.js
_PROMPT = list(range(5, 25))


@contextmanager
def _watching(system: System) -> Iterator[None]:
    """Ask for telemetry as the page does, and end the watch at the end."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            json.dumps(telemetry_json(system.call("telemetry")))
            ended.wait(_POLL_S)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        system.call("telemetry", 0.0)


def _answers(system: System, num_tokens: int, num_answers: int) -> tuple[float, float]:
    """Tokens a second, and CPU seconds of driver and services a token, of answers in turn."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    before = _cpu_seconds(system)
    request = GenerateRequest(sampling, prompt_ids=_PROMPT)
    decode_s = sum(system.complete(request).decode_s for _ in range(num_answers))
    num_decoded = (num_tokens - 1) * num_answers
    return num_decoded / decode_s, (_cpu_seconds(system) - before) / num_decoded


def _cpu_seconds(system: System) -> float:
    import psutil

    times = [psutil.Process(pid).cpu_times() for pid in system.call("processes").values()]
    return float(sum(time.user + time.system for time in times))


@click.command()
@click.argument("model", required=False)
@click.option("--rounds", "num_rounds", type=int, default=40, show_default=True)
@click.option("--answers", "num_answers", type=int, default=4, show_default=True)
@click.option("--tokens", "num_tokens", type=int, default=480, show_default=True)
@click.option("--mode", default="exact", show_default=True)
def main(model: str | None, num_rounds: int, num_answers: int, num_tokens: int, mode: str) -> None:
    """Print one JSON object."""
    path = locate_model(model)
    options = SystemOptions(mode=mode, context_length=num_tokens + len(_PROMPT) + 1)
    config, _ = prepare_system(path, options)
    plain: list[tuple[float, float]] = []
    watched: list[tuple[float, float]] = []
    with System.start(config) as system:
        _answers(system, num_tokens, 1)
        for number in range(num_rounds):
            for is_watched in (False, True) if number % 2 else (True, False):
                if is_watched:
                    with _watching(system):
                        watched.append(_answers(system, num_tokens, num_answers))
                else:
                    plain.append(_answers(system, num_tokens, num_answers))
    pairs = list(zip(plain, watched, strict=True))
    report: dict[str, Any] = {
        **where_and_when(path, config.num_threads),
        "mode": mode,
        "rounds": num_rounds,
        "tokens_per_s": median(speed for speed, _ in plain),
        "watched_tokens_per_s": median(speed for speed, _ in watched),
        "speed_ratio": median_interval([seen[0] / unseen[0] for unseen, seen in pairs]),
        "cpu_ms_per_token": 1e3 * median(cpu for _, cpu in plain),
        "cpu_ratio": median_interval([seen[1] / unseen[1] for unseen, seen in pairs]),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
