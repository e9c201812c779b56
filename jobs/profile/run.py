"""The run of `hotcold profile`: windows through a system, the state saved as they go."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.system import System
from hotcold.jobs.profile.state import Counts, ProfileState
from hotcold.jobs.support.console import steps_bar
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
    task, began_s, size = state.task, time.monotonic(), len(ids)
    before, num_before, num_counted = state.found, state.num_done, task.num_counted
    saved_s = began_s
    parts = windows(size, task.window_ids) + [
        (size + first, size + last)
        for first, last in windows(num_counted - size, max(1, task.answers.window_ids))
    ]
    bar = steps_bar("profiling", num_counted, num_before)
    with bar as show, _interrupts_noted() as interrupted:
        for first, last in parts:
            if last <= state.num_done:
                continue
            if first < size:
                recorded = task.recorded(first, last)
                state.add_inputs(first, running.call("profile_window", ids[first:last], recorded))
            else:
                number = (first - size) // task.answers.window_ids
                task.answers.profile(running, ids, number, bos_id)
            speed = (last - num_before) / (time.monotonic() - began_s)
            show(last, description=f"profiling, {speed:.0f} tokens/s")
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
