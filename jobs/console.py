"""What commands' output has in common: progress on standard error, JSON as the last line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option(
    "--json", "as_json", is_flag=True, help="End standard output with one line: a JSON object."
)


def print_json(content: dict[str, Any]) -> None:
    """Print `content` as one line of JSON, the last of standard output."""
    click.echo(json.dumps(content, allow_nan=False))


def stderr_console() -> Console:
    """Return a rich console on standard error, for progress and remarks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)
