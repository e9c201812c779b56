"""Conversations: messages for a chat template, and what an answer thinks, says and calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from hotcold.actors.protocol.messages import GenerateRequest, Grammar
from hotcold.model.errors import PromptError, UsageError, shown
from hotcold.model.text.roles import ALWAYS_SAY, TEMPLATE_ROLES
from hotcold.model.text.tools import described
from hotcold.sampling_params import grammars, unknown_argument

if TYPE_CHECKING:
    from hotcold.actors.driver.grammars.grammar import Callable, Function
    from hotcold.model.text.tokenizer import Tokenizer
    from hotcold.ui.api.tools.reader import AnswerReader

Message = Mapping[str, Any]
_KEPT_KEYS = ("name", "tool_call_id", "reasoning_content")
_OTHER_NAMES = {"chat_template_kwargs": "template_variables", "use_tqdm": "progress"}  # vLLM's


class ChatOptions(TypedDict, total=False):
    """What a conversation's request may say beside its messages."""

    tools: Sequence[Mapping[str, Any]] | None  # OpenAI's
    tool_choice: str | Mapping[str, Any]  # "auto", "required", "none", or the tool to call
    enable_thinking: bool | None  # None: as the chat template has it
    continue_final_message: bool  # the answer goes on with the last message
    template_variables: Mapping[str, Any] | None  # what the chat template may read besides


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation in OpenAI's format as chat templates take it. Errors: PromptError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable) or not messages:
        raise PromptError(
            'give a conversation as a list of messages, like [{"role": "user", "content": "Hi"}]'
        )
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"{shown(message)} is no message; it needs a role and a content")
    content = message.get("content")
    if content is None and message["role"] in ALWAYS_SAY:
        raise PromptError(f"{shown(message)} has no content; a message of its role needs one")
    content = content or ""
    if not isinstance(content, str):
        content = "".join(map(_text_of, content))
    found: dict[str, Any] = {
        "role": TEMPLATE_ROLES.get(message["role"], message["role"]),
        "content": content,
    }
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_template_call(call) for call in calls]
    return found | {key: message[key] for key in _KEPT_KEYS if message.get(key) is not None}


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise PromptError(f"{shown(part)}: only text can be read; leave this part out")
    return str(part["text"])


def _template_call(call: Message) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        arguments = function.get("arguments") or "{}"
        return {**call, "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError, ValueError):
        raise PromptError(f"{shown(call)} is no tool call in OpenAI's format") from None


class Tools(NamedTuple):
    """What answers may call."""

    for_template: list[dict[str, Any]] | None = None  # None where nothing may be called
    wanted: Callable | None = None


def _function(tool: Mapping[str, Any]) -> Function:
    try:
        function = tool["function"]
        name, strict = function["name"], function.get("strict")
        if tool["type"] != "function" or not isinstance(name, str) or not name:
            raise TypeError
        found: Function = grammars().Function(name, function.get("parameters"), strict)
        return found
    except (KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{shown(tool)} is no tool; write it like "
            '{"type": "function", "function": {"name": "f", "parameters": {...}}}'
        ) from None


class Chat(NamedTuple):
    """How the answers to one conversation are held, and read."""

    grammar: Grammar | None
    syntax: Any  # of calls; None where nothing may be called
    schemas: Mapping[str, Any] | None = None  # of the functions' arguments, by name

    @classmethod
    def of(cls, tokenizer: Tokenizer, wanted: Callable | None, shape: Grammar | None) -> Chat:
        """`shape`: what the answer is held to beside calls. Errors: UsageError, ConfigError."""
        syntax, grammar = None, shape
        if wanted is not None:
            if shape is not None and shape.kind != "json_schema":
                raise UsageError("tools and a grammar were both given; leave one out")
            syntax = tokenizer.call_syntax
            grammar = grammars().calls_grammar(wanted, syntax, shape.text if shape else None)
        return cls(grammar, syntax, None if wanted is None else wanted.schemas)

    def reader(self) -> AnswerReader:
        """Reads one answer."""
        from hotcold.ui.api.tools.reader import AnswerReader

        return AnswerReader(self.syntax, self.schemas)


def tools_of(options: ChatOptions) -> Tools:
    """What answers may call, by OpenAI's `tools` and `tool_choice`.

    Errors:  UsageError, also for an option that is not known
    """
    known = ChatOptions.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise UsageError(unknown_argument("chat", unknown[0], list(known), _OTHER_NAMES))
    tools, choice = options.get("tools"), options.get("tool_choice", "auto")
    if tools is None:
        if choice not in ("auto", "none", None):
            raise UsageError("tool_choice is for chats with tools")
        return Tools()
    functions = [_function(tool) for tool in tools]
    if len({function.name for function in functions}) < len(functions):
        raise UsageError("two of the tools have the same name")
    named = choice if isinstance(choice, str) else choice.get("function", {}).get("name", "")
    is_named = named not in ("auto", "required", "none")
    if is_named:
        functions = [function for function in functions if function.name == named]
        if not functions:
            raise UsageError(
                f"tool_choice is {shown(choice)}; give auto, required, none or a tool's name"
            )
    if named == "none" or not functions:
        return Tools()
    wanted = grammars().Callable(functions, is_named or named == "required", not is_named)
    given = [tool["function"] for tool in tools]
    told = [described(f["name"], f.get("description"), f.get("parameters")) for f in given]
    return Tools(told, wanted)


def variables_of(options: ChatOptions) -> dict[str, Any]:
    """What the chat template may read besides."""
    found: dict[str, Any] = {}
    if (thinks := options.get("enable_thinking")) is not None:
        found = {"enable_thinking": thinks, "thinking": thinks}  # templates' names for it
    found |= options.get("template_variables") or {}
    if options.get("continue_final_message"):
        found |= {"continue_final_message": True, "add_generation_prompt": False}
    return found


def chat_request(
    sampling: Any, messages: Sequence[Message], tools: Tools, variables: dict[str, Any]
) -> GenerateRequest:
    """A conversation as a request, before it is encoded. Errors: PromptError."""
    return GenerateRequest(
        sampling,
        messages=template_messages(messages),
        tools=tools.for_template,
        template_variables=variables,
    )
