"""Tokens a second of a system on two hosts, against the latency of the link between them.

    python -m benchmarks.two_hosts [MODEL] [--tokens 64] [--json FILE]

As root on Linux. Two Ray nodes in network namespaces share this machine's cores and memory, with a
CPU service on each, and a link of 1 Gbit/s and the given round trips. What a second host adds in
bandwidth is not to be seen here, only what the way there costs: `docs/cluster.md` puts the two
together. Lines of "calls" ask every service by an actor call of its own, with neither relay nor
arena. Every system must give the same tokens.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

import click

from actors.messages import SystemConfig
from benchmarks.hosts_client import Client
from benchmarks.shaped_link import is_permitted
from benchmarks.two_nodes import TwoNodes, two_nodes
from model.config import ModelConfig
from model.locate import locate_model

_ROUND_TRIPS_MS = (0.0, 0.1, 0.5, 1.0, 5.0)
_PROMPT_TOKENS = 16


@click.command()
@click.argument("model", required=False)
@click.option("--tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "report", type=click.Path(dir_okay=False, path_type=Path))
def main(model: str | None, tokens: int, repeat: int, report: Path | None) -> None:
    """Print the table; write it with --json FILE too."""
    if reason := is_permitted():
        raise click.ClickException(reason)
    path = locate_model(model)
    with two_nodes(num_cpus=2) as cluster:
        client = cluster.client()
        try:
            client.tell(nodes=2)
            rows = _measure(cluster, client, path, tokens, repeat)
        finally:
            client.end()
    _print(rows)
    if report is not None:
        report.write_text(json.dumps(rows, indent=1) + "\n")


def _measure(
    cluster: TwoNodes, client: Client, path: Path, tokens: int, repeat: int
) -> list[dict[str, Any]]:
    config = ModelConfig.from_directory(path)
    prompt = [(7 + 31 * i) % config.vocab_size for i in range(_PROMPT_TOKENS)]
    home, other = cluster.addresses
    rows: list[dict[str, Any]] = []
    for name, hosts, exchange, round_trips in (
        ("one host", [home], "arena", (0.0,)),
        ("two hosts, relay", [home, other], "arena", _ROUND_TRIPS_MS),
        ("two hosts, calls", [home, other], "calls", _ROUND_TRIPS_MS),
    ):
        cluster.link.delay_s = 0.0
        system = SystemConfig(
            str(path),
            num_cpu_actors=2,
            num_threads=2 // len(hosts),
            context_length=min(512, config.max_positions),
            exchange=exchange,
        )
        client.tell(system=vars(system) | {"hosts": hosts})
        for ms in round_trips:
            cluster.link.delay_s = ms / 2e3
            runs = [client.tell(prompt_ids=prompt, num_tokens=tokens) for _ in range(repeat + 1)]
            if rows and runs[0]["ids"] != rows[0]["ids"]:
                raise click.ClickException(f"{name}, {ms} ms: other tokens than on one host")
            rates = [run["decode_tokens_per_s"] for run in runs[1:]]
            rows.append(
                {
                    "system": name,
                    "round_trip_ms": ms,
                    "tokens_per_s": median(rates),
                    "ms_a_layer": 1e3 / median(rates) / config.num_layers,
                    "runs": rates,
                    "ids": runs[0]["ids"],
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
