"""What the door of a fleet costs, and what a second replica gives.

    python -m benchmarks.fleet_overhead --out benchmarks/results/fleet-overhead.md

First one system's own server and a fleet of one replica answer in turn: the time to the first
token of short new prompts, one stream, several streams at once. Then fleets of one and two replicas
answer several streams at once.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import mean, median
from typing import Any

import click
import httpx

from benchmarks.fleet_load import SYSTEM, Fleet, ask, fleet, one_system
from benchmarks.frame import Json, head, heading, program, progress, spread, table
from hotcold.model.files.locate import locate_model

_FIRSTS = 20  # short prompts a round


class Client:
    """Asks one server for completions."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, limits=httpx.Limits(max_connections=64))
        self._number = random.randrange(1 << 20)

    def answer(self, prompt: str, num_tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and tokens a second after it."""
        body: Json = {"path": "/v1/completions", "prompt": prompt, "max_tokens": num_tokens}
        began_s = time.monotonic()
        found = ask(self._http, body | {"ignore_eos": True, "temperature": 0.0}, streamed=True)
        first_s, last_s = found.at_s[0], found.at_s[-1]
        return first_s - began_s, (num_tokens - 1) / max(last_s - first_s, 1e-9)

    def new_prompt(self) -> str:
        """One that nobody has read."""
        self._number += 1
        return f"{self._number} names are in the list. The first"

    def together(self, count: int, num_tokens: int) -> tuple[float, float]:
        """Tokens a second of streams at once, and seconds to their first tokens, the mean."""
        began_s = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            prompts = [self.new_prompt() for _ in range(count)]
            found = list(pool.map(lambda prompt: self.answer(prompt, num_tokens), prompts))
        return count * num_tokens / (time.monotonic() - began_s), mean(one for one, _ in found)

    def round(self, count: int, num_tokens: int) -> tuple[float, float, float]:
        """Milliseconds to a first token; tokens a second of one stream, and of several."""
        firsts = [self.answer(self.new_prompt(), 2)[0] for _ in range(_FIRSTS)]
        one = self.answer(self.new_prompt(), num_tokens)[1]
        return 1000 * median(firsts), one, self.together(count, num_tokens)[0]


@contextmanager
def deployed(cluster: Fleet, model: str | None, replicas: int, **options: Any) -> Iterator[Client]:
    """A client of a fleet."""
    from ray import serve

    from hotcold.ui.fleet.application import NAME, FleetArgs, application

    args = FleetArgs(
        models=[model] if model else [], replicas=replicas, log="none", queue=1000, drain=1.0,
        options={**SYSTEM, **options},
    )  # fmt: skip
    serve.run(application(args), name=NAME)
    cluster.free(f"ServeReplica:{NAME}:door")
    yield Client(cluster.url)
    serve.delete(NAME)


@program
@click.argument("model", required=False)
@click.option("--rounds", default=5)
@click.option("--tokens", default=300, help="Of a stream.")
@click.option("--parallel", default=4, help="Streams at once that a system takes.")
@click.option("--dtype", help="Of the systems.")
@click.option("--apart", is_flag=True, help="Each replica has a core of its own.")
def main(
    model: str | None, rounds: int, tokens: int, parallel: int, dtype: str | None, apart: bool
) -> tuple[Json, str]:
    """Measure what a fleet adds to one system of MODEL, the embedded one without it."""
    report: Json = head(locate_model(model), int(SYSTEM["threads"]))
    named = [model] if model else []
    options: Json = {"parallel": parallel} | ({"dtype": dtype} if dtype else {})
    with fleet(2, int(SYSTEM["threads"]), apart) as cluster:
        with (
            one_system(*named, **options) as url,
            deployed(cluster, model, 1, **options) as door,
        ):
            rows = in_turn(
                {"one system's server": Client(url), "a fleet's door": door},
                rounds,
                parallel,
                tokens,
            )
        several = {}
        for replicas in (1, 2):
            with deployed(cluster, model, replicas, **options) as door:
                door.together(2 * parallel, 8)
                several[replicas] = [door.together(2 * parallel, tokens) for _ in range(rounds)]
                progress(f"{replicas} replicas: {several[replicas]}")
    report |= {"parallel": parallel, "tokens": tokens, "in turn": rows, "replicas": several}
    text = heading(report, f"{rounds} rounds in turn, {tokens} tokens a stream") + table(
        ("", "first token, ms", "one stream, tokens/s", f"{parallel} streams, tokens/s"),
        [[name, *map(spread, zip(*of, strict=True))] for name, of in rows.items()],
    )
    return report, text + "\n" + table(
        ("replicas", f"{2 * parallel} streams, tokens/s", "first token, mean s"),
        [[replicas, *map(spread, zip(*of, strict=True))] for replicas, of in several.items()],
    )


def in_turn(
    clients: dict[str, Client], rounds: int, parallel: int, tokens: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Of each client its rounds."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in clients}
    for client in clients.values():
        client.round(parallel, 16)
    for number in range(rounds):
        for name, client in clients.items():
            found[name].append(client.round(parallel, tokens))
        progress(f"round {number + 1} of {rounds}")
    return found


if __name__ == "__main__":
    main()
