"""How far loading is, shown on standard error; imports nothing of what loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from hotcold.actors.protocol.messages import LOADING_WEIGHTS, WRITING_NEURONS, LoadProgress
from hotcold.jobs.support.console import transient_progress


class BytesColumn(DownloadColumn):
    """Bytes of weights, in stages that count them."""

    def render(self, task: Task) -> Text:
        """See rich."""
        return super().render(task) if task.fields["counts_bytes"] else Text()


@contextmanager
def loading_bar() -> Iterator[Callable[[LoadProgress], None]]:
    """A bar; gives the function to call with how far loading is. Its notes stay, a line each."""
    columns = (TextColumn("{task.description}"), BarColumn(), BytesColumn(), TimeElapsedColumn())
    with transient_progress(*columns) as bar:
        task = bar.add_task("starting Ray", total=None, counts_bytes=False)
        told: set[str] = set()

        def show(progress: LoadProgress) -> None:
            for note in progress.notes:
                if note not in told:
                    bar.console.print(note, markup=False, highlight=False, soft_wrap=True)
            told.update(progress.notes)
            bar.update(
                task,
                description=progress.stage,
                completed=min(progress.loaded_bytes, progress.total_bytes),
                total=progress.total_bytes,
                counts_bytes=progress.stage in (LOADING_WEIGHTS, WRITING_NEURONS),
            )

        yield show
