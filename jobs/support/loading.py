"""Starting a system with a progress bar."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hotcold.actors.protocol.messages import LoadProgress, SystemConfig
from hotcold.actors.system import System
from hotcold.jobs.support.loading_bar import loading_bar
from hotcold.jobs.support.stored_model import require_bundles
from hotcold.numba_kernels.own_cache import tell_if_full


@contextmanager
def running_system(
    system: SystemConfig,
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
    others: Sequence[SystemConfig] = (),
) -> Iterator[System]:
    """A started system, stopped at the end; loading is shown on standard error.

    `on_progress` is told of it as well; `others` may be started beside it.
    Errors:  HotcoldError
    """
    require_bundles(system)
    with loading_bar() as bar:

        def show(progress: LoadProgress) -> None:
            on_progress(progress)
            bar(progress)

        running = System.start(system, on_progress=show, others=others)
    tell_if_full()
    with running:
        yield running
