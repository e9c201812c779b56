"""`hotcold chat`: a conversation in the terminal, by the model's chat template."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.chat.conversation import Conversation, Facts, Running
from hotcold.jobs.chat.screen import Screen
from hotcold.jobs.chat.session import Session, Settings
from hotcold.jobs.running.client import Client
from hotcold.jobs.running.find import find_system
from hotcold.jobs.support.options import (
    given_sampling,
    kept_options,
    options_adder,
    sampling_options,
    split_system_options,
    system_options,
)
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.jobs.support.workers import begin_workers
from hotcold.model.errors import PromptError
from hotcold.model.files.locate import locate_model, model_name
from hotcold.model.sampling import SamplingParams

if TYPE_CHECKING:
    from hotcold.actors.protocol.messages import LoadProgress
    from hotcold.actors.system import System

_TERMINAL = "hotcold.jobs.chat.terminal"


chat_options = options_adder(
    [
        click.option(
            "--system", "system_prompt", help="What the model is told before the conversation."
        ),
        click.option("--no-history", is_flag=True, help="Keep nothing of what is typed."),
        click.option(
            "--plain", is_flag=True, help="Text as it comes, as where there is no terminal."
        ),
    ]
)


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@chat_options
@sampling_options
@system_options
@kept_options
def chat(model: str | None, **values: Any) -> None:
    """Talk with MODEL (the embedded demo model without it)."""
    talk(model, **values)


def talk(
    model: str | None,
    system_prompt: str | None,
    no_history: bool,
    plain: bool,
    keep_s: float,
    is_own: bool,
    **values: Any,
) -> None:
    """Hold a conversation. `values` are of system and sampling options. Errors: HotcoldError."""
    is_rich = not plain and _has_cursor()
    options = split_system_options(values)
    kept = find_system(model, options, keep_s, is_own, attends=True)
    path = locate_model(model) if kept is None else kept.model_path
    given, defaults = given_sampling(values), SamplingParams.defaults(path)
    SamplingParams.of_given(given, defaults)  # for its errors
    name = model_name(model, path)
    with ExitStack() as stack:
        running, facts = _entered(stack, path, kept, options, name)
        conversation = Conversation(running, facts, defaults, given, system_prompt or "")
        settings = Settings(history=is_rich and not no_history, can_use_files=_is_typed())
        if is_rich:
            from hotcold.jobs.chat.terminal import TerminalScreen

            screen: Screen = TerminalScreen(conversation, settings)
        else:
            screen = Screen()
        Session(conversation, screen, settings).run()


def _is_typed() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def _has_cursor() -> bool:
    """Whether somebody sits at a terminal whose cursor can be moved."""
    is_shown = sys.stdout is not None and sys.stdout.isatty()
    return _is_typed() and is_shown and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _entered(
    stack: ExitStack, path: Path, kept: Client | None, options: SystemOptions, name: str
) -> tuple[Running, Facts]:
    """A system that answers until `stack` ends."""
    if kept is None:
        return stack.enter_context(_started(path, options, name))
    stack.callback(kept.close)
    state = kept.facts
    _require_chat(path, state["has_chat_template"])
    positions = state["context_length"], state["max_positions"]
    return kept, Facts(name, state["mode"], state["device"], *positions)


@contextmanager
def _started(path: Path, options: SystemOptions, name: str) -> Iterator[tuple[System, Facts]]:
    """A system of this command's own."""
    begin_workers()
    from hotcold.actors.driver.prompts import Prompts
    from hotcold.actors.setup.preflight import prepare_system
    from hotcold.jobs.support.loading import running_system

    system, config = prepare_system(path, options)
    tokenizer = Prompts(path, config, system.context_length).tokenizer
    _require_chat(path, tokenizer is not None and tokenizer.has_chat_template)
    assert tokenizer is not None
    tokenizer.check_template()

    def import_terminal(progress: LoadProgress) -> None:
        """While the system loads."""
        if _has_cursor():
            import_module(_TERMINAL)

    with running_system(system, import_terminal) as running:
        system = running.call("describe")  # with --mode auto, the mode that was chosen
        positions = system.context_length, config.max_positions
        yield running, Facts(name, system.mode, system.device, *positions)


def _require_chat(path: Path, has_template: bool) -> None:
    """Errors: PromptError where no question can be asked."""
    if not has_template:
        raise PromptError(f"{path.name} has no tokenizer with a chat template; use generate")
    if sys.stdin is None:
        raise PromptError("standard input is closed, but chat reads its questions there; open it")
