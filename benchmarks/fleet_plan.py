"""Fleets of 10, 1,000 and 10,000 nodes by simulation: three routers, faults, what fails first.

    python -m benchmarks.fleet_plan --plot docs/fleet-loads.svg --out fleet-plan.md
    python -m benchmarks.fleet_overhead --json > overhead.json
    python -m benchmarks.fleet_plan --measured overhead.json

Nodes are as fast as SmolLM2 on two cores (benchmarks/results/smollm2.md). They end after an hour in
the mean, which is noticed after 5 s; one in twenty takes three times as long; in a fifth of the
time half as much again is asked. With --measured it simulates what `benchmarks.fleet_overhead`
measured, by the speeds of one replica.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import click
import numpy as np
import simpy

from benchmarks.frame import EXISTING, Json, program, progress, table
from hotcold.jobs.profile.plot import new_figure, save_figure
from hotcold.jobs.support.fleet_plan import Targets
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.ui.fleet.simulation import Events, Fleet, Load, Outcome, Request, Service, simulate

_SERVICE = Service(1 / 663.23, {1: 175.83, 4: 364.90, 8: 447.49}, num_parallel=8, num_pages=128)
_LOAD = Load(rate=0.5, prompt_tokens=512, answer_tokens=128, shared=0.25, burst=1.5)  # a node's
_TARGETS = Targets(ttft_s=10.0, tpot_s=0.05)
_FEWEST = 20_000  # requests
_PAGES = 2048 // PAGE_POSITIONS  # of each replica whose conversations were measured
_LOADS = np.arange(1, 13) / 10  # a node's, until a target is missed


class RoundRobin(Fleet):
    """One replica after another."""

    turns: Iterator[int] | None = None

    def ranked(self, num_tokens: np.ndarray) -> Iterator[int]:
        """All, from the next one on."""
        self.turns = self.turns or count()
        return (number % len(num_tokens) for number in self.turns)


class TwoChoices(Fleet):
    """Of two that are drawn the one with fewer requests, as Serve's own router."""

    def ranked(self, num_tokens: np.ndarray) -> Iterator[int]:
        """Until one has a place."""
        numbers, counts = range(len(num_tokens)), self.known.count
        while True:
            yield min(self.chance.choices(numbers, k=2), key=lambda one: counts[one])


_ROUTERS = {"first to begin": Fleet, "round robin": RoundRobin, "power of two": TwoChoices}


def outcome(name: str, num_nodes: int, rate: float, seconds: float) -> Outcome:
    """What clients see of a router, with faults; `rate`: requests a second of each node."""
    fleet = _ROUTERS[name](_SERVICE, num_nodes, mean_life_s=3600.0, slow=0.05)
    load = replace(_LOAD, rate=rate * num_nodes)
    return simulate(fleet, load, max(_FEWEST, round(load.rate * seconds)))


def p(seconds: np.ndarray, share: float) -> float:
    """A percentile."""
    return float(np.percentile(seconds, share))


def at_one_load(nodes: int, name: str, seconds: float) -> Json:
    """A router's row."""
    began_s = time.process_time()
    found = outcome(name, nodes, _LOAD.rate, seconds)
    row: Json = {"nodes": nodes, "router": name, "refused": found.refused}
    row |= {f"first p{share}": p(found.first_s, share) for share in (50, 99)}
    row |= {f"between p{share}": p(found.between_s, share) for share in (50, 99)}
    row |= {"cached": found.cached, "busy": found.busy, "answers": len(found.first_s)}
    row |= {"cpu_s": time.process_time() - began_s}
    progress(f"{nodes} nodes, {name}: {row['cpu_s']:.0f} s")
    return row


def until_one_fails(nodes: int, name: str, seconds: float) -> Json:
    """The load at which a router misses a target first, and the 99th percentile of each load.

    Half of the time is simulated for each load: there are many.
    """
    row: Json = {"nodes": nodes, "router": name, "missed": "", "p99": {}}
    for load in map(float, _LOADS):
        found = outcome(name, nodes, load, seconds / 2)
        row["p99"][load] = p(found.first_s, 99)
        if missed := _TARGETS.missed(found):
            row |= {"missed": missed, "load": load}
            break
    progress(f"{nodes} nodes, {name}: {row['missed']}")
    return row


def draw(path: Path, loads: list[Json]) -> None:
    """Draw the 99th percentile of the time to the first token by load."""
    figure, axes = new_figure(3.4)
    numbers = list(dict.fromkeys(row["nodes"] for row in loads))
    for row in loads:
        style = ("o-", "s--", "^:")[numbers.index(row["nodes"]) % 3]
        color = f"C{list(_ROUTERS).index(row['router'])}"
        label = f"{row['router']}, {row['nodes']:,} nodes"
        axes.plot(row["p99"].keys(), row["p99"].values(), style, color=color, label=label)
    axes.axhline(_TARGETS.ttft_s, color="0.5", linewidth=0.9)
    axes.set(xlabel="requests/s a node", ylabel="first token, p99, s", ylim=(0, 22))
    figure.legend(frameon=False, loc="outside right upper")
    save_figure(path, figure)


def tables(rows: list[Json], loads: list[Json]) -> str:
    """Both tables, as Markdown."""
    text = f"{_LOAD.rate:g} requests/s a node:\n\n" + table(
        ("nodes", "router", "first token, p50 s", "p99 s", "between tokens, p50 s", "p99 s",
         "refused", "cached", "busy", "answers", "CPU, s"),
        [[f"{row['nodes']:,}", row["router"], f"{row['first p50']:.2f}", f"{row['first p99']:.2f}",
          f"{row['between p50']:.4f}", f"{row['between p99']:.4f}", f"{row['refused']:.2%}",
          f"{row['cached']:.0%}", f"{row['busy']:.0%}", f"{row['answers']:,}",
          f"{row['cpu_s']:.0f}"] for row in rows],
    )  # fmt: skip
    text += f"\nWhat is missed first, of {_TARGETS.ttft_s:g} s to the first token and "
    text += f"{_TARGETS.tpot_s:g} s between two for 99 of 100, and none refused:\n\n"
    return text + table(
        ("nodes", "router", "at requests/s a node", "missed",
         "node hours a million tokens of answers, one load before"),
        [[f"{row['nodes']:,}", row["router"], row.get("load", "–"), row["missed"] or "nothing",
          f"{1e6 / (3600 * kept * _LOAD.answer_tokens):.1f}" if kept else "–"]
         for row in loads for kept in [([0.0, *row["p99"]])[-2 if row["missed"] else -1]]],
    )  # fmt: skip


def compared(measured: Json) -> list[list[str]]:
    """Rows of what was measured, what is simulated by one replica's speeds, and the ratio."""
    parallel, tokens, prompt = (measured[name] for name in ("parallel", "tokens", "prompt_tokens"))
    rounds = measured["in turn"]["a fleet's door"]
    first_ms, one, several = map(float, np.median(rounds, axis=0))
    written_s = parallel * (tokens / several - first_ms / 1000)  # streams at once, but for prompts
    rates = {1: one, parallel: parallel * tokens / written_s}
    service = Service(measured["token_s"], rates, parallel, _PAGES)
    short = round(first_ms / 1000 / service.token_s)  # tokens: each prompt takes as long at least
    rows = []
    for replicas in (1, 2, 4):
        num_streams = max(2, replicas) * parallel
        streams = [Request(0.0, short, tokens, []) for _ in range(num_streams)]
        Fleet(service, replicas).run(streams)
        firsts = [stream.first_s for stream in streams]
        simulated = num_streams * tokens / max(stream.ended_s for stream in streams)
        was = np.median(measured["replicas"].get(str(replicas), [(np.nan, np.nan)]), axis=0)
        name = f"replicas: {replicas}, streams: {num_streams}"
        rows.append((f"{name}, tokens/s", was[0], simulated))
        rows.append((f"{name}, first token, mean s", was[1], float(np.mean(firsts))))
    for (name, was), kind in zip(measured["routers"].items(), _ROUTERS.values(), strict=False):
        asked = conversations(kind(service, 2), 2 * parallel, prompt, short, measured["beginnings"])
        ms = [1000 * (one.first_s - one.asked_s) for one in asked]
        cached = sum(one.num_cached for one in asked) / (len(asked) * prompt)
        simulated_ones = p(np.array(ms), 50), p(np.array(ms), 95), cached
        for what, *both in zip(("p50 ms", "p95 ms", "cached"), was, simulated_ones, strict=True):
            rows.append((f"{name}, {what}", *both))
    return [
        [name, f"{was:.3g}", f"{now:.3g}", f"{now / was:.2f}"] if was == was  # it was measured
        else [name, "–", f"{now:.3g}", "–"] for name, was, now in rows
    ]  # fmt: skip


def conversations(
    fleet: Fleet, clients: int, prompt: int, short: int, beginnings: int
) -> list[Request]:
    """What as many clients asked, each its next request once the last one is answered."""
    asked: list[Request] = []
    num_pages = prompt // PAGE_POSITIONS

    def client() -> Events:
        for _ in range(400 // clients):
            first = fleet.chance.randrange(beginnings) * num_pages
            request = Request(
                fleet.env.now, prompt + short, 16, list(range(first, first + num_pages))
            )
            asked.append(request)
            yield fleet.env.process(fleet.ask(request))

    fleet.env.run(simpy.AllOf(fleet.env, [fleet.env.process(client()) for _ in range(clients)]))
    return asked[len(asked) // 5 :]


@program
@click.option("--nodes", "numbers", multiple=True, default=(10, 1000, 10_000))
@click.option("--seconds", default=340.0, help="Simulated, at least; a million conversations.")
@click.option("--plot", type=click.Path(path_type=Path), help="A picture: first tokens by load.")
@click.option("--measured", type=EXISTING, help="What benchmarks.fleet_overhead --json printed.")
def main(
    numbers: tuple[int, ...], seconds: float, plot: Path | None, measured: Path | None
) -> tuple[Json, str]:
    """Simulate fleets, or compare a simulation with what was measured."""
    if measured is not None:
        cells = compared(json.loads(measured.read_text()))
        return {"rows": cells}, table(("", "measured", "simulated", "ratio"), cells)
    with ProcessPoolExecutor() as pool:
        jobs = [(nodes, name, seconds) for nodes in numbers for name in _ROUTERS]
        found = [pool.submit(at_one_load, *job) for job in reversed(jobs)]
        fewer = [pool.submit(until_one_fails, *job) for job in jobs]
        rows, loads = [one.result() for one in reversed(found)], [one.result() for one in fewer]
    if plot is not None:
        draw(plot, loads)
    return {"rows": rows, "loads": loads}, tables(rows, loads)


if __name__ == "__main__":
    main()
