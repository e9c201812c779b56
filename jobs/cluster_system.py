"""A job's system: a running one of that name, or a new one; a private one without a name."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from hotcold.actors.launch import prepare_in_cluster
from hotcold.actors.processes.cluster import connect, in_cluster
from hotcold.actors.protocol.messages import AUTO_MODE, LoadProgress, SystemConfig
from hotcold.actors.protocol.options import OPTIONS
from hotcold.actors.setup.preflight import SystemOptions, read_model
from hotcold.actors.system import System
from hotcold.jobs.running.own import OwnSystem
from hotcold.model.config.weight_formats import CAST_NAMES
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import locate_model, resolved_model

_LINE_EVERY_S = 5.0
# Not compared with those of a running system: files and limits of memory count at its start, and
# without a --dtype it has what the model has.
_NOT_COMPARED = frozenset(
    ("predictors", "thresholds", "plan", "weight_dtype", "gpu_memory_bytes", "cpu_memory_bytes")
)


def job_system(model: str | None, given: SystemOptions, name: str | None, keep: bool) -> OwnSystem:
    """Attach to the system `name`, or start one of `model` with the options `given`.

    A running system is taken as it is where `model` is None. With `keep` a new one outlives this
    job. In a cluster it is the cluster's, else in a Ray of its own.
    Errors:  HotcoldError; UsageError where the running system is another than asked for
    """
    if keep and not name:
        raise UsageError("--keep needs a name by which later jobs find it; give --system NAME")
    if in_cluster():
        connect()
    elif keep:
        raise UsageError("--keep needs a Ray cluster that stays; use `ray job submit`")
    with ExitStack() as stack:
        found = System.attach(name, on_progress=progress_lines()) if name and in_cluster() else None
        if found is None:
            config = prepare_in_cluster(locate_model(model), given, click.echo)
            found = System.start(config, on_progress=progress_lines(), name=name, detached=keep)
        stack.enter_context(found)
        running: SystemConfig = found.call("describe")
        _require_same(running, model, given, name)
        return OwnSystem(found, running, stack.pop_all())


def _require_same(
    running: SystemConfig, model: str | None, given: SystemOptions, name: str | None
) -> None:
    """Errors: UsageError."""
    if difference := _difference(running, model, given):
        raise UsageError(
            f"the running system {name!r} {difference}; leave that option out, or end the system "
            f"with `python -m hotcold.jobs.stop --system {name}`"
        )


def _difference(running: SystemConfig, model: str | None, given: SystemOptions) -> str:
    """How the running system differs from what was asked for; memory limits count at its start."""
    if model is not None and str(resolved_model(locate_model(model))) != running.model_path:
        return f"has the model {running.model_path}"
    for name, option in OPTIONS.items():
        if name in _NOT_COMPARED:
            continue
        asked, value = getattr(given, name), getattr(running, name)
        if (name, asked) == ("mode", AUTO_MODE) and running.auto_mode:
            continue
        if asked not in (option.default, value):
            return f"has {option.flag} {value}, not {asked}"
    return _dtype_difference(running, given.weight_dtype)


def _dtype_difference(running: SystemConfig, asked: str | None) -> str:
    """As `_difference`; a model that is stored quantized has that --dtype without being told."""
    if asked in (None, running.weight_dtype):
        return ""
    if running.weight_dtype:
        return f"has --dtype {running.weight_dtype}, not {asked}"
    stored = read_model(Path(running.model_path)).dtype
    is_same = CAST_NAMES.get(asked or "", asked) == stored
    return "" if is_same else f"has the weights as stored ({stored}), not --dtype {asked}"


def progress_lines() -> Callable[[LoadProgress], None]:
    """A reporter of loading for logs: a line for each stage, and one every few seconds."""
    text, printed = "", 0.0
    told: set[str] = set()

    def show(progress: LoadProgress) -> None:
        nonlocal text, printed
        for note in set(progress.notes) - told:
            click.echo(note)
        told.update(progress.notes)
        done, total = progress.loaded_bytes / 1e6, progress.total_bytes / 1e6
        is_loading = 0 < done < total
        new = progress.stage + (f": {done:,.0f} of {total:,.0f} MB" if is_loading else "")
        same_stage = new.split(":")[0] == text.split(":")[0]
        if new != text and not (same_stage and time.monotonic() - printed < _LINE_EVERY_S):
            click.echo(new)
            text, printed = new, time.monotonic()

    return show
