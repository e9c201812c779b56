"""What commands' output has in common: progress on standard error, JSON as the last line."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hotcold.model.errors import HotcoldError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from hotcold.actors.protocol.messages import Generation, LoadProgress

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PICTURES = 0x2400  # of control characters


@dataclass
class Invocation:
    """What one run of the command line was asked for, wherever on the line it stood.

    status: what it ends with where nothing is raised
    """

    debug: bool = False
    as_json: bool = False
    status: int = 0


def wants_json() -> bool:
    """Whether the running command was given --json."""
    return click.get_current_context().ensure_object(Invocation).as_json


def end_with(status: int) -> None:
    """Let the running command end with this exit status."""
    click.get_current_context().ensure_object(Invocation).status = status


def _note_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Invocation).as_json = value


# Of a command that returns what is printed so.
json_option = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=_note_json,
    help="End standard output with one line: a JSON object.",
)


class OutputError(HotcoldError):
    """Writing to standard output failed; no OSError, which click would handle itself."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(f"standard output: {problem.strerror}")
        self.is_unread = isinstance(problem, BrokenPipeError)  # the reader has closed the pipe


class _Output(io.FileIO):
    """Standard output, which raises OutputError, or standard error, whose errors are ignored."""

    def write(self, data: Any, /) -> int:
        """Write as io.RawIOBase. Errors: OutputError."""
        try:
            return super().write(data)
        except OSError as problem:
            if self.fileno() == 2:
                return memoryview(data).nbytes
            raise OutputError(problem) from None


def use_own_streams() -> None:
    """Let standard output raise OutputError, and standard error nothing.

    A closed standard stream gets a descriptor, so that no file opened later takes its number.
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    sys.stdout = _text(1, sys.stdout, "strict")
    sys.stderr = _text(2, sys.stderr, "backslashreplace")


def _text(number: int, usual: Any, errors: str) -> io.TextIOWrapper:
    """A text stream of a descriptor, as Python's `usual` one is; None: that was closed."""
    raw = _Output(number, "w", closefd=False)
    if usual is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), errors=errors)
    buffer: Any = raw if usual.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer, usual.encoding, usual.errors, line_buffering=usual.line_buffering,
        write_through=usual.write_through,
    )  # fmt: skip


def plain(text: str) -> str:
    """A text without what terminals would obey: control characters become pictures of them."""
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(_PICTURES + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


def tell(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Write what a model or a file says: as it is, but to a terminal as `plain` has it.

    Errors:  OutputError
    """
    stream = sys.stderr if err else sys.stdout
    stream.write((plain(text) if stream.isatty() else text) + "\n" * nl)
    stream.flush()


def what_it_took(result: Generation, neurons: str = "neurons", more: str = "") -> str:
    """An answer's tokens and speed, in a line; `neurons` are those of which some were computed."""
    return (
        f"[{len(result.ids)} tokens, {result.finish_reason}; prefill "
        f"{result.prefill_tokens_per_s:.1f} tokens/s, decode {result.decode_tokens_per_s:.1f} "
        f"tokens/s, {result.neurons_computed:.1%} of {neurons} computed{more}]"
    )


def cut_short(
    result: Generation, context_length: int, most_positions: int, longer: str, anew: str = ""
) -> str:
    """What cut an answer short, with a remedy; "" where nothing did.

    `longer`: the remedy where it reached its token limit; `anew`: where the context is full, beside
    a larger one, if the model allows `most_positions`.
    """
    if result.finish_reason != "length":
        return ""
    if result.num_prompt_tokens + len(result.ids) >= context_length:
        has_more = most_positions > context_length
        room = "a larger --context has more room" if has_more else "this model allows no larger one"
        full = f"the answer was cut: the context of {context_length:,} tokens is full"
        return "; ".join(filter(None, (full, anew, room)))
    count = len(result.ids)
    return f"the answer was cut at {count:,} token{'' if count == 1 else 's'}; {longer}"


def stderr_console() -> Console:
    """Return a rich console on standard error, for progress and remarks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def steps_bar(description: str, total: float, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error; gives the function to call with how much of `total` is done.

    It takes another `description`, too, where that changes.
    """
    with _transient_progress() as bar:
        task = bar.add_task(description, total=total, completed=done)
        yield lambda done, **changes: bar.update(task, completed=done, **changes)


def _transient_progress(*columns: ProgressColumn | str) -> Progress:
    """Return a rich progress on standard error that leaves no trace; rich's columns without any.

    It shows nothing in a file or a pipe, where it would leave an empty line.
    """
    from rich.progress import Progress

    console = stderr_console()
    return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)


@contextmanager
def status_line(text: str) -> Iterator[Callable[..., None]]:
    """Show on standard error what is being done; gives the function that says what comes next.

    A file or a pipe has a line of each that comes next, as that may take minutes; not with
    `is_brief`.
    """
    console = stderr_console()
    with console.status(text) as status:

        def tell(stage: str, is_brief: bool = False) -> None:
            status.update(stage)
            if not console.is_interactive and not is_brief:
                click.echo(stage, err=True)

        yield tell


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; gives the function to call with bytes written and in all."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with _transient_progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(description, total=None)
        yield lambda written, total: progress.update(task, completed=written, total=total)


def bytes_column() -> ProgressColumn:
    """A column of a task's bytes, empty where its field `counts_bytes` is false."""
    from rich.progress import DownloadColumn, Task
    from rich.text import Text

    class BytesColumn(DownloadColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.fields["counts_bytes"] else Text()

    return BytesColumn()


@contextmanager
def loading_bar() -> Iterator[Callable[[LoadProgress], None]]:
    """Show a bar on standard error; gives the function to call with a system's loading progress.

    Its notes stay, each on a line. A file or a pipe has them too, and a line once kernels are
    compiled, as that may take a minute.
    """
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from hotcold.actors.protocol.messages import COMPILING, LOADING_WEIGHTS, WRITING_NEURONS

    columns = (TextColumn("{task.description}"), BarColumn(), bytes_column(), TimeElapsedColumn())
    with _transient_progress(*columns) as bar:
        task = bar.add_task("starting Ray", total=None, counts_bytes=False)
        shown: set[str] = set()

        def show(progress: LoadProgress) -> None:
            for note in progress.notes:
                if note not in shown:
                    bar.console.print(note, markup=False, highlight=False, soft_wrap=True)
            shown.update(progress.notes)
            if progress.stage.startswith(COMPILING) and COMPILING not in shown:
                shown.add(COMPILING)
                if not bar.console.is_interactive:
                    click.echo(f"{COMPILING}, once: later starts have them", err=True)
            bar.update(
                task,
                description=progress.stage,
                completed=min(progress.loaded_bytes, progress.total_bytes),
                total=progress.total_bytes,
                counts_bytes=progress.stage in (LOADING_WEIGHTS, WRITING_NEURONS),
            )

        yield show
