"""`hotcold bench`: measure one part, beside what the hardware allows."""

import click

from hotcold.jobs.support.lazy_group import LazyGroup, lazy_commands

_COMMANDS = lazy_commands(
    "hotcold.jobs.bench",
    {
        "exchange": "A round trip to the CPU services.",
        "kernels": "Kernels beside a plain read of memory.",
        "decode": "Tokens a second, and where the time goes.",
        "prefill": "Prompt tokens a second.",
    },
    {"prefill": "decode:prefill"},
)


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def bench() -> None:
    """Measure one part, beside what the hardware allows. Run it while nothing else runs."""
