"""Where questions come from and answers go: a pipe, a file, or a terminal that knows no cursor.

There it is text as it comes, and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import click

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.jobs.support.console import tell

_QUOTES = '"""'


class Screen:
    """Standard input and output; `TerminalScreen` is one with a cursor."""

    is_terminal: bool  # where somebody types, who may press Ctrl-C
    can_edit = False  # what is read may begin with a text

    def __init__(self) -> None:
        """Get ready to read. Standard input must be open."""
        self.is_terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            # What is no UTF-8 is then refused as a prompt, and the chat goes on.
            sys.stdin.reconfigure(errors="surrogateescape")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())

    def held(self) -> AbstractContextManager[None]:
        """Within it the conversation is held."""
        return contextlib.nullcontext()

    def read(self, beginning: str) -> str:
        """The next question or command, without blanks around it; EOFError at the end.

        A line, or several between three quotation marks.
        """
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
        """Tell what is no answer."""
        tell(text, err=True)

    @contextmanager
    def answer(self) -> Iterator[Callable[[TokenEvent], None]]:
        """Within it an answer is shown, event by event."""
        yield lambda event: tell(event.readable, nl=False)
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
