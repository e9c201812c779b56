"""Tokens a second of a system on two hosts, against the latency of the link between them.

    python -m tests.cluster.two_hosts [MODEL] [--tokens 64] [--json FILE] [--round-trip 0.5 ...]

As root on Linux. Two Ray nodes in network namespaces share this machine's cores and memory, with a
CPU service on each, and a link of 1 Gbit/s and the given round trips. What a second host adds in
bandwidth is not to be seen here, only what the way there costs: `docs/running.md` puts the two
together. Lines of "calls" ask every service by an actor call of its own, with neither relay nor
arena. Every system must give the same tokens.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.model.config.build import read_config
from hotcold.model.files.locate import locate_model
from tests.cluster.hosts_client import Client
from tests.cluster.shaped_link import is_permitted
from tests.cluster.two_nodes import TwoNodes, two_nodes

_ROUND_TRIPS_MS = (0.0, 0.1, 0.5, 1.0, 5.0)
_PROMPT_TOKENS = 16
_SYSTEMS = {  # hosts and exchange
    "one host": (1, "arena"),
    "two hosts, relay": (2, "arena"),
    "two hosts, calls": (2, "calls"),
}


@dataclass(frozen=True)
class Plan:
    """What is measured of one model."""

    path: Path
    prompt_ids: list[int]
    tokens: int
    repeat: int
    num_cpu_actors: int  # of all hosts together
    round_trips_ms: tuple[float, ...]


@click.command()
@click.argument("model", required=False)
@click.option("--tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--cpu-actors", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--round-trip", "round_trips_ms", type=float, multiple=True, help="Milliseconds.")
@click.option("--system", "systems", type=click.Choice([*_SYSTEMS]), multiple=True)
@click.option("--json", "report", type=click.Path(dir_okay=False, path_type=Path))
def main(
    model: str | None,
    tokens: int,
    repeat: int,
    cpu_actors: int,
    round_trips_ms: tuple[float, ...],
    systems: tuple[str, ...],
    report: Path | None,
) -> None:
    """Print the table; write it with --json FILE too."""
    if reason := is_permitted():
        raise click.ClickException(reason)
    path = locate_model(model)
    vocabulary = read_config(path).vocab_size
    ids = [(7 + 31 * i) % vocabulary for i in range(_PROMPT_TOKENS)]
    plan = Plan(path, ids, tokens, repeat, cpu_actors, round_trips_ms or _ROUND_TRIPS_MS)
    rows: list[dict[str, Any]] = []
    with two_nodes(num_cpus=cpu_actors) as cluster:
        client = cluster.client()
        try:
            client.tell(nodes=2)
            for name in systems or tuple(_SYSTEMS):
                rows += _measure(cluster, client, name, plan)
        finally:
            client.end()
    if any(row["ids"] != rows[0]["ids"] for row in rows):
        raise click.ClickException("the systems gave different tokens")
    _print(rows)
    if report is not None:
        report.write_text(json.dumps(rows, indent=1) + "\n")


def _measure(cluster: TwoNodes, client: Client, name: str, plan: Plan) -> list[dict[str, Any]]:
    """The rows of one system, which is called what it is and goes on."""
    num_hosts, exchange = _SYSTEMS[name]
    config = read_config(plan.path)
    system = SystemConfig(
        str(plan.path),
        num_cpu_actors=plan.num_cpu_actors,
        num_threads=plan.num_cpu_actors // num_hosts,
        context_length=min(512, config.max_positions),
        kv_dtype="float32" if config.dtype == "float32" else "float16",
        exchange=exchange,
    )
    cluster.link.delay_s = 0.0
    system = replace(system, hosts=tuple(cluster.addresses[:num_hosts]))
    processes = client.start(system, name)
    places = {service: cluster.link.end_of(pid) for service, pid in processes["processes"].items()}
    rows = []
    for ms in plan.round_trips_ms if num_hosts > 1 else (0.0,):
        cluster.link.delay_s = ms / 2e3
        runs = [
            client.tell(prompt_ids=plan.prompt_ids, num_tokens=plan.tokens)
            for _ in range(plan.repeat + 1)
        ]
        rates = [run["decode_tokens_per_s"] for run in runs[1:]]
        rows.append(
            {
                "system": name,
                "round_trip_ms": ms,
                "tokens_per_s": median(rates),
                "ms_a_layer": 1e3 / median(rates) / config.num_layers,
                "runs": rates,
                "ids": runs[-1]["ids"],
                "hosts": places,
            }
        )
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    click.echo(
        "| system | added round trip, ms | tokens/s | ms a layer |\n| --- | --- | --- | --- |"
    )
    for row in rows:
        click.echo(
            f"| {row['system']} | {row['round_trip_ms']:g} | {row['tokens_per_s']:.1f} | "
            f"{row['ms_a_layer']:.2f} |"
        )


if __name__ == "__main__":
    main()
