"""Schemas of /v1/responses, and the same request as a chat completion."""

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, field_validator

from hotcold.ui.api.cached import Cached
from hotcold.ui.api.drawn import Drawn
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.fields import MAX_TOOLS, AnyJson, Positive, StrictModel
from hotcold.ui.api.responses.foreign import ForeignChoice, ForeignItem, ForeignTool
from hotcold.ui.api.schemas import ChatRequest, Declined, Reasoning
from hotcold.ui.api.tools.schemas import NamedFunction

_MAX_ITEMS = 10_000
_MAX_METADATA = 16


class InputText(StrictModel):
    """A part of a message or of a tool's result; only text is understood."""

    type: Literal["input_text", "output_text", "text"]
    text: str


_Text = str | Annotated[list[InputText | Declined], Field(fail_fast=True)]


class InputMessage(StrictModel):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text


class InputCall(StrictModel):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputResult(StrictModel):
    """A call's result."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    output: _Text


_Item = InputCall | InputResult | InputMessage | ForeignItem
_Items = Annotated[list[_Item], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]
_ITEMS: TypeAdapter[list[_Item]] = TypeAdapter(_Items)
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


class FunctionTool(StrictModel):
    """A function that the answer may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: AnyJson = None
    strict: bool | None = None


def _kind_of_tool(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", "function")
    return "Function" if kind == "function" else "Foreign"


_Tool = Annotated[
    Annotated[FunctionTool, Tag("Function")] | Annotated[ForeignTool, Tag("Foreign")],
    Discriminator(_kind_of_tool),
]


class NamedTool(NamedFunction):
    """A `tool_choice` that names a function."""

    type: Literal["function"]


class AllowedTool(StrictModel):
    """One of the tools that a `tool_choice` allows."""

    type: str
    name: str | None = None


class AllowedTools(StrictModel):
    """A `tool_choice` of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class TextFormat(StrictModel):
    """The form of an answer's text; its schema is beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    content: dict[str, AnyJson] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """Options of an answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Reasoning):
    """Also whether thoughts are told as a summary; they are told whole."""

    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name


_MetadataText = Annotated[str, Field(max_length=512)]


class ResponsesRequest(Drawn, Cached):
    """POST /v1/responses."""

    input: str | _Items
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedTool | AllowedTools | ForeignChoice | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, _MetadataText], Field(max_length=_MAX_METADATA)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None

    @field_validator("include")
    @classmethod
    def _has_no_logprobs(cls, given: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (given or ()):
            raise ValueError("message.output_text.logprobs is not supported here; leave it out")
        return given

    @property
    def references(self) -> set[str]:
        """The ids of kept items that the input refers to."""
        items = [] if isinstance(self.input, str) else self.input
        return {
            item.refers_to for item in items if isinstance(item, ForeignItem) and item.refers_to
        }

    def own_items(self, kept: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """The input as JSON's items with ids, those of `kept` in place of references."""
        if isinstance(self.input, str):
            return [_as_json(InputMessage(role="user", content=self.input))]
        return [
            kept[item.refers_to]
            if isinstance(item, ForeignItem) and item.refers_to
            else _as_json(item)
            for item in self.input
        ]

    def of_items(self, items: list[dict[str, Any]]) -> "ResponsesRequest":
        """The same request of a conversation. Errors: ApiError 400 for too many items."""
        if len(items) > _MAX_ITEMS:
            text = f"the conversation has {len(items)} items; send at most {_MAX_ITEMS}"
            raise ApiError(400, text, param="input")
        return self.model_copy(update={"input": _ITEMS.validate_python(items)})

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that an answer may call."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    def as_chat(self, num_earlier: int = 0) -> ChatRequest:
        """The same request as a chat completion; `num_earlier` of its items were kept.

        Errors:  ValidationError, ApiError 400
        """
        functions, choice = self.functions, self._choice()
        none_allowed = isinstance(self.tool_choice, AllowedTools) or not functions
        if choice == "required" and self.tools and none_allowed:
            text = "tool_choice asks for a call, but there is no function among the tools to call"
            raise ApiError(400, text, param="tool_choice")
        asked: dict[str, Any] = {
            **self.drawn(),
            "messages": self._messages(num_earlier),
            "max_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": choice,
            "response_format": self._response_format(),
            "reasoning": None if self.reasoning is None else self.reasoning.model_dump(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "cache": self.cache,
            "cache_salt": self.cache_salt,
        }
        if functions:
            asked["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in functions
            ]
        return ChatRequest.model_validate(asked)

    def _messages(self, num_earlier: int) -> list[dict[str, Any]]:
        """Instructions, then the conversation; calls are part of the message before them."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thought = ""
        for place, item in enumerate(self.input, -num_earlier):
            match item:
                case InputMessage():
                    messages.append({"role": item.role, "content": _text(item.content)})
                case InputCall():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    _add_call(messages, call)
                case InputResult():
                    result = {"tool_call_id": item.call_id, "content": _text(item.output)}
                    messages.append({"role": "tool"} | result)
                case ForeignItem():
                    for message in item.messages(place):
                        if "tool_calls" in message:
                            _add_call(messages, *message["tool_calls"])
                        else:
                            messages.append(message)
            if thought and messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("reasoning_content", thought)
            thought = item.thought if isinstance(item, ForeignItem) else ""
        return messages

    def _choice(self) -> Any:
        """`tool_choice` as a chat completion has it."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return {"type": "function", "function": {"name": choice.name}}
        if isinstance(choice, AllowedTools):
            allowed = {tool.name for tool in choice.tools if tool.type == "function"}
            names = [one.name for one in self.functions if one.name in allowed]
            if not names:
                return "required" if choice.mode == "required" else "none"
            tools = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
        if isinstance(choice, ForeignChoice):
            text = f"tool_choice asks for {choice.wanted}, a tool that is not run here"
            raise ApiError(400, text, param="tool_choice")
        return choice

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return None
        if wanted.type != "json_schema" or wanted.content is None:
            return {"type": wanted.type}
        schema = {"schema": wanted.content, "strict": wanted.strict}
        return {"type": wanted.type, "json_schema": schema}


def _as_json(item: _Item) -> dict[str, Any]:
    """An item as the API tells it."""
    prefix = _PREFIXES.get(item.type, "item")
    told = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "completed"}
    found = told | item.model_dump(by_alias=True, exclude_none=not isinstance(item, ForeignItem))
    if isinstance(item, InputMessage):
        is_answer = item.role == "assistant"
        more = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        if isinstance(item.content, str):
            found["content"] = [{"type": "text", "text": item.content}]
        found["content"] = [
            part if part["type"] == "refusal" else part | more for part in found["content"]
        ]
    return found


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: str | list[InputText | Declined]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
