"""The run of `hotcold profile`: windows through a system, the state saved as they go."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import click

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.system import System
from hotcold.jobs.profile.state import Counts, ProfileState
from hotcold.jobs.support.console import transient_progress
from hotcold.jobs.support.loading import running_system
from hotcold.jobs.support.text_file import windows


def run_profile(
    system: SystemConfig, ids: list[int], bos_id: int | None, state: ProfileState, every_s: float
) -> float:
    """Profile the remaining tokens, saving every `every_s` seconds; returns tokens a second.

    `ids` are the text's; answers begin with `bos_id` where there is one, as windows do.
    Errors:  HotcoldError; KeyboardInterrupt at Ctrl-C, once the window is done and saved
    """
    first_done, num_counted = state.num_done, state.task.num_counted
    if first_done == num_counted:  # only the results were not written yet
        return 0.0
    with running_system(system) as running:
        started = time.monotonic()
        _count(running, ids, bos_id, state, every_s)
        return (num_counted - first_done) / (time.monotonic() - started)


def _count(
    running: System, ids: list[int], bos_id: int | None, state: ProfileState, every_s: float
) -> None:
    task, saved_s, size = state.task, time.monotonic(), len(ids)
    before, num_counted = state.found, task.num_counted
    parts = windows(size, task.window_ids) + [
        (size + first, size + last)
        for first, last in windows(num_counted - size, max(1, task.answers.window_ids))
    ]
    with _bar(num_counted, state.num_done) as show, _interrupts_noted() as interrupted:
        for first, last in parts:
            if last <= state.num_done:
                continue
            if first < size:
                recorded = task.recorded(first, last)
                state.add_inputs(first, running.call("profile_window", ids[first:last], recorded))
            else:
                number = (first - size) // task.answers.window_ids
                task.answers.profile(running, ids, number, bos_id)
            show(last)
            is_end = last == num_counted or interrupted
            if is_end or time.monotonic() - saved_s >= every_s:
                counted = ("fired_counts", "chosen_counts", "expert_distances")
                found = Counts(*(running.call(name) for name in counted))
                state.save(before.plus(found), last)
                saved_s = time.monotonic()
            if interrupted and last < num_counted:
                click.echo(
                    f"stopped at token {last} of {num_counted}; the same command goes on from "
                    "there",
                    err=True,
                )
                raise KeyboardInterrupt


@contextmanager
def _bar(num_tokens: int, num_done: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; gives the function to call with the tokens done."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("profiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    with transient_progress(*columns) as bar:
        task = bar.add_task("", total=num_tokens, completed=num_done, speed="")

        def show(done: int) -> None:
            tokens_per_s = (done - num_done) / (time.monotonic() - started)
            bar.update(task, completed=done, speed=f"{tokens_per_s:.0f} tokens/s")

        yield show


@contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """The first Ctrl-C is only noted, so that a window is finished; the second raises."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)
        click.echo("finishing this window (Ctrl-C again stops at once)", err=True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
