"""`hotcold bench`: measure one part, beside what the hardware allows."""

import click

from hotcold.jobs.support.lazy_group import LazyCommand, LazyGroup

_COMMANDS = {
    "exchange": LazyCommand(
        "hotcold.jobs.bench.exchange:exchange", "A round trip to the CPU services."
    ),
    "kernels": LazyCommand(
        "hotcold.jobs.bench.kernels:kernels", "Kernels beside a plain read of memory."
    ),
    "decode": LazyCommand(
        "hotcold.jobs.bench.decode:decode", "Tokens a second, and where the time goes."
    ),
    "prefill": LazyCommand("hotcold.jobs.bench.decode:prefill", "Prompt tokens a second."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def bench() -> None:
    """Measure one part, beside what the hardware allows. Run it while nothing else runs."""
