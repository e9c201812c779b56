"""Reads what is typed, and does it, until the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.jobs.chat.commands import Ask, Commands, Edit, End, GoOn, Settings
from hotcold.jobs.chat.conversation import Conversation
from hotcold.jobs.chat.files import mentioned, read_attachment
from hotcold.jobs.chat.screen import Screen
from hotcold.jobs.support.console import cut_short, what_it_took
from hotcold.jobs.support.signals import on_interrupt
from hotcold.model.errors import PromptError, UsageError

HELP = (
    "/help lists commands, /clear forgets the conversation, /bye or Ctrl-D ends it, Ctrl-C stops "
    "an answer"
)
_LONGER = "/continue lets it go on, /set max_tokens none lets answers be longer"
_ANEW = "/clear starts anew"


class Session:
    """A conversation on a screen."""

    def __init__(self, conversation: Conversation, screen: Screen, settings: Settings) -> None:
        """Says nothing yet."""
        self._conversation = conversation
        self._screen = screen
        self._settings = settings
        self._commands = Commands(conversation, settings)
        self._beginning: str | None = None  # of a question that takes the last one's place

    def run(self) -> None:
        """Answer until the input ends. Errors: ServiceError; KeyboardInterrupt in a pipe."""
        with self._screen.held():
            self._screen.say(HELP)
            self._go_on()

    def _go_on(self) -> None:
        while True:
            try:
                beginning, self._beginning = self._beginning, None
                typed = self._screen.read(beginning or "")
                if not self._act(typed, beginning is not None):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._screen.is_terminal:
                    raise
                self._screen.say(f"\n{HELP}")
            except UsageError as error:
                self._screen.say(str(error))

    def _act(self, typed: str, again: bool) -> bool:
        """Do what was typed; whether the conversation goes on. Errors: UsageError."""
        if not typed.startswith("/"):
            if typed:
                self._ask(typed, again)
            return True
        match self._commands.run(typed):
            case Ask(question, in_place):
                self._ask(question, in_place)
            case GoOn():
                self._show(self._conversation.go_on)
            case Edit(question) if self._screen.can_edit:
                self._beginning = question
            case Edit():
                raise UsageError("write it like /edit TEXT")
            case End():
                return False
            case str(told):
                if told:
                    self._screen.say(told)
        return True

    def _ask(self, question: str, again: bool) -> None:
        """Answer. Errors: UsageError of a file that a question names, and nothing was asked."""
        conversation = self._conversation
        can_use_files = self._settings.can_use_files and not conversation.is_loaded(question)
        paths = mentioned(question) if can_use_files else []
        try:
            named = [read_attachment(path) for path in paths]
        except UsageError as error:
            raise UsageError(f"{error}; nothing was asked (without its @ it is a word)") from None
        for path in paths:
            self._screen.say(f"{path} goes with it")
        self._show(lambda show: conversation.ask(question, show, again, named))

    def _show(self, answer: Callable[[Callable[[TokenEvent], None]], None]) -> None:
        """Show what `answer` tells, event by event, and then how it ended."""
        conversation = self._conversation
        request_id = conversation.begin()
        try:
            with self._screen.answer() as show, self._stopped_by_interrupt(request_id):
                answer(show)
        except PromptError as error:  # the conversation has outgrown the context
            self._screen.say(f"{error}{'; /clear starts anew' if conversation.messages else ''}")
            return
        result, facts = conversation.result, conversation.facts
        if result is None:
            return
        if cut := cut_short(result, facts.context_length, facts.max_positions, _LONGER, _ANEW):
            self._screen.say(cut)
        if self._settings.verbose:
            self._screen.say(what_it_took(result))

    def _stopped_by_interrupt(self, request_id: str) -> AbstractContextManager[None]:
        """At a terminal Ctrl-C ends the answer; in a pipe it ends the program."""
        if not self._screen.is_terminal:
            return contextlib.nullcontext()
        return on_interrupt(lambda: self._conversation.running.cancel(request_id))
