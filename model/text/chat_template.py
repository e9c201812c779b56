"""Chat templates: Jinja2 text that a model brings, run in a sandbox as transformers runs it.

Where they are run is a process of their own (`model/text/apart.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotcold.model.config.json_reader import read_json_object
from hotcold.model.errors import ConfigError, PromptError, shown
from hotcold.model.text.apart import Apart, FailedError, RefusedError
from hotcold.model.text.thinking import Thinking, thinking_of
from hotcold.model.text.tools import (
    TAGGED,
    CallSyntax,
    Tools,
    syntax_of,
    told_in_words,
    without_system,
)

MAX_TEMPLATE_BYTES = 1 << 20
RENDER_TIMEOUT_S = 5
_MAX_MEMORY_BYTES = 1 << 29
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

Messages = Sequence[dict[str, Any]]


class ChatTemplate:
    """One model's template and the special tokens that it may name.

    Errors:  ConfigError, naming the file, where the template is too long
    """

    def __init__(self, text: str, source: str, special_tokens: dict[str, str]):
        self.text = text
        self._source = source
        self._special_tokens = special_tokens
        given = text.encode("utf-8", "surrogatepass")
        if len(given) > MAX_TEMPLATE_BYTES:
            raise ConfigError(
                f"{source}: its chat template is larger than {MAX_TEMPLATE_BYTES} bytes; "
                "download it again"
            )
        self._process = Apart("hotcold.model.text.template_sandbox", given, _MAX_MEMORY_BYTES)

    def check(self) -> None:
        """Look whether it is one. Errors: ConfigError."""
        self._facts  # noqa: B018

    @property
    def call_syntax(self) -> CallSyntax:
        """How the model is asked to write calls of tools. Errors: ConfigError."""
        return self._own_syntax or TAGGED

    @property
    def thinking(self) -> Thinking | None:
        """How the model writes what it thinks, if it does."""
        return thinking_of(self.text)

    @functools.cached_property
    def _facts(self) -> bytes:
        try:
            return self._process.facts()
        except FailedError as problem:
            raise ConfigError(f"{self._source}: bad chat template: {problem}") from None

    @property
    def _own_syntax(self) -> CallSyntax | None:
        return syntax_of(self.text, bool(self._facts))

    @classmethod
    def from_directory(cls, path: str | Path) -> ChatTemplate | None:
        """Return the template of chat_template.jinja, else of tokenizer_config.json, else None."""
        directory = Path(path)
        tokens = special_tokens(directory)
        file = directory / "chat_template.jinja"
        if file.exists():
            return cls(_read_text(file), str(file), tokens)
        file = directory / "tokenizer_config.json"
        value = read_json_object(file).get("chat_template") if file.exists() else None
        text = _default_template(value, str(file))
        return None if text is None else cls(text, str(file), tokens)

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation of {"role", "content"} messages.

        tools:     what the model may call (`model/text/tools.py`); then messages may hold
                   tool_calls, whose arguments are objects, and have the role tool
        variables: more that the template may read, as JSON values by their names, such as
                   enable_thinking; before what else it is given

        Errors:  PromptError where the template refuses the messages; ConfigError where it fails,
                 is no template, reaches for what the sandbox forbids, or takes too much
                 time or memory
        """
        given: dict[str, Any] = {
            **self._special_tokens,
            "add_generation_prompt": add_generation_prompt,
            "documents": None,
            **(variables or {}),
        }
        if tools is None or self._own_syntax is not None:
            return self._rendered({**given, "messages": list(messages), "tools": tools})
        told = told_in_words(messages, tools)
        try:
            return self._rendered({**given, "messages": told, "tools": None})
        except PromptError:  # some know no system message
            return self._rendered({**given, "messages": without_system(told), "tools": None})

    def _rendered(self, variables: dict[str, Any]) -> str:
        self.check()
        try:
            found = self._process.ask(_as_json(variables), RENDER_TIMEOUT_S)
        except RefusedError as problem:
            raise PromptError(
                f"the model's chat template refuses the messages: {problem}"
            ) from None
        except FailedError as problem:
            raise ConfigError(f"{self._source}: chat template failed: {problem}") from None
        return found.decode("utf-8", "surrogatepass")


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and so on that the tokenizer's files give."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = read_json_object(directory / name) if (directory / name).exists() else {}
        for key in _SPECIAL_TOKENS:
            value = values.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found.setdefault(key, value)
    return found


def _as_json(variables: dict[str, Any]) -> bytes:
    try:
        return json.dumps(variables).encode()
    except (TypeError, ValueError, RecursionError):
        raise PromptError(
            "messages hold more than JSON; give objects of role and content"
        ) from None


def _default_template(value: Any, source: str) -> str | None:
    """Return the template of a string, or the one called default of a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    named = {
        entry.get("name"): entry.get("template")
        for entry in (value if isinstance(value, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    }
    text = (
        named.get("default")
        if "default" in named or len(named) != 1
        else next(iter(named.values()))
    )
    if not isinstance(text, str):
        raise ConfigError(f"{source}: chat_template has no template named default; add one")
    return text


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_TEMPLATE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{file}: cannot be read: {shown(str(problem))[1:-1]}") from None
