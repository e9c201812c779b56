"""`hotcold bench`: measure one part, beside what the hardware allows."""

import click

from hotcold.jobs.support.lazy_group import LazyGroup

_COMMANDS = {
    "exchange": (".exchange", "A round trip to the CPU services."),
    "kernels": (".kernels", "Kernels beside a plain read of memory."),
    "decode": (".decode", "Tokens a second, and where the time goes."),
    "prefill": (".decode:prefill", "Prompt tokens a second."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS, package="hotcold.jobs.bench")
def bench() -> None:
    """Measure one part, beside what the hardware allows. Run it while nothing else runs."""
