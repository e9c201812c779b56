"""Faults of a fleet at random moments while clients ask: what becomes of their answers.

    python -m benchmarks.fleet_faults --minutes 60 --out benchmarks/results/fleet-faults.md

A Ray cluster of several nodes on this machine, each with a raylet and CPUs of its own, serves the
embedded model behind two doors. Clients ask requests of a pool in random order: chat, completions
and Ollama's, streamed and whole, greedy and drawn, short and long, with grammars, stop texts and
logprobs. Services, drivers, replicas, doors, proxies and the controller are killed (-9); nodes are
killed, stopped and drained, and replaced by new ones; the application is deployed anew. Which, and
when, `--seed` says. One fault in four does not wait until the fleet is whole again.

Each answer is compared, to the bit of its logprobs, with that of one plain system that was asked it
alone. An answer that differs, fails or is refused is lost. What a killed door or proxy breaks off
the client asks again, as clients do on errors of the connection; that is counted apart, and is a
loss where no such fault was near. A pause is the longest time in which a stream that had
begun got nothing, from a fault until the next one.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
import httpx
import psutil

from benchmarks.fleet_load import (
    SYSTEM,
    Answer,
    Broken,
    Fleet,
    ask,
    fleet,
    one_system,
    pool,
    processes_of,
)
from benchmarks.frame import Json, head, heading, program, progress, table
from hotcold.model.errors import HotcoldError
from hotcold.model.files.locate import locate_model

_TRIES = 60  # of one request, whose connection breaks off
_AGAIN_S = 0.5
_NEAR_S = 90.0  # a fault that breaks connections off may do so for so long
_PAUSE_S = 0.05  # shorter ones are not looked at
_WHOLE_S = 400.0  # in which a fleet must be whole again
_DRAIN_S = 2.0  # of replicas
_STOPPED_S = 20.0  # of a node that is found lost, or not, before it is killed
_MOST_WRONG = 20
_TITLES = {
    "service": "ServiceActor",
    "driver": "DriverActor",
    "replica": "ServeReplica:hotcold:demo",
    "door": "ServeReplica:hotcold:door",
    "proxy": "ProxyActor",
    "controller": "ServeController",
}


class Trial:
    """A deployed fleet, its clients, and what they saw."""

    def __init__(self, fleet: Fleet, args: Any, requests: list[Json], alone: list[Answer]) -> None:
        self.fleet, self._args, self._requests, self._alone = fleet, args, requests, alone
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self.pauses = deque[tuple[float, float]]()  # of streams that have begun
        self.counts, self.wrong = Counter[str](), list[str]()
        self.faults: list[tuple[str, float, float]] = []  # kind, beginning, whole again
        self.broken: list[tuple[float, str]] = []
        self._threads: list[threading.Thread] = []

    def deploy(self) -> None:
        """Deploy the application, anew if it runs; returns once it runs."""
        from ray import serve

        from hotcold.ui.fleet.application import NAME, application

        serve.run(application(self._args), name=NAME)

    def is_whole(self) -> bool:
        """Whether all processes of all replicas and doors run, as Serve sees it, too."""
        from ray import serve

        wanted = {"demo": self._args.replicas, "door": self._args.doors}
        counts = {"door": wanted["door"], "controller": 1}
        counts |= dict.fromkeys(("replica", "driver"), wanted["demo"])
        with suppress(Exception):
            if any(len(self.fleet.processes(_TITLES[name])) != counts[name] for name in counts):
                return False
            found = serve.status().applications["hotcold"]
            return found.status == "RUNNING" and all(
                found.deployments[name].replica_states == {"RUNNING": count}
                for name, count in wanted.items()
            )
        return False

    def await_whole(self, began_s: float) -> float:
        """Seconds since a moment until it is. Errors: HotcoldError where that takes too long."""
        while not self.is_whole():
            if time.monotonic() - began_s > _WHOLE_S:
                raise HotcoldError(f"the fleet is not whole after {_WHOLE_S:.0f} s")
            time.sleep(0.2)
        return time.monotonic() - began_s

    def start(self, num_clients: int, seed: int) -> None:
        """Start the clients."""
        for number in range(num_clients):
            chance = random.Random(f"client {seed} {number}")
            self._threads.append(threading.Thread(target=self._run, args=(chance,), daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Return once what was asked is answered."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, chance: random.Random) -> None:
        client = httpx.Client(base_url=self.fleet.url)
        while not self._stopping.is_set():
            number, streamed = chance.randrange(len(self._requests)), chance.random() < 0.7
            for _ in range(_TRIES):
                problem = ""
                try:
                    found = ask(client, self._requests[number], streamed, self._note)
                    problem = found.difference(self._alone[number])
                except Broken as error:
                    with self._lock:
                        self.broken.append((time.monotonic(), str(error)))
                    progress(f"asked again: {error}")
                    client.close()
                    client = httpx.Client(base_url=self.fleet.url)
                    time.sleep(_AGAIN_S)
                    continue
                except ValueError as error:
                    problem = str(error)
                break
            else:
                problem = "no connection held"
            with self._lock:
                self.counts.update({"answers": not problem, "lost": bool(problem)})
                if problem:
                    self.wrong.append(f"request {number}, streamed {streamed}: {problem}")
                    progress(self.wrong[-1])
        client.close()

    def _note(self, since_s: float, now_s: float) -> None:
        if now_s - since_s > _PAUSE_S:
            with self._lock:
                self.pauses.append((since_s, now_s))

    def pause_of(self, since_s: float, until_s: float) -> float:
        """The longest time from a moment on in which a stream got nothing."""
        with self._lock:
            pauses = list(self.pauses)
        return max(
            (
                now - max(began, since_s)
                for began, now in pauses
                if now > since_s and began < until_s
            ),
            default=0.0,
        )


Harm = Callable[[Trial, random.Random], None]


def _kill(what: str) -> Harm:
    """Kill one process of those titles."""

    def do(trial: Trial, chance: random.Random) -> None:
        found = sorted(trial.fleet.processes(_TITLES[what]), key=lambda one: one.pid)
        if found:
            with suppress(psutil.NoSuchProcess):
                chance.choice(found).kill()

    return do


def _node(chance: random.Random, trial: Trial) -> Any:
    """A node, rather one that has a replica."""
    nodes = trial.fleet.nodes()
    busy = [one for one in nodes if trial.fleet.processes(_TITLES["replica"], [one])]
    return chance.choice(busy if busy and chance.random() < 0.8 else nodes)


def _lose_node(trial: Trial, node: Any) -> None:
    """Kill all processes of a node."""
    below = processes_of(node)
    trial.fleet.cluster.remove_node(node, allow_graceful=False)
    for one in below:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _kill_node(trial: Trial, chance: random.Random) -> None:
    _lose_node(trial, _node(chance, trial))
    trial.fleet.add_node()


def _stop_node(trial: Trial, chance: random.Random) -> None:
    """Nothing of it answers, and no connection ends: as where its network is lost."""
    node = _node(chance, trial)
    for one in processes_of(node):
        with suppress(psutil.NoSuchProcess):
            one.suspend()
    trial.fleet.add_node()
    time.sleep(_STOPPED_S)
    _lose_node(trial, node)


def _drain_node(trial: Trial, chance: random.Random) -> None:
    """As a preemption does it: told before, gone at the deadline."""
    import ray
    from ray.core.generated import autoscaler_pb2

    node, left_s = _node(chance, trial), chance.uniform(10.0, 40.0)
    trial.fleet.add_node()
    gcs = ray._raylet.GcsClient(address=trial.fleet.cluster.address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + left_s) * 1000)
    gcs.drain_node(node.node_id, reason, "preempted", deadline_ms)
    time.sleep(left_s)
    _lose_node(trial, node)


@dataclass(frozen=True)
class Kind:
    """`breaks`: whether connections of clients may break off."""

    do: Harm
    breaks: bool = False


KINDS = {
    "service killed": Kind(_kill("service")),
    "driver killed": Kind(_kill("driver")),
    "replica killed": Kind(_kill("replica")),
    "node killed": Kind(_kill_node, True),
    "node stopped": Kind(_stop_node, True),
    "node drained": Kind(_drain_node, True),
    "door killed": Kind(_kill("door"), True),
    "proxy killed": Kind(_kill("proxy"), True),
    "controller killed": Kind(_kill("controller")),
    "deployed anew": Kind(lambda trial, _: trial.deploy()),
}


def faults(trial: Trial, names: list[str], seed: int, ends_s: float) -> None:
    """Do the fleet harm until that time. Errors: HotcoldError."""
    number, num_nodes, started_s = 0, len(trial.fleet.nodes()), time.monotonic()
    while time.monotonic() < ends_s and len(trial.wrong) < _MOST_WRONG:
        chance = random.Random(f"{seed} {number}")
        name, waits = chance.choice(names), chance.random() < 0.75
        time.sleep(chance.uniform(0.2, 4.0))
        began_s = time.monotonic()
        with trial._lock:
            trial.faults.append((name, began_s, 0.0))
        try:
            KINDS[name].do(trial, chance)
        except Exception as error:  # Serve's or Ray's own, beside another fault
            progress(f"{name}: {error!r}")
        while len(trial.fleet.nodes()) < num_nodes:
            trial.fleet.add_node()
        took_s = trial.await_whole(began_s) if waits else 0.0
        trial.faults[-1] = name, began_s, took_s
        number += 1
        progress(f"{number}, {name}: whole after {took_s:.1f} s; {dict(trial.counts)}")
        if number % 25 == 0:
            progress(report_of(trial, started_s, time.monotonic() - started_s, "so far")[1])
    trial.await_whole(time.monotonic())


@program
@click.option("--minutes", default=3.0)
@click.option("--clients", default=4)
@click.option("--replicas", default=2)
@click.option("--nodes", default=3, help="Ray nodes of a CPU, besides the head.")
@click.option("--doors", default=2)
@click.option("--requests", default=200, help="Of the pool.")
@click.option("--seed", default=0)
@click.option("--only", type=click.Choice(list(KINDS)), multiple=True, help="Only these kinds.")
def main(
    minutes: float, clients: int, replicas: int, nodes: int, doors: int, requests: int, seed: int,
    only: tuple[str, ...],
) -> tuple[Json, str]:  # fmt: skip
    """Do a fleet harm while clients ask, and compare what it answers."""
    from hotcold.ui.fleet.arguments import FleetArgs

    asked = pool(requests, seed)
    with one_system() as url, httpx.Client(base_url=url) as client:
        alone = [ask(client, request, streamed=False) for request in asked]
    progress(f"{sum(one.counts[1] for one in alone if one.counts)} tokens are known")
    args = FleetArgs(
        replicas=replicas, doors=doors, options={**SYSTEM, "parallel": 4}, queue=10 * clients,
        drain=_DRAIN_S, log="none",
    )  # fmt: skip
    with fleet(nodes) as cluster:
        trial = Trial(cluster, args, asked, alone)
        trial.deploy()
        trial.await_whole(time.monotonic())
        trial.start(clients, seed)
        time.sleep(5.0)
        began_s = time.monotonic()
        try:
            faults(trial, list(only or KINDS), seed, began_s + 60 * minutes)
        except HotcoldError as error:
            trial.wrong.append(str(error))
        trial.stop()
        took_s = time.monotonic() - began_s
        trial.wrong += leaks()
    return report_of(
        trial,
        began_s,
        took_s,
        f"{clients} clients, {replicas} replicas on {nodes} "
        f"nodes, {doors} doors, {took_s / 60:.0f} minutes, seed {seed}",
    )


def leaks() -> list[str]:
    """What replicas still hold, once nobody asks."""
    from ray import serve

    problem = ""
    for _ in range(100):
        try:
            handle = serve.get_deployment_handle("demo", "hotcold")
            loads = [load for load, _ in handle.broadcast("status").results(timeout_s=30)]
            held = [(one.num_running, one.num_waiting, one.kv_cache_usage) for one in loads]
            if not any(any(one) for one in held):
                return []
            problem = f"in the end replicas hold (running, waiting, pages): {held}"
        except Exception as error:
            problem = f"in the end: {error}"
        time.sleep(0.2)
    return [problem]


def report_of(trial: Trial, began_s: float, took_s: float, what: str) -> tuple[Json, str]:
    """The report, and its text."""
    ends = [at for _, at, _ in trial.faults[1:]] + [began_s + took_s]
    found: dict[str, list[tuple[float, float, int]]] = {}
    for (name, at_s, whole_s), end_s in zip(trial.faults, ends, strict=True):
        again = sum(at_s <= when < end_s for when, _ in trial.broken)
        found.setdefault(name, []).append((trial.pause_of(at_s, end_s), whole_s, again))
    wrong = list(trial.wrong)
    for when, error in trial.broken:
        near = [name for name, at, whole in trial.faults if at < when < at + max(whole, _NEAR_S)]
        if not any(KINDS[name].breaks for name in near):
            wrong.append(f"broken off, with no cause but {near}: {error}")
    rows = []
    for name in (name for name in KINDS if name in found):
        pauses, wholes, agains = zip(*found[name], strict=True)
        waited = [one for one in wholes if one] or [0.0]
        rows.append([
            name, len(pauses), sum(agains), f"{median(pauses):.2f}", f"{max(pauses):.2f}",
            f"{median(waited):.1f}",
        ])  # fmt: skip
    report: Json = head(locate_model(None), int(SYSTEM["threads"]))
    report |= {"counts": dict(trial.counts), "faults": found, "wrong": wrong}
    columns = ("fault", "faults", "asked again", "pause, median s", "worst s", "whole again, s")
    text = heading(report, what) + table(columns, rows)
    text += (
        f"\n{len(trial.faults)} faults; {trial.counts['answers']} answers as of one system alone, "
        f"{trial.counts['lost']} lost or different; {len(trial.broken)} asked again.\n"
    )
    return report, text + "".join(f"- {one}\n" for one in wrong)


if __name__ == "__main__":
    main()
