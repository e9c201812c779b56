"""`hotcold bench`: measure one part, beside what the hardware allows."""

import click

from jobs.support.lazy_group import LazyCommand, LazyGroup

_COMMANDS = {
    "exchange": LazyCommand("jobs.bench.exchange:exchange", "A round trip to the CPU services."),
    "kernels": LazyCommand("jobs.bench.kernels:kernels", "Kernels beside a plain read of memory."),
    "decode": LazyCommand("jobs.bench.decode:decode", "Tokens a second, and where the time goes."),
    "prefill": LazyCommand("jobs.bench.decode:prefill", "Prompt tokens a second."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def bench() -> None:
    """Measure one part, beside what the hardware allows. Run it while nothing else runs."""
