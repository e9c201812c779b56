"""A conversation on a screen: what is typed is asked, or done; /help lists what can be.

The commands' names are Ollama's or llama.cpp's where these have one.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.jobs.chat.conversation import Conversation
from hotcold.jobs.chat.files import (
    load_conversation,
    mentioned,
    read_attachment,
    save_conversation,
)
from hotcold.jobs.chat.screen import Screen
from hotcold.jobs.support.console import cut_short, what_it_took
from hotcold.jobs.support.signals import on_interrupt
from hotcold.model.errors import PromptError, UsageError, shown
from hotcold.model.parameters import Biases, Switch, Texts, TokenIds, Whole, bias_of
from hotcold.model.sampling import PARAMETERS

HELP = (
    "/help lists commands, /clear forgets the conversation, /bye or Ctrl-D ends it, Ctrl-C stops "
    "an answer"
)
_LONGER = "/continue lets it go on, /set max_tokens none lets answers be longer"
_ANEW = "/clear starts anew"
_OLLAMAS = {one.ollama: name for name, one in PARAMETERS.items() if one.ollama}
SWITCHES = ("history", "nohistory", "markdown", "nomarkdown", "verbose", "quiet")
SHOWN = ("info", "parameters", "system", "messages")


@dataclass
class Settings:
    """What a conversation shows and keeps; `Screen` reads it."""

    markdown: bool = True
    verbose: bool = False  # the speed of each answer is told
    history: bool = True
    can_use_files: bool = True  # False where a program types


class Command(NamedTuple):
    """One command; its first name is shown, the others mean the same."""

    names: tuple[str, ...]
    takes: str
    about: str
    act: Callable[[Session, str], str | None]  # with what follows it; returns what is told


class Session:
    """Reads what is typed, and does it, until the end."""

    def __init__(self, conversation: Conversation, screen: Screen, settings: Settings) -> None:
        """Says nothing yet. `settings` may be changed by what is typed."""
        self._conversation = conversation
        self._screen = screen
        self._settings = settings
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
                if typed.startswith("/"):
                    self._run(typed)
                elif typed:
                    self._ask(typed, beginning is not None)
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._screen.is_terminal:
                    raise
                self._screen.say(f"\n{HELP}")
            except UsageError as error:
                self._screen.say(str(error))

    def _run(self, line: str) -> None:
        """Run a command. Errors: UsageError, EOFError at the end."""
        name, _, rest = line.partition(" ")
        for command in COMMANDS:
            if name in command.names:
                if told := command.act(self, rest.strip()):
                    self._screen.say(told)
                return
        names = [name for command in COMMANDS for name in command.names]
        nearest = get_close_matches(name, names, 1)
        maybe = f"did you mean {nearest[0]}? " if nearest else ""
        raise UsageError(f"there is no {shown(name)[1:-1]}; {maybe}/help lists what there is")

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

    def _clear(self, rest: str) -> None:
        self._conversation.clear()

    def _again(self, rest: str) -> None:
        self._ask(self._last_question(), True)

    def _continue(self, rest: str) -> None:
        self._last_question()
        if not self._conversation.messages[-1]["content"].strip():
            raise UsageError("the last answer is empty; /regen asks once more")
        self._show(self._conversation.go_on)

    def _edit(self, rest: str) -> None:
        last = self._last_question()
        if rest:
            self._ask(rest, True)
        elif not self._screen.can_edit:
            raise UsageError("write it like /edit TEXT")
        else:
            self._beginning = last

    def _last_question(self) -> str:
        if not self._conversation.messages:
            raise UsageError("nothing has been asked yet")
        return self._conversation.last_question

    def _system(self, rest: str) -> str:
        """What the model is told first, or another; "" for none."""
        if rest:
            self._conversation.system_prompt = _unquoted(rest)
        return self._system_shown()

    def _system_shown(self) -> str:
        prompt = self._conversation.system_prompt
        return f"system prompt: {prompt}" if prompt else "there is no system prompt"

    def _set(self, rest: str) -> str:
        """One thing; without any, what is set and how to."""
        name, _, value = f"{rest} ".removeprefix("parameter ").strip().partition(" ")
        name = name.replace("-", "_")
        match _OLLAMAS.get(name, name):
            case "":
                usage = "write it like /set temperature 0.2 (none: the model's default)"
                others = ", ".join(["system TEXT", *SWITCHES])
                return f"{self._parameters()}\n{usage}; it also takes {others}"
            case "system":
                return self._system(value.strip() or '""')
            case "history" | "nohistory":
                self._settings.history = name == "history"
            case "markdown" | "nomarkdown":
                self._settings.markdown = name == "markdown"
            case "verbose" | "quiet":
                self._settings.verbose = name == "verbose"
            case parameter if parameter in PARAMETERS:
                return self._set_parameter(parameter, value.strip())
            case _:
                known = [*PARAMETERS, "system", *SWITCHES]
                nearest = get_close_matches(name, known, 1, 0.7)
                told = f"did you mean {nearest[0]}?" if nearest else f"{', '.join(known)} can"
                raise UsageError(f"{shown(name)} cannot be set; {told}")
        return f"{name} is set"

    def _set_parameter(self, name: str, text: str) -> str:
        if not text:
            raise UsageError(f"{name} is to be what? Write it like /set {name} {self._value(name)}")
        self._conversation.give(name, _value(name, text))
        return f"{name} is {self._value(name)}"

    def _value(self, name: str) -> str:
        found = self._conversation.given.get(name) or PARAMETERS[name].default
        return _shown_value(getattr(self._conversation.sampling, name, found))

    def _parameters(self) -> str:
        return "\n".join(f"{name} {self._value(name)}" for name in PARAMETERS)

    def _told(self, rest: str) -> str:
        """One of SHOWN, or most of them."""
        facts = self._conversation.facts
        parts = {
            "info": f"model {facts.model}\nmode {facts.mode} on {facts.device}\n"
            f"context {facts.context_length:,} tokens",
            "parameters": self._parameters(),
            "system": self._system_shown(),
        }
        if rest == "messages":
            messages = self._conversation.messages
            return "\n".join(f"{one['role']}: {one['content']}" for one in messages) or "none yet"
        if rest and rest not in parts:
            raise UsageError(f"{shown(rest)} cannot be shown; {', '.join(SHOWN)} can")
        return parts[rest] if rest else "\n".join(parts.values())

    def _stats(self, rest: str) -> str:
        conversation = self._conversation
        counts, result = conversation.counts, conversation.result
        answers = f"{counts.num_answers} answer{'' if counts.num_answers == 1 else 's'}"
        lines = [
            conversation.status,
            f"{answers} in {counts.seconds:.1f} s: {counts.num_prompt_tokens:,} prompt tokens, "
            f"{counts.num_new_tokens:,} new ones",
        ]
        if result is not None:
            lines.append(what_it_took(result))
            parts = dict(result.per_token_ms)
            whole = parts.pop("total", 0.0)
            told = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items() if ms >= 0.005)
            lines += [f"a token takes {whole:.2f} ms: {told}"] if whole else []
        return "\n".join(lines)

    def _file(self, rest: str) -> str:
        path = self._path(rest)
        self._conversation.attached.append(read_attachment(path))
        return f"{path.name} goes with the next question"

    def _save(self, rest: str) -> str:
        conversation, path = self._conversation, self._path(rest)
        facts = conversation.facts
        save_conversation(path, conversation.system_prompt, conversation.messages, facts.model)
        return f"{path} holds {len(conversation.messages)} messages"

    def _load(self, rest: str) -> str:
        path = self._path(rest)
        prompt, messages = load_conversation(path)
        self._conversation.load(prompt, messages)
        return f"{len(messages)} messages of {path}"

    def _path(self, rest: str) -> Path:
        if not self._settings.can_use_files:
            raise UsageError("files are for conversations at a terminal")
        if not rest:
            raise UsageError("name a file")
        try:
            return Path(_unquoted(rest)).expanduser()
        except RuntimeError:
            raise UsageError(f"there is no {shown(rest)}") from None

    def _help(self, rest: str) -> str:
        heads = [" ".join([*one.names, one.takes]).strip() for one in COMMANDS]
        width = max(map(len, heads))
        told = [f"{head:{width}}  {one.about}" for head, one in zip(heads, COMMANDS, strict=True)]
        return "\n".join([*told, *_KEYS])

    def _end(self, rest: str) -> None:
        raise EOFError


COMMANDS = (
    Command(("/help", "/?"), "", "this list", Session._help),
    Command(("/clear", "/reset"), "", "forget the conversation", Session._clear),
    Command(("/continue",), "", "let the last answer go on, where it was cut", Session._continue),
    Command(("/regen",), "", "answer the last question anew", Session._again),
    Command(("/edit",), "[TEXT]", "ask something else in its place", Session._edit),
    Command(
        ("/system",), "[TEXT]", 'what the model is told first; "" for nothing', Session._system
    ),
    Command(("/set",), "[NAME [VALUE]]", "temperature and the like; verbose; nohistory",
            Session._set),
    Command(("/show",), "[WHAT]", ", ".join(SHOWN), Session._told),
    Command(("/stats",), "", "tokens, speed, where the time goes", Session._stats),
    Command(("/file", "/read"), "PATH", "let a file of text go with the next question",
            Session._file),
    Command(("/save",), "PATH", "keep the conversation in a file", Session._save),
    Command(("/load",), "PATH", "go on with one that was saved", Session._load),
    Command(("/bye", "/exit", "/quit"), "", "end, as Ctrl-D", Session._end),
)  # fmt: skip
_KEYS = (
    '"""                begins and ends a question of several lines, as a paste does',
    "@PATH              in a question: that file of text goes with it",
    "Alt-Enter          a new line; Tab completes; Ctrl-X Ctrl-E opens $EDITOR",
    "Ctrl-C             stops an answer, or gives up the line; Ctrl-D ends",
)


def _value(name: str, text: str) -> object:
    """The value of a parameter of its kind; None: it is not given. Errors: UsageError."""
    if text == "none":
        return None
    try:
        match PARAMETERS[name].kind:
            case Texts():
                return _words(text)
            case TokenIds():
                return [int(word) for word in text.split()]
            case Biases():
                return [bias_of(word) for word in text.split()]
            case Switch():
                return {"true": True, "false": False}.get(text, text)
            case Whole():
                return int(text)
        return float(text)
    except ValueError:
        raise UsageError(f"{name} is a number, not {shown(text)}") from None


def _shown_value(value: object) -> str:
    """As `_value` reads it."""
    if isinstance(value, tuple):
        words = (f"{one[0]}={one[1]:g}" if isinstance(one, tuple) else str(one) for one in value)
        return shlex.join(words) or "none"
    return "none" if value is None else str(value).lower()


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise UsageError(f"{shown(text)}: a quotation mark is missing") from None


def _unquoted(text: str) -> str:
    """Without quotation marks around it."""
    is_quoted = len(text) >= 2 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text
