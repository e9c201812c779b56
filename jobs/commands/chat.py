"""`hotcold chat`: a conversation in the terminal, by the model's chat template."""

from __future__ import annotations

import contextlib
import io
import sys
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actors.protocol.messages import GenerateRequest
from actors.protocol.options import SystemOptions
from jobs.kept.client import KeptSystem
from jobs.kept.find import find_system
from jobs.settings.shared_option import GroupedCommand
from jobs.support.options import (
    kept_options,
    sampling_options,
    split_sampling,
    split_system_options,
    system_options,
)
from jobs.support.until_stopped import on_interrupt
from model.errors import PromptError
from model.files.locate import locate_model
from model.sampling import SamplingParams

if TYPE_CHECKING:
    from actors.system import System

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--system", "system_prompt", help="What the model is told before the conversation.")
@sampling_options
@system_options
@kept_options
def chat(
    model: str | None, system_prompt: str | None, keep_s: float, is_own: bool, **values: Any
) -> None:
    """Talk with MODEL (the embedded demo model without it)."""
    options = split_system_options(values)
    kept = find_system(model, options, keep_s, is_own)
    path = locate_model(model) if kept is None else kept.model_path
    sampling = split_sampling(path, values)
    chosen = _started(path, options) if kept is None else _attended(path, kept)
    with chosen as running:
        click.echo(_HELP, err=True)
        _Conversation(running, sampling, system_prompt).run()


@contextmanager
def _attended(path: Path, kept: KeptSystem) -> Iterator[KeptSystem]:
    """A system that runs already, and stays for as long as the conversation."""
    _require_chat(path, kept.state()["has_chat_template"])
    with kept.attended():
        yield kept


@contextmanager
def _started(path: Path, options: SystemOptions) -> Iterator[System]:
    """A system of this command's own."""
    from actors.driver.text.prompts import Prompts
    from actors.setup.preflight import prepare_system
    from jobs.support.loading import running_system

    system, config = prepare_system(path, options)
    tokenizer = Prompts(path, config, system.context_length).tokenizer
    _require_chat(path, tokenizer is not None and tokenizer.has_chat_template)
    with running_system(system) as running:
        yield running


def _require_chat(path: Path, has_template: bool) -> None:
    """Get ready to read questions. Errors: PromptError where none can be asked."""
    if not has_template:
        raise PromptError(f"{path.name} has no tokenizer with a chat template; use generate")
    if sys.stdin is None:
        raise PromptError("standard input is closed, but chat reads its questions there; open it")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # What is no UTF-8 is then refused as a prompt, and the chat goes on.
        sys.stdin.reconfigure(errors="surrogateescape")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())


class _Conversation:
    def __init__(
        self, running: System | KeptSystem, sampling: SamplingParams, system_prompt: str | None
    ):
        self._running = running
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._opening)
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Read lines and answer them until the input ends."""
        while True:
            try:
                line = input("> " if self._is_terminal else "").strip()
                if line == "/exit":
                    return
                self._act(line)
            except EOFError:
                if self._is_terminal:
                    click.echo()  # what the terminal shows next begins on a line of its own
                return
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                click.echo(f"\n{_HELP}", err=True)

    def _act(self, line: str) -> None:
        if line == "/reset":
            self._messages = list(self._opening)
        elif line.startswith("/"):
            click.echo(_HELP, err=True)
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        answer = ""
        request = GenerateRequest(self._sampling, messages=messages, request_id=uuid.uuid4().hex)
        try:
            with self._stopped_by_interrupt(request.request_id):
                for event in self._running.generate(request):
                    answer += event.text
                    click.echo(event.text, nl=False)
                    sys.stdout.flush()
        except PromptError as error:  # the conversation has outgrown the context
            has_past = len(self._messages) > len(self._opening)
            click.echo(f"{error}{'; /reset starts anew' if has_past else ''}", err=True)
            return
        click.echo()
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _stopped_by_interrupt(self, request_id: str) -> AbstractContextManager[None]:
        """At a terminal Ctrl-C ends the answer; in a pipe it ends the program."""
        if not self._is_terminal:
            return contextlib.nullcontext()
        return on_interrupt(lambda: self._running.cancel(request_id))
