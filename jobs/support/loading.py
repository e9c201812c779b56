"""Starting a system with a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.protocol.messages import LoadProgress, SystemConfig
from actors.system import System
from jobs.support.loading_bar import loading_bar
from jobs.support.stored_model import require_bundles


@contextmanager
def running_system(
    system: SystemConfig, on_progress: Callable[[LoadProgress], None] = lambda progress: None
) -> Iterator[System]:
    """A started system, stopped at the end; loading is shown on standard error.

    `on_progress` is told of it as well.
    Errors:  HotcoldError
    """
    require_bundles(system)
    with loading_bar() as bar:

        def show(progress: LoadProgress) -> None:
            on_progress(progress)
            bar(progress)

        running = System.start(system, on_progress=show)
    with running:
        yield running
