"""What the door of a fleet costs, what a second replica gives, and what routing by beginnings does.

    python -m benchmarks.fleet_overhead --out benchmarks/results/fleet-overhead.md

First one system's own server and a fleet of one replica answer in turn: the time to the first
token of short new prompts, one stream, several streams at once. Then fleets of one and two replicas
answer several streams at once. Last, fleets with several routers answer requests that share
beginnings, more of them than one KV cache holds: the time to the first token, and the share of the
prompts' tokens that was in a KV cache.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import mean, median, quantiles
from typing import Any

import click
import httpx

from benchmarks.fleet_load import SYSTEM, Answer, Fleet, ask, fleet, one_system
from benchmarks.frame import Json, head, heading, program, progress, spread, table
from hotcold.actors.setup.ray_parts import replaced
from hotcold.model.files.locate import locate_model

_FIRSTS = 20  # short prompts a round
_BEGINNINGS = 12
_PAGES = {"kv-tokens": 2048}  # of each replica, for conversations
_QUESTION = "Say in short what number {} of these does, and why it is there."


class Client:
    """Asks one server for completions."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, limits=httpx.Limits(max_connections=64))
        self._number = random.randrange(1 << 20)

    def answer(self, prompt: str, num_tokens: int) -> tuple[float, float, Answer]:
        """Seconds to the first token, tokens a second after it, and the answer."""
        body: Json = {"path": "/v1/completions", "prompt": prompt, "max_tokens": num_tokens}
        began_s = time.monotonic()
        found = ask(self._http, body | {"ignore_eos": True, "temperature": 0.0}, streamed=True)
        first_s, last_s = found.at_s[0], found.at_s[-1]
        return first_s - began_s, (num_tokens - 1) / max(last_s - first_s, 1e-9), found

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
        return count * num_tokens / (time.monotonic() - began_s), mean(one for one, *_ in found)

    def reading(self) -> tuple[float, int]:
        """Seconds for a token of a long prompt more than a short one takes; its tokens."""
        short_s = median(self.answer(self.new_prompt(), 2)[0] for _ in range(_FIRSTS))
        chance = random.Random(self._number)
        found = [self.answer(beginning(chance) + _QUESTION, 2) for _ in range(_FIRSTS)]
        num_tokens = round(mean(answer.counts[0] for _, _, answer in found if answer.counts))
        return (median(one for one, *_ in found) - short_s) / num_tokens, num_tokens

    def round(self, count: int, num_tokens: int) -> tuple[float, float, float]:
        """Milliseconds to a first token; tokens a second of one stream, and of several."""
        firsts = [self.answer(self.new_prompt(), 2)[0] for _ in range(_FIRSTS)]
        one = self.answer(self.new_prompt(), num_tokens)[1]
        return 1000 * median(firsts), one, self.together(count, num_tokens)[0]


@contextmanager
def deployed(
    cluster: Fleet,
    model: str | None,
    replicas: int,
    router: Any = None,
    **options: Any,
) -> Iterator[Client]:
    """A client of a fleet."""
    from ray import serve

    from hotcold.ui.fleet import application as file

    args = file.FleetArgs(
        models=[model] if model else [], replicas=replicas, log="none", queue=1000, drain=1.0,
        options={**SYSTEM, **options},
    )  # fmt: skip
    with replaced(file, "PrefixRouter", router or file.PrefixRouter):
        serve.run(file.application(args), name=file.NAME)
    cluster.free(f"ServeReplica:{file.NAME}:door")
    yield Client(cluster.url)
    serve.delete(file.NAME)


def beginning(chance: random.Random) -> str:
    """A long text."""
    return " ".join(chance.choices(["alpha", "beta", "list", "of", "names"], k=190))


def conversations(
    client: Client, count: int, seed: int, num_clients: int
) -> tuple[float, float, float]:
    """Milliseconds to the first token: median and 95th percentile; the share of tokens cached."""
    chance = random.Random(seed)
    starts = [beginning(chance) for _ in range(_BEGINNINGS)]
    asked = [chance.choice(starts) + _QUESTION.format(n) for n in range(count)]
    with ThreadPoolExecutor(num_clients) as pool:
        found = list(pool.map(lambda prompt: client.answer(prompt, 16), asked))
    firsts = [1000 * first for first, _, _ in found]
    prompts = sum(answer.counts[0] for _, _, answer in found if answer.counts)
    cached = sum(answer.num_cached for _, _, answer in found)
    return median(firsts), quantiles(firsts, n=20)[-1], cached / prompts


@program
@click.argument("model", required=False)
@click.option("--rounds", default=5)
@click.option("--tokens", default=300, help="Of a stream.")
@click.option("--parallel", default=4, help="Streams at once that a system takes.")
@click.option("--conversations", "num_asked", default=200, help="Requests to each router.")
@click.option("--dtype", help="Of the systems.")
@click.option("--apart", is_flag=True, help="Each replica has a core of its own.")
def main(
    model: str | None, rounds: int, tokens: int, parallel: int, num_asked: int, dtype: str | None,
    apart: bool,
) -> tuple[Json, str]:  # fmt: skip
    """Measure what a fleet adds to one system of MODEL, the embedded one without it."""
    from benchmarks.fleet_routers import ROUTERS

    report: Json = head(locate_model(model), int(SYSTEM["threads"])) | {"rows": []}
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
            report["token_s"], report["prompt_tokens"] = door.reading()
        several = {}
        for replicas in (1, 2):
            with deployed(cluster, model, replicas, **options) as door:
                door.together(2 * parallel, 8)
                several[replicas] = [door.together(2 * parallel, tokens) for _ in range(rounds)]
                progress(f"{replicas} replicas: {several[replicas]}")
        routed = {}
        for name, router in ROUTERS.items() if num_asked else ():
            with deployed(cluster, model, 2, router, **options, **_PAGES) as door:
                conversations(door, _BEGINNINGS * 4, 0, 2 * parallel)
                routed[name] = conversations(door, num_asked, 1, 2 * parallel)
                progress(f"{name}: {routed[name]}")
    report |= {"parallel": parallel, "tokens": tokens, "beginnings": _BEGINNINGS}
    report |= {"in turn": rows, "replicas": several, "routers": routed}
    text = heading(report, f"{rounds} rounds in turn, {tokens} tokens a stream") + table(
        ("", "first token, ms", "one stream, tokens/s", f"{parallel} streams, tokens/s"),
        [[name, *map(spread, zip(*of, strict=True))] for name, of in rows.items()],
    )
    text += "\n" + table(
        ("replicas", f"{2 * parallel} streams, tokens/s", "first token, mean s"),
        [[replicas, *map(spread, zip(*of, strict=True))] for replicas, of in several.items()],
    )
    asked = f"{num_asked} requests of {_BEGINNINGS} beginnings, {2 * parallel} at once"
    text += f"\n{asked}, to 2 replicas:\n\n"
    return report, text + table(
        ("router", "first token, median ms", "95th percentile", "tokens cached"),
        [
            [name, f"{one:.0f}", f"{most:.0f}", f"{hits:.0%}"]
            for name, (one, most, hits) in routed.items()
        ],
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
