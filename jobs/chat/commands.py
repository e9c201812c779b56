"""Commands of a conversation: /help lists them.

The names are Ollama's or llama.cpp's where these have one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from hotcold.jobs.chat.conversation import Conversation
from hotcold.jobs.chat.files import load_conversation, read_attachment, save_conversation
from hotcold.jobs.support.console import what_it_took
from hotcold.model.errors import UsageError, shown
from hotcold.model.parameters import Biases, Switch, Texts, TokenIds, Whole, bias_of
from hotcold.model.sampling import PARAMETERS

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


class Ask(NamedTuple):
    """A command that ends in a question."""

    question: str
    again: bool  # in place of the last one


class GoOn(NamedTuple):
    """The last answer goes on."""


class Edit(NamedTuple):
    """The user types the last question anew, beginning with this text."""

    question: str


class End(NamedTuple):
    """The conversation is over."""


Outcome = str | Ask | GoOn | Edit | End  # a text is printed


class Command(NamedTuple):
    """One command; its first name is shown, the others mean the same."""

    names: tuple[str, ...]
    takes: str
    about: str
    act: Callable[[Commands, str], Outcome]


class Commands:
    """Runs the lines of a conversation that begin with "/"."""

    def __init__(self, conversation: Conversation, settings: Settings) -> None:
        """`settings` may be changed by what is typed."""
        self.conversation = conversation
        self.settings = settings

    def run(self, line: str) -> Outcome:
        """Run a command line; returns what to print or do next. Errors: UsageError."""
        name, _, rest = line.partition(" ")
        for command in COMMANDS:
            if name in command.names:
                return command.act(self, rest.strip())
        names = [name for command in COMMANDS for name in command.names]
        nearest = get_close_matches(name, names, 1)
        maybe = f"did you mean {nearest[0]}? " if nearest else ""
        raise UsageError(f"there is no {shown(name)[1:-1]}; {maybe}/help lists what there is")

    def clear(self, rest: str) -> str:
        """/clear."""
        self.conversation.clear()
        return ""

    def again(self, rest: str) -> Outcome:
        """/regen."""
        return Ask(self._last_question(), again=True)

    def go_on(self, rest: str) -> Outcome:
        """/continue."""
        self._last_question()
        if not self.conversation.messages[-1]["content"].strip():
            raise UsageError("the last answer is empty; /regen asks once more")
        return GoOn()

    def edit(self, rest: str) -> Outcome:
        """/edit."""
        last = self._last_question()
        return Ask(rest, again=True) if rest else Edit(last)

    def _last_question(self) -> str:
        if not self.conversation.messages:
            raise UsageError("nothing has been asked yet")
        return self.conversation.last_question

    def system(self, rest: str) -> str:
        """/system: what it is, or another; "" for none."""
        if rest:
            self.conversation.system_prompt = _unquoted(rest)
        return self._system_shown()

    def _system_shown(self) -> str:
        prompt = self.conversation.system_prompt
        return f"system prompt: {prompt}" if prompt else "there is no system prompt"

    def set(self, rest: str) -> str:
        """/set: one thing; without any, what is set and how to."""
        name, _, value = f"{rest} ".removeprefix("parameter ").strip().partition(" ")
        name = name.replace("-", "_")
        match _OLLAMAS.get(name, name):
            case "":
                usage = "write it like /set temperature 0.2 (none: the model's default)"
                others = ", ".join(["system TEXT", *SWITCHES])
                return f"{self._parameters()}\n{usage}; it also takes {others}"
            case "system":
                return self.system(value.strip() or '""')
            case "history" | "nohistory":
                self.settings.history = name == "history"
            case "markdown" | "nomarkdown":
                self.settings.markdown = name == "markdown"
            case "verbose" | "quiet":
                self.settings.verbose = name == "verbose"
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
        self.conversation.give(name, _value(name, text))
        return f"{name} is {self._value(name)}"

    def _value(self, name: str) -> str:
        found = self.conversation.given.get(name) or PARAMETERS[name].default
        return _shown_value(getattr(self.conversation.sampling, name, found))

    def _parameters(self) -> str:
        return "\n".join(f"{name} {self._value(name)}" for name in PARAMETERS)

    def show(self, rest: str) -> str:
        """/show: one of SHOWN, or most of them."""
        facts = self.conversation.facts
        parts = {
            "info": f"model {facts.model}\nmode {facts.mode} on {facts.device}\n"
            f"context {facts.context_length:,} tokens",
            "parameters": self._parameters(),
            "system": self._system_shown(),
        }
        if rest == "messages":
            messages = self.conversation.messages
            return "\n".join(f"{one['role']}: {one['content']}" for one in messages) or "none yet"
        if rest and rest not in parts:
            raise UsageError(f"{shown(rest)} cannot be shown; {', '.join(SHOWN)} can")
        return parts[rest] if rest else "\n".join(parts.values())

    def stats(self, rest: str) -> str:
        """/stats."""
        conversation = self.conversation
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

    def file(self, rest: str) -> str:
        """/file."""
        path = self._path(rest)
        self.conversation.attached.append(read_attachment(path))
        return f"{path.name} goes with the next question"

    def save(self, rest: str) -> str:
        """/save."""
        conversation, path = self.conversation, self._path(rest)
        facts = conversation.facts
        save_conversation(path, conversation.system_prompt, conversation.messages, facts.model)
        return f"{path} holds {len(conversation.messages)} messages"

    def load(self, rest: str) -> str:
        """/load."""
        path = self._path(rest)
        prompt, messages = load_conversation(path)
        self.conversation.load(prompt, messages)
        return f"{len(messages)} messages of {path}"

    def _path(self, rest: str) -> Path:
        if not self.settings.can_use_files:
            raise UsageError("files are for conversations at a terminal")
        if not rest:
            raise UsageError("name a file")
        try:
            return Path(_unquoted(rest)).expanduser()
        except RuntimeError:
            raise UsageError(f"there is no {shown(rest)}") from None

    def help(self, rest: str) -> str:
        """/help."""
        heads = [" ".join([*one.names, one.takes]).strip() for one in COMMANDS]
        width = max(map(len, heads))
        told = [f"{head:{width}}  {one.about}" for head, one in zip(heads, COMMANDS, strict=True)]
        return "\n".join([*told, *_KEYS])

    def end(self, rest: str) -> Outcome:
        """/bye."""
        return End()


COMMANDS = (
    Command(("/help", "/?"), "", "this list", Commands.help),
    Command(("/clear", "/reset"), "", "forget the conversation", Commands.clear),
    Command(("/continue",), "", "let the last answer go on, where it was cut", Commands.go_on),
    Command(("/regen",), "", "answer the last question anew", Commands.again),
    Command(("/edit",), "[TEXT]", "ask something else in its place", Commands.edit),
    Command(
        ("/system",), "[TEXT]", 'what the model is told first; "" for nothing', Commands.system
    ),
    Command(("/set",), "[NAME [VALUE]]", "temperature and the like; verbose; nohistory",
            Commands.set),
    Command(("/show",), "[WHAT]", ", ".join(SHOWN), Commands.show),
    Command(("/stats",), "", "tokens, speed, where the time goes", Commands.stats),
    Command(("/file", "/read"), "PATH", "let a file of text go with the next question",
            Commands.file),
    Command(("/save",), "PATH", "keep the conversation in a file", Commands.save),
    Command(("/load",), "PATH", "go on with one that was saved", Commands.load),
    Command(("/bye", "/exit", "/quit"), "", "end, as Ctrl-D", Commands.end),
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
