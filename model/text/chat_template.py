"""Chat templates: Jinja2 text that comes with a model, rendered as transformers renders it.

They run in a sandbox (`model/text/template_sandbox.py`) in a subprocess.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hotcold.model.config.json_reader import read_json_object
from hotcold.model.errors import ConfigError, PromptError, shown
from hotcold.model.files.side_files import require_own
from hotcold.model.text.call_syntax import TAGGED, CallSyntax, syntax_of
from hotcold.model.text.channels import END, FINAL, MARKS, THOUGHTS
from hotcold.model.text.subprocess_worker import FailedError, RefusedError, SubprocessWorker
from hotcold.model.text.system_messages import one_at_the_start, plainer
from hotcold.model.text.template_dialects import switched, told_to, without_thoughts
from hotcold.model.text.tools import Tools, calls_in_words, described_in_system_prompt, in_words

MAX_TEMPLATE_BYTES = 1 << 20
RENDER_TIMEOUT_S = 5
_MAX_MEMORY_BYTES = 1 << 29
# A template that holds it prints the arguments of a call as they were written.
_PRINTS_TEXT = re.compile(r"\barguments\s{1,9}is\s{1,9}(?:not\s{1,9})?string\b")
_CALLS = re.compile(r"\btool_calls\b")  # so does one that renders those of the conversation
# One that holds this renders calls in messages alone that say nothing.
_WITHOUT_TEXT = re.compile(r"content['\"]?\]? is none")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

Messages = Sequence[dict[str, Any]]


class Thinking(NamedTuple):
    """The marks around a model's reasoning, which begins its answer."""

    begin: str
    end: str
    are_channels: bool = False  # thoughts are messages of their own (`model/text/channels.py`)
    answer: str = ""  # what may be written to end them and begin the answer, in place of the end
    sign: str = ""  # in a template that does not spell the marks
    may_reopen: bool = False  # whether models think though the prompt has ended thoughts

    def is_of(self, template: str) -> bool:
        """Whether a template's model thinks so."""
        return any(text and text in template for text in (self.begin, self.end, self.sign))

    def skipped(self, prompt: str) -> str:
        """A prompt whose template has no way to leave thoughts out, with empty ones.

        Source:  "Reasoning Models Can Be Effective Without Thinking", arXiv 2504.09858; Ollama's
                 templates of DeepSeek-R1
        """
        if prompt.rstrip().endswith(self.begin):
            return f"{prompt}{self.end}\n\n" if prompt.endswith("\n") else f"{prompt}{self.end}"
        return f"{prompt}{self.begin}\n\n{self.end}\n\n"

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends thoughts by force: the first that the answer's grammar takes."""
        return (f"{self.end}{self.answer}", self.end) if self.answer else (self.end,)


# The first whose marks are in a model's chat template is that model's.
_THINKING = (
    Thinking(THOUGHTS, END, True, FINAL),  # gpt-oss
    Thinking("<|channel>thought", "<channel|>", may_reopen=True),  # Gemma 4
    Thinking("<think:opensource>", "</think:opensource>", sign="'<think{}>'"),  # Hy3
    Thinking("<|think|>", "<|end|><|begin|>assistant", answer="<|content|>"),  # Solar Open
    Thinking("<think>", "</think>"),  # DeepSeek R1, Qwen 3, SmolLM 3, GLM 4.5
    Thinking("<seed:think>", "</seed:think>"),  # Seed-OSS
    Thinking("[THINK]", "[/THINK]"),  # Magistral
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
    Thinking("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Thinking("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)


def thinking_of(template: str) -> Thinking | None:
    """Return the marks of a chat template's model; None where it does not reason."""
    return next((one for one in _THINKING if one.is_of(template)), None)


class ChatTemplate:
    """One model's template and the special tokens that it may name.

    Errors:  ConfigError, naming the file, where the template is too long
    """

    def __init__(self, text: str, source: str, special_tokens: dict[str, str]):
        self.text = text
        self._source = source
        self._special_tokens = special_tokens
        payload = text.encode("utf-8", "surrogatepass")
        if len(payload) > MAX_TEMPLATE_BYTES:
            raise ConfigError(
                f"{source}: its chat template is larger than {MAX_TEMPLATE_BYTES} bytes; "
                "download it again"
            )
        sandbox = "hotcold.model.text.template_sandbox"
        self._worker = SubprocessWorker(sandbox, payload, _MAX_MEMORY_BYTES)

    def check(self) -> None:
        """Raise ConfigError where it is no template."""
        self._facts  # noqa: B018

    @property
    def call_syntax(self) -> CallSyntax:
        """The syntax of the model's tool calls. Errors: ConfigError."""
        return self._own_syntax or TAGGED

    @property
    def thinking(self) -> Thinking | None:
        """The marks around the model's reasoning; None where it does not reason."""
        return thinking_of(self.text)

    @property
    def marks(self) -> Sequence[str]:
        """Texts that hold the control tokens which tell the parts of an answer apart."""
        thinking = self.thinking
        if thinking is not None and thinking.are_channels:
            return MARKS
        own = self._own_syntax
        marks = [] if thinking is None else [thinking.begin, thinking.end]
        return marks if own is None else [*marks, own.marks]

    @functools.cached_property
    def _facts(self) -> bytes:
        try:
            return self._worker.facts()
        except FailedError as problem:
            raise ConfigError(f"{self._source}: bad chat template: {problem}") from None

    @functools.cached_property
    def _own_syntax(self) -> CallSyntax | None:
        return syntax_of(self.text)

    @functools.cached_property
    def _prints_text(self) -> bool:
        return _PRINTS_TEXT.search(self.text) is not None

    @classmethod
    def from_directory(cls, path: str | Path) -> ChatTemplate | None:
        """Return the template of chat_template.jinja, else of tokenizer_config.json, else None."""
        directory = Path(path)
        tokens = special_tokens(directory)
        file = directory / "chat_template.jinja"
        if file.exists():
            return cls(_read_text(require_own(file)), str(file), tokens)
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

        System messages at the start are one; those that the template refuses become the user's, and
        calls and results that it refuses (one without the other) become text.

        tools:     what the model may call (`model/text/tools.py`); messages may then hold
                   tool_calls, whose arguments are objects or JSON text, and have the role tool.
                   A template that asks whether they are text gets the text, any other objects
        variables: more JSON values for the template, by name, such as enable_thinking;
                   they do not replace messages and tools

        Errors:  PromptError where the template refuses the messages; ConfigError where it fails,
                 is no template, accesses what the sandbox forbids, or takes too much time or
                 memory
        """
        given: dict[str, Any] = {
            **self._special_tokens,
            "add_generation_prompt": add_generation_prompt,
            "documents": None,
            **switched(self.text, variables or {}),
        }
        messages = without_thoughts(self.text, one_at_the_start(messages), given)
        own = self._own_syntax
        if tools is not None and (own is None or not self._facts):
            is_told = _CALLS.search(self.text) and not _WITHOUT_TEXT.search(self.text)
            messages = described_in_system_prompt(messages, tools, own if is_told else None)
            tools = None
        refusal: PromptError | None = None
        for told in self._forms(messages):
            try:
                variables = {**given, "messages": told, "tools": tools}
                text = self._rendered(variables)
                return self._without_thoughts(text, variables) if add_generation_prompt else text
            except PromptError as problem:
                refusal = refusal or problem
        assert refusal is not None
        raise refusal

    def _without_thoughts(self, prompt: str, given: Mapping[str, Any]) -> str:
        """The prompt of who wants no thoughts, with empty ones where the template has no switch."""
        way = self.thinking
        if given.get("enable_thinking") is not False or way is None or way.are_channels:
            return prompt
        on = switched(self.text, {"enable_thinking": True})
        has_switch = prompt.rstrip().endswith(way.end) or self._rendered({**given, **on}) != prompt
        return prompt if has_switch else way.skipped(prompt)

    def _forms(self, messages: Messages) -> Iterator[Messages]:
        """The conversation, then what to try where the template refuses it."""
        told = told_to(self.text, messages)
        if self._own_syntax is not None and not _CALLS.search(self.text):
            told = [calls_in_words(message, self._own_syntax) for message in told]
        yield from plainer(told if self._prints_text else list(map(_with_objects, told)))
        if any(one["role"] == "tool" or one.get("tool_calls") for one in messages):
            yield from plainer(in_words(messages, self.call_syntax))

    def _rendered(self, variables: dict[str, Any]) -> str:
        self.check()
        try:
            found = self._worker.request(_as_json(variables), RENDER_TIMEOUT_S)
        except RefusedError as problem:
            raise PromptError(
                f"the model's chat template refuses the messages: {problem}"
            ) from None
        except FailedError as problem:
            raise ConfigError(f"{self._source}: chat template failed: {problem}") from None
        return found.decode("utf-8", "surrogatepass")


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and so on from the tokenizer's files."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = read_json_object(directory / name) if (directory / name).exists() else {}
        for key in _SPECIAL_TOKENS:
            value = values.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found.setdefault(key, value)
    return found


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as objects, where they are whole."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": list(map(_with_object, calls))}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        found = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": found}}


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
