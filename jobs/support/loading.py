"""Starting a system with a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from actors.protocol.messages import LOADING_WEIGHTS, LoadProgress, SystemConfig
from actors.system import System
from jobs.support.console import transient_progress
from jobs.support.stored_model import require_bundles


class _BytesColumn(DownloadColumn):
    """Bytes of weights, in the stage that counts them."""

    def render(self, task: Task) -> Text:
        """See rich."""
        return super().render(task) if task.fields["counts_bytes"] else Text()


@contextmanager
def running_system(
    system: SystemConfig, on_progress: Callable[[LoadProgress], None] = lambda progress: None
) -> Iterator[System]:
    """A started system, stopped at the end; loading is shown on standard error.

    `on_progress` is told of it as well.
    Errors:  HotcoldError
    """
    require_bundles(system)
    columns = (TextColumn("{task.description}"), BarColumn(), _BytesColumn(), TimeElapsedColumn())
    with transient_progress(*columns) as bar:
        task = bar.add_task("starting Ray", total=None, counts_bytes=False)

        told: set[str] = set()

        def show(progress: LoadProgress) -> None:
            on_progress(progress)
            for note in set(progress.notes) - told:
                bar.console.print(note, markup=False, highlight=False, soft_wrap=True)
            told.update(progress.notes)
            bar.update(
                task,
                description=progress.stage,
                completed=min(progress.loaded_bytes, progress.total_bytes),
                total=progress.total_bytes,
                counts_bytes=progress.stage == LOADING_WEIGHTS,
            )

        running = System.start(system, on_progress=show)
    with running:
        yield running
