"""Starting a system with a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn

from actors.protocol.messages import LoadProgress, SystemConfig
from actors.system import System
from jobs.support.console import transient_progress


@contextmanager
def running_system(
    system: SystemConfig, on_progress: Callable[[LoadProgress], None] = lambda progress: None
) -> Iterator[System]:
    """A started system, stopped at the end; loading is shown on standard error.

    `on_progress` is told of it as well.
    Errors:  HotcoldError
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with transient_progress(*columns) as bar:
        task = bar.add_task("starting Ray", total=None)

        told: set[str] = set()

        def show(progress: LoadProgress) -> None:
            on_progress(progress)
            for note in set(progress.notes) - told:
                bar.console.print(note, markup=False, highlight=False)
            told.update(progress.notes)
            bar.update(
                task,
                description=progress.stage,
                completed=min(progress.loaded_bytes, progress.total_bytes),
                total=progress.total_bytes,
            )

        running = System.start(system, on_progress=show)
    with running:
        yield running
