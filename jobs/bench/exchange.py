"""`hotcold bench exchange`: empty requests to the CPU services of a running system."""

import time
from typing import Any

import click
import numpy as np

from hotcold.actors.setup.preflight import prepare_system
from hotcold.jobs.support.console import json_option
from hotcold.jobs.support.loading import running_system
from hotcold.jobs.support.options import split_system_options, system_options
from hotcold.model.files.locate import locate_model

_IDLE_S = 2.0


@click.command()
@click.argument("model", required=False)
@click.option("--rounds", type=click.IntRange(min=1), default=20000)
@system_options
@json_option
def exchange(model: str | None, rounds: int, **values: Any) -> dict[str, Any]:
    """Time a round trip from the driver to all CPU services, and what idle services use."""
    system, _ = prepare_system(locate_model(model), split_system_options(values))
    with running_system(system) as running:
        running.call("measure_exchange", rounds // 10)
        us = np.sort(running.call("measure_exchange", rounds)) / 1e3
        before = running.call("cpu_seconds")
        time.sleep(_IDLE_S)
        after = running.call("cpu_seconds")
    idle = {name: (after[name] - before[name]) / _IDLE_S for name in after}
    report = {
        "exchange": system.exchange,
        "num_cpu_actors": system.num_cpu_actors,
        "rounds": rounds,
        "us_median": float(np.median(us)),
        "us_p99": float(np.percentile(us, 99)),
        "us_min": float(us[0]),
        "idle_cpu_share": idle,
    }
    click.echo(
        f"{system.num_cpu_actors} CPU services, {system.exchange}: median "
        f"{report['us_median']:.1f} µs, p99 {report['us_p99']:.1f} µs over {rounds} round trips; "
        f"idle services use {max(idle.values()):.2%} of a core at most"
    )
    return report
