"""The `hotcold` command: its table of commands, and how every failure is reported.

Exit status: 0 done; 1 something that the user can act on; 2 a wrong command line; 70 a defect of
the program; 130 interrupted; 141 the reader of standard output has closed it; 143 ended by SIGTERM.
Every failure but the last three is one line on standard error; `--debug`, anywhere on the line,
adds the traceback.
"""

from __future__ import annotations

import hotcold.jobs.foreign_folder

# isort: split
import atexit
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

import hotcold
from hotcold.jobs.support.console import (
    Invocation,
    OutputError,
    progress_bar,
    tell,
    use_own_streams,
)
from hotcold.jobs.support.lazy_group import LazyGroup, add_debug_option
from hotcold.jobs.support.settings import origin_of
from hotcold.jobs.support.signals import (
    end_at_sigterm,
    exit_status,
    interrupt_again,
    raise_interrupts,
)
from hotcold.model.errors import HotcoldError
from hotcold.model.files import weights_digest

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141

# Objects allocated between two garbage collections: most of those that imports make stay.
_GC_THRESHOLD = 50_000

COMMANDS = {
    "run": (".run", "Talk with a model, or answer a prompt."),
    "generate": (".generate", "Continue a prompt."),
    "chat": (".chat", "Talk with a model in the terminal."),
    "serve": (".serve", "The chat page and an OpenAI-compatible API."),
    "fleet": (".fleet", "The same API by many systems, on Ray Serve."),
    "batch": (".batch", "Answer a file of requests by a fleet."),
    "ps": (".ps", "List the systems that are running."),
    "top": (".top", "Watch a running system's neurons and services."),
    "stop": (".stop", "End a running system."),
    "pull": (".models:pull", "Fetch a model from Hugging Face."),
    "show": (".models:show", "Say what a model is and takes."),
    "list": (".models:list_models", "List the models that are here."),
    "rm": (".models:rm", "Remove a model that was fetched."),
    "scale": (".scale", "Give a running system more or fewer CPU services."),
    "plan": (".plan", "Decide which device holds which neurons."),
    "doctor": (".doctor", "Say what this machine has, what fits, what is wrong."),
    "compile": (".compile:compile_kernels", "Compile a model's kernels ahead of its first start."),
    "make-model": (".make_model", "Write a checkpoint of random weights of a given shape."),
    "quantize": (".rewrite:quantize", "Write a model again in 8 or 4 bits a weight."),
    "pack": (".rewrite:pack", "Write a model's neurons for reading them from storage."),
    "perplexity": (".perplexity", "Score a mode on a text, and compare it with dense."),
    "profile": (".profile", "Count on a text how often each neuron fires."),
    "train-predictors": (".train_predictors", "Fit what says which neurons will fire."),
    "config": (".config", "Say what settings hold, and from where."),
    "completion": (".completion", "Let the shell complete commands and options."),
    "bench": (".bench", "Measure one part, beside the hardware's limit."),
}


@click.group(
    cls=LazyGroup,
    lazy_commands=COMMANDS,
    package="hotcold.jobs.commands",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(hotcold.__version__)
def cli() -> None:
    """Large language models on one ordinary computer.

    Hot neurons on the GPU, cold ones on the CPU, computed only when they fire. MODEL is a Hugging
    Face directory, an org/repo id, a GGUF file, a known name such as qwen3:8b, ollama:NAME, or left
    out for the embedded model, whose name is demo.
    """


def main(
    arguments: Sequence[str] | None = None,
    command: click.Command = cli,
    program: str = "hotcold",
) -> int:
    """Run a command line and return the exit status. Raises nothing but SystemExit."""
    invocation = Invocation()
    weights_digest.progress = progress_bar
    try:
        found = command.main(
            args=None if arguments is None else list(arguments),
            prog_name=program,
            obj=invocation,
            standalone_mode=False,
        )
        if invocation.as_json and isinstance(found, dict):
            click.echo(json.dumps(found, allow_nan=False))
        return found if isinstance(found, int) else invocation.status
    except (Exception, KeyboardInterrupt) as error:
        if invocation.debug and not isinstance(error, click.Abort):
            traceback.print_exc()
        text, status = _report(error)
        if text:
            _print_error(text)
        return status


def ensure_home() -> None:
    """Set HOME to / for this process and its children where it is missing or relative.

    As docker does for an unknown user. Otherwise each library would fail in its own way, or use a
    folder "~" in the current one.
    """
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = "/"


def run(command: click.Command = cli, program: str = "hotcold") -> NoReturn:
    """Run this process's command line and end the process with its exit status.

    `atexit` functions run and output is flushed, with signals ignored. Then the process ends at
    once: C's `exit` would destroy what threads still use. After an interrupted start of Ray, its
    `CoreWorkerProcess::HandleAtExit` does, and ends in a segmentation fault.
    """
    add_debug_option(command)
    os.environ["PYTHONSAFEPATH"] = "1"  # no Python that is started runs modules of this folder
    use_own_streams()
    sys.unraisablehook = interrupt_again
    end_at_sigterm()
    gc.set_threshold(_GC_THRESHOLD)
    ensure_home()
    try:
        raise_interrupts()
        status = main(command=command, program=program)
    except SystemExit as end:
        status = exit_status(end)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OutputError, ValueError) as error:  # or it was closed
        if not status:
            text, status = _report(error)
            if text:
                _print_error(text)
    os._exit(status)


def _report(error: BaseException) -> tuple[str, int]:
    """Return the line to print (without the program's name) and the exit status."""
    match error:
        case OutputError(is_unread=True):
            return "", EXIT_UNREAD
        case HotcoldError():
            return str(error), EXIT_FAILURE
        case click.exceptions.NoArgsIsHelpError():
            click.echo(error.format_message(), err=True)
            return "", EXIT_USAGE
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "hotcold"
            if isinstance(error, click.BadParameter) and (origin := origin_of(error)):
                return f"{error.format_message()} (from {origin})", EXIT_USAGE
            return f"{error.format_message()} (see '{path} --help')", EXIT_USAGE
        case click.ClickException():
            return error.format_message(), error.exit_code
        case click.Abort() if isinstance(error.__context__, EOFError):
            return "standard input ended", EXIT_FAILURE
        case click.Abort() | KeyboardInterrupt():
            return "", EXIT_INTERRUPTED
        case MemoryError():
            return f"not enough memory: {str(error) or 'an allocation was refused'}", EXIT_FAILURE
        case OSError(filename=str() | bytes()):
            return f"{error.strerror}: {click.format_filename(error.filename)}", EXIT_FAILURE
    kind = type(error).__name__
    return f"{kind}: {error} (this is a bug; run with --debug to see where)", EXIT_DEFECT


def _print_error(text: str) -> None:
    tell(f"hotcold: error: {' '.join(text.split())}", err=True)


if __name__ == "__main__":
    run()
