"""A terminal with a cursor: lines that can be edited, a status below them, rendered answers."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.styles import Style
from rich.console import Console

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.jobs.chat.conversation import Conversation
from hotcold.jobs.chat.markdown import LiveAnswer
from hotcold.jobs.chat.screen import Screen, is_open, unquoted
from hotcold.jobs.chat.session import COMMANDS, SHOWN, SWITCHES, Settings
from hotcold.jobs.support.console import plain
from hotcold.model.sampling import PARAMETERS

_STYLE = Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack", "prompt": "bold"})
_SECONDS = {"/set": (*PARAMETERS, "system", *SWITCHES), "/show": SHOWN}
_WITH_PATHS = ("/file", "/read", "/save", "/load")


class TerminalScreen(Screen):
    """See Screen."""

    is_terminal = can_edit = True

    def __init__(self, conversation: Conversation, settings: Settings) -> None:
        """Says where what is typed is kept."""
        self._conversation = conversation
        self._settings = settings
        self._console = Console(highlight=False)
        if settings.history:
            try:
                told = str(_history_file()).replace(str(Path.home()), "~", 1)
                self.say(f"what you type is kept in {told} (/set nohistory: not any more)")
            except OSError as error:
                settings.history = False
                self.say(f"what you type is not kept: {error.filename}: {error.strerror}")
        self._prompt: PromptSession[str] = PromptSession(
            [("class:prompt", "> ")],
            history=_TypedHistory(settings) if settings.history else None,
            completer=_Completer(),
            complete_while_typing=False,
            reserve_space_for_menu=4,
            multiline=True,
            prompt_continuation="  ",
            bottom_toolbar=lambda: self._conversation.status,
            key_bindings=_keys(),
            enable_open_in_editor=True,
            enable_suspend=True,
            style=_STYLE,
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """See Screen; what is typed while nothing is read waits, and is not shown among answers."""
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        within = [*before]
        within[3] &= ~(termios.ECHO | termios.ICANON)  # Ctrl-C is still a signal
        termios.tcsetattr(descriptor, termios.TCSADRAIN, within)
        try:
            yield
        finally:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def read(self, beginning: str) -> str:
        """See Screen; Enter ends it, but between three quotation marks."""
        typed = self._prompt.prompt(default=beginning)
        ahead = get_typeahead(self._prompt.input)
        if any(pressed.key == Keys.ControlC for pressed in ahead):  # it came with Enter
            raise KeyboardInterrupt
        store_typeahead(self._prompt.input, ahead)
        return unquoted(typed)

    def say(self, text: str) -> None:
        """See Screen."""
        self._console.print(plain(text), markup=False)

    @contextmanager
    def answer(self) -> Iterator[Callable[[TokenEvent], None]]:
        """See Screen."""
        live = LiveAnswer(self._console, self._settings.markdown, lambda: self._conversation.status)
        try:
            yield lambda event: live.add(event.readable)
        finally:
            live.end()
            self._console.print()


class _TypedHistory(FileHistory):
    """What was typed in this session and before, kept as long as that is wanted."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(_history_file())
        self._settings = settings

    def store_string(self, string: str) -> None:
        """See prompt_toolkit; what cannot be kept is not."""
        if self._settings.history:
            with contextlib.suppress(OSError, UnicodeError):
                super().store_string(string)


def _history_file() -> Path:
    """The file, for its user alone, in the folder for what programs remember. Errors: OSError."""
    given = os.environ.get("XDG_STATE_HOME", "")
    state = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    path = state / "hotcold" / "chat-history"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)  # fails for another user's
    return path


class _Completer(Completer):
    """Commands, what they take, and paths."""

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """See prompt_toolkit."""
        text = document.text_before_cursor
        command, blank, rest = text.partition(" ")
        if text.startswith("/") and not blank:
            names = [name for one in COMMANDS for name in one.names]
            yield from _completions(names, text)
        elif command in _SECONDS:
            yield from _completions(_SECONDS[command], rest)
        else:
            word = rest if command in _WITH_PATHS else text.split()[-1] if text.strip() else ""
            if command in _WITH_PATHS or (word.startswith("@") and text.endswith(word)):
                path = Document(word.removeprefix("@"))
                yield from PathCompleter(expanduser=True).get_completions(path, event)


def _completions(names: Iterable[str], begun: str) -> Iterator[Completion]:
    return (Completion(name, -len(begun)) for name in names if name.startswith(begun))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def give_up(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys
