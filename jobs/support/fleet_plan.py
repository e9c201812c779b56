"""`hotcold plan --fleet`: how many nodes a load needs, and what fails first, by simulation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.shards import num_kv_pages
from hotcold.model.errors import UsageError
from hotcold.ui.fleet.simulation import Fleet, Load, Outcome, Service, simulate

_SPAN_S, _FEWEST, _MOST = 600.0, 10_000, 100_000  # of simulated time; requests
_MORE = 1.1  # times the load, until a target is missed
# Where nothing is measured, as in benchmarks/results/smollm2.md and qwen3-8b-8-layers.md: n answers
# at once have n to this power times a lone one's tokens a second, and prompts so many times.
_AT_ONCE, _READ = 0.4, 4.0
_REMEDY = "give what `hotcold bench prefill` and `hotcold bench decode` print with --json"


@dataclass(frozen=True)
class Targets:
    """What 99 of 100 answers keep, in seconds, where none is refused."""

    ttft_s: float
    tpot_s: float

    def missed(self, found: Outcome) -> str:
        """The first that is missed; "" for none."""
        if found.refused:
            return "requests are refused"
        if np.percentile(found.first_s, 99) > self.ttft_s:
            return "first token"
        return "between tokens" if np.percentile(found.between_s, 99) > self.tpot_s else ""


def outcome(service: Service, num_nodes: int, load: Load) -> Outcome:
    """What clients see of so many nodes in some minutes."""
    number = min(_MOST, max(_FEWEST, round(load.rate * _SPAN_S)))
    return simulate(Fleet(service, num_nodes), load, number)


def fewest_nodes(service: Service, load: Load, targets: Targets) -> int:
    """How many nodes keep the targets. Errors: UsageError where lone requests miss them."""
    lone = outcome(service, 1, replace(load, rate=1e-6))
    if targets.missed(lone):
        first_s, between_s = (np.percentile(s, 99) for s in (lone.first_s, lone.between_s))
        raise UsageError(
            f"no number of nodes is enough: alone, one request in a hundred takes {first_s:.3g} s "
            f"to the first token or {between_s:.3g} s between two; give more --ttft or --tpot"
        )
    least = most = 1
    while targets.missed(outcome(service, most, load)):
        least, most = most + 1, 2 * most
    while least < most:
        middle = (least + most) // 2
        is_missed = targets.missed(outcome(service, middle, load))
        least, most = (middle + 1, most) if is_missed else (least, middle)
    return most


def measured_service(path: Path, system: SystemConfig) -> Service:
    """By what `hotcold bench prefill --json` and `decode --json` wrote. Errors: UsageError."""
    token_s, rates = 0.0, dict[int, float]()
    try:
        for line in path.read_text().splitlines():
            found = json.loads(line) if line.startswith("{") else {}
            if "batch" in found:
                rates[int(found["batch"])] = float(found["tokens_per_s"])
            elif found:
                token_s = 1 / float(found["tokens_per_s"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as problem:
        raise UsageError(f"{path}: cannot be read ({problem}); {_REMEDY}") from None
    if token_s <= 0 or min(rates.values(), default=0) <= 0 or 1 not in rates:
        raise UsageError(f"{path}: lacks figures of prompts or of one answer alone; {_REMEDY}")
    return Service(token_s, rates, system.max_batch, num_kv_pages(system))


def planned_service(report: dict[str, Any], system: SystemConfig) -> Service:
    """By the tokens a second of one request that the report of a plan expects."""
    speed = (report if "tokens_per_s" in report else report["storage"][0])["tokens_per_s"]
    print(
        f"assumed: prompts {_READ:g} times as fast, n answers n^{_AT_ONCE:g} times; or --measured"
    )
    rates = {n: speed * n**_AT_ONCE for n in range(1, system.max_batch + 1)}
    return Service(1 / (_READ * speed), rates, system.max_batch, num_kv_pages(system))


def plan_fleet(
    system: SystemConfig, report: dict[str, Any], *, requests_per_second: float,
    prompt_tokens: float, answer_tokens: float, shared_prefix: float, ttft: float, tpot: float,
    measured: Sequence[Path], node_cost: Sequence[float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Print how many nodes of each kind the load of the command's options needs; the figures.

    report: of the system's plan, where nothing is `measured`
    Errors:  UsageError
    """
    services = {path.stem: measured_service(path, system) for path in measured}
    services = services or {"as planned": planned_service(report, system)}
    if node_cost and len(node_cost) != len(services):
        raise UsageError(f"give --node-cost once for each kind of node, which are {len(services)}")
    load = Load(requests_per_second, prompt_tokens, answer_tokens, shared_prefix)
    targets, rows = Targets(ttft, tpot), []
    for number, (kind, service) in enumerate(services.items()):
        nodes = fewest_nodes(service, load, targets)
        found, more = outcome(service, nodes, load), replace(load, rate=load.rate * _MORE)
        while not (missed := targets.missed(outcome(service, nodes, more))):
            more = replace(more, rate=more.rate * _MORE)
        row: dict[str, Any] = {"kind": kind, "nodes": nodes}
        for name, seconds in (("first_token", found.first_s), ("between_tokens", found.between_s)):
            row |= {f"{name}_p{at}_s": float(np.percentile(seconds, at)) for at in (50, 99)}
        row |= {"utilization": found.busy, "cached_share_of_prompts": found.cached}
        row |= {"fails_first": missed, "fails_at_requests_per_second": more.rate}
        if node_cost:
            hourly = load.rate * answer_tokens * 3600
            row["cost_per_million_answered"] = node_cost[number] * nodes / hourly * 1e6
        rows.append(row)
    table = Table(box=None, show_header=False)
    for name in rows[0]:
        cells = (row[name] for row in rows)
        texts = (f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells)
        table.add_row(name.replace("_", " "), *texts)
    Console(highlight=False).print(table)
    return rows
