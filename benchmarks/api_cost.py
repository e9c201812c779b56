"""What following answers costs: nobody reads, `System.generate`, the HTTP API, in turn.

python -m benchmarks.api_cost --rounds 100
python -m benchmarks.api_cost MODEL --rounds 12 --tokens 80

What comes first changes from round to round; a way's ratios are to the same round's unread answers.
"""

import http.client
import json
import statistics
import threading
import time
from typing import Any

import click
import psutil

from actors.protocol.messages import GenerateRequest, Generation
from actors.setup.preflight import SystemOptions, prepare_system
from actors.system import System
from benchmarks.runs import median_interval
from jobs.support.listening import listen
from model.files.locate import locate_model
from model.sampling import SamplingParams
from ui.api.backend import Backend, ServerSettings
from ui.server import create_app
from ui.serving import LoadingGate, ServerThread

_PROMPT_IDS = list(range(100, 110))


@click.command()
@click.argument("model", required=False)
@click.option("--rounds", "num_rounds", default=20, show_default=True)
@click.option("--tokens", "num_tokens", default=300, show_default=True)
@click.option("--clients", "num_clients", default=1, show_default=True)
def main(model: str | None, num_rounds: int, num_tokens: int, num_clients: int) -> None:
    """Print the median decoding speed of each way, and of each round's ratio."""
    options = SystemOptions(kv_positions=num_clients * 512, context_length=512)
    system, _ = prepare_system(locate_model(model), options)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    request = GenerateRequest(sampling, prompt_ids=_PROMPT_IDS)
    server = ServerThread(listener, LoadingGate("bench"), [], True, 1 << 20)
    with System.start(system) as running:
        backend = Backend(running, system, ServerSettings("bench"))
        results: list[Generation] = []
        backend.metrics.add_result = lambda result, _: results.append(result)  # type: ignore
        server.use(create_app(backend))
        ways = {
            "unread": lambda: _unread(running, request, num_clients),
            "System.generate": lambda: _parallel(num_clients, lambda: running.complete(request)),
            "API": lambda: _over_api(port, sampling, num_clients, results),
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        cpu_s = dict.fromkeys(ways, 0.0)
        processes = [psutil.Process(), psutil.Process(running.call("processes")["driver"])]
        for number in range(num_rounds + 1):
            names = list(ways)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                before = _cpu_seconds(processes)
                speed = sum(result.decode_tokens_per_s for result in ways[name]())
                if number > 0:
                    speeds[name].append(speed)
                    cpu_s[name] += _cpu_seconds(processes) - before
        server.stop()
    for name, values in speeds.items():
        ratio = median_interval([a / b for a, b in zip(values, speeds["unread"], strict=True)])
        print(
            f"{name:16} {statistics.median(values):8.1f} tokens/s, of unread {ratio['median']:.3f} "
            f"({ratio['from']:.3f} to {ratio['to']:.3f} at 95%); "
            f"{1e6 * cpu_s[name] / (num_rounds * num_clients * num_tokens):.0f} µs of CPU a token "
            "in driver, server and client"
        )


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _unread(running: System, request: GenerateRequest, num_clients: int) -> list[Generation]:
    for number in range(num_clients):
        running.call("submit", GenerateRequest(**{**vars(request), "request_id": str(number)}))
    while (load := running.call("driver_load")).num_running + load.num_waiting > 0:
        time.sleep(0.1)
    events = running.call("take_events", 1.0)
    return [event.result for _, event in events]


def _over_api(
    port: int, sampling: SamplingParams, num_clients: int, results: list[Generation]
) -> list[Generation]:
    results.clear()
    body = json.dumps(
        {
            "prompt": _PROMPT_IDS, "max_tokens": sampling.max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }
    )  # fmt: skip

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", body)
        assert b"[DONE]" in connection.getresponse().read()

    _parallel(num_clients, ask)
    return list(results)


def _parallel(count: int, function: Any) -> list[Any]:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(function())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


if __name__ == "__main__":
    main()
