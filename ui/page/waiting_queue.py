"""Gradio's queue of events, which waits for them; by itself it looks for some all the time."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from gradio.queueing import Queue


def wait_for_events(queue: Queue) -> None:
    """Let `queue`, which has not started, take no processor while there are no events.

    By itself it looks for events every millisecond, for their progress every ten. An event is taken
    as soon as it comes, not at the next look.
    """
    process, report, push = queue.start_processing, queue.start_progress_updates, queue.push
    came = asyncio.Event()

    async def start_processing() -> None:
        await _steps(process(), lambda: bool(len(queue)), came)

    async def start_progress_updates() -> None:
        await _steps(report(), lambda: bool(len(queue)) or any(queue.active_jobs), came)

    async def push_and_tell(*args: Any, **kwargs: Any) -> Any:
        pushed = await push(*args, **kwargs)
        came.set()
        return pushed

    queue.start_processing, queue.push = start_processing, push_and_tell
    queue.start_progress_updates = start_progress_updates


@types.coroutine
def _steps(
    work: Coroutine[Any, Any, None], has_work: Callable[[], bool], came: asyncio.Event
) -> Generator[Any, Any, None]:
    """Run `work`, which waits again and again, and go on only while `has_work`.

    `came` is set whenever there may be some.
    """
    try:
        while True:
            yield work.send(None)
            while not has_work():
                came.clear()
                yield from came.wait().__await__()
    except StopIteration:  # the work has ended
        return
    finally:
        work.close()
