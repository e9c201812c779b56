"""What commands' output has in common: progress on standard error, JSON as the last line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from actors.protocol.messages import Generation

json_option = click.option(
    "--json", "as_json", is_flag=True, help="End standard output with one line: a JSON object."
)


def print_json(content: dict[str, Any]) -> None:
    """Print `content` as one line of JSON, the last of standard output."""
    click.echo(json.dumps(content, allow_nan=False))


def cut_short(result: Generation, context_length: int, longer: str, anew: str) -> str:
    """What cut an answer short, and what helps; "" where nothing did.

    `longer` helps where it has the most tokens that it may have, `anew` where the context is full.
    """
    if result.finish_reason != "length":
        return ""
    if result.num_prompt_tokens + len(result.ids) >= context_length:
        return f"the answer was cut: the context of {context_length:,} tokens is full; {anew}"
    count = len(result.ids)
    return f"the answer was cut at {count:,} token{'' if count == 1 else 's'}; {longer}"


def stderr_console() -> Console:
    """Return a rich console on standard error, for progress and remarks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def transient_progress(*columns: ProgressColumn | str) -> Progress:
    """Return a rich progress on standard error that leaves no trace; rich's columns without any.

    It shows nothing in a file or a pipe, where it would leave an empty line.
    """
    from rich.progress import Progress

    console = stderr_console()
    return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; gives the function to call with bytes written and in all."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with transient_progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(description, total=None)
        yield lambda written, total: progress.update(task, completed=written, total=total)
