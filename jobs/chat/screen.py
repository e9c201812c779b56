"""Where questions come from and answers go: what every place has, and the plain one.

Plain is a pipe, a file, or a terminal that knows no cursor: text as it comes, and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import click

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.jobs.support.console import tell

_QUOTES = '"""'


class Screen(Protocol):
    """Where a conversation is held."""

    is_terminal: bool  # where somebody types, who may press Ctrl-C
    can_edit: bool  # what is read may begin with a text

    def held(self) -> AbstractContextManager[None]:
        """Within it the conversation is held."""

    def read(self, beginning: str) -> str:
        """The next question or command, without blanks around it; EOFError at the end."""

    def say(self, text: str) -> None:
        """Tell what is no answer."""

    def answer(self) -> AbstractContextManager[Callable[[TokenEvent], None]]:
        """Within it an answer is shown, event by event."""


class PlainScreen:
    """Standard input and output."""

    can_edit = False

    def __init__(self) -> None:
        """Get ready to read. Standard input must be open."""
        self.is_terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            # What is no UTF-8 is then refused as a prompt, and the chat goes on.
            sys.stdin.reconfigure(errors="surrogateescape")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())

    def held(self) -> AbstractContextManager[None]:
        """See Screen."""
        return contextlib.nullcontext()

    def read(self, beginning: str) -> str:
        """See Screen; a line, or several between three quotation marks."""
        try:
            text = input("> " if self.is_terminal else "")
            while is_open(text):
                try:
                    text += "\n" + input("... " if self.is_terminal else "")
                except EOFError:
                    break
        except EOFError:
            if self.is_terminal:
                click.echo()  # what the terminal shows next begins on a line of its own
            raise
        return unquoted(text)

    def say(self, text: str) -> None:
        """See Screen."""
        tell(text, err=True)

    @contextmanager
    def answer(self) -> Iterator[Callable[[TokenEvent], None]]:
        """See Screen."""
        yield lambda event: tell(event.text, nl=False)
        click.echo()


def is_open(text: str) -> bool:
    """Whether a text that three quotation marks begin is not ended by such."""
    text = text.strip()
    is_ended = len(text) >= 2 * len(_QUOTES) and text.endswith(_QUOTES)
    return text.startswith(_QUOTES) and not is_ended


def unquoted(text: str) -> str:
    """What was typed, without three quotation marks and blanks around it."""
    text = text.strip()
    if text.startswith(_QUOTES):
        text = text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()
    return text
