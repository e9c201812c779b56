"""Schemas of /v1/responses, and the same request as a chat completion."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from hotcold.ui.api.cached import Cached
from hotcold.ui.api.drawn import Drawn
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.fields import MAX_TOOLS, AnyJson, NewTokens, StrictModel
from hotcold.ui.api.responses.conversation import (
    ITEMS,
    MAX_ITEMS,
    InputMessage,
    Items,
    as_json,
    messages_of,
)
from hotcold.ui.api.responses.foreign import ForeignItem
from hotcold.ui.api.responses.tools import ForeignTool, Offered, Tools, offered
from hotcold.ui.api.schemas import ChatRequest, Reasoning
from hotcold.ui.api.tools.schemas import NamedFunction

_MAX_METADATA = 16


class ForeignChoice(ForeignTool):
    """A `tool_choice` that names a tool that is not run here."""

    name: str | None = None
    server_label: str | None = None

    @field_validator("type")
    @classmethod
    def _is_foreign(cls, given: str) -> str:
        if given in ("function", "custom", "allowed_tools"):
            raise ValueError(f"must have the fields of {given}")
        return given

    @property
    def wanted(self) -> str:
        """The tool's name."""
        names = (self.type, self.server_label, self.name)
        return " ".join(ascii(name[:100]) for name in names if name)


class NamedTool(NamedFunction):
    """A `tool_choice` that names a function or a custom tool."""

    type: Literal["function", "custom"]
    namespace: str | None = None


class AllowedTool(StrictModel):
    """One of the tools that a `tool_choice` allows, or a namespace."""

    type: str
    name: str | None = None
    namespace: str | None = None


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


_Summary = Literal["auto", "concise", "detailed", "none"] | None


class ReasoningOptions(Reasoning):
    """Also whether thoughts are told as a summary; they are told whole."""

    summary: _Summary = None
    generate_summary: _Summary = None  # its older name

    @property
    def told_summary(self) -> str | None:
        """The kind of summary that is asked for; None for none."""
        wanted = self.summary or self.generate_summary
        return None if wanted == "none" else wanted


_MetadataText = Annotated[str, Field(max_length=512)]


class ResponsesRequest(Drawn, Cached):
    """POST /v1/responses."""

    unchanging: ClassVar[dict[str, tuple[Any, ...]]] = {
        "max_completion_tokens": (-1,),
        "max_tokens": (-1,),
    }

    input: str | Items
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: NewTokens = None
    tools: Tools | None = None
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
            return [as_json(InputMessage(role="user", content=self.input))]
        return [
            kept[item.refers_to]
            if isinstance(item, ForeignItem) and item.refers_to
            else as_json(item)
            for item in self.input
        ]

    def of_items(self, items: list[dict[str, Any]]) -> "ResponsesRequest":
        """The same request of a conversation. Errors: ApiError 400 for too many items."""
        if len(items) > MAX_ITEMS:
            text = f"the conversation has {len(items)} items; send at most {MAX_ITEMS}"
            raise ApiError(400, text, param="input")
        return self.model_copy(update={"input": ITEMS.validate_python(items)})

    @property
    def offered(self) -> dict[str, Offered]:
        """The tools that an answer may call, those that items add included, by flat name.

        Errors:  ApiError 400 where two have one
        """
        own = list(offered(self.tools or ()))
        found = {one.flat_name: one for one in own}
        if len(found) < len(own):
            names = Counter(one.flat_name for one in own)
            (name, _), *_ = names.most_common(1)
            text = (
                f"two of the tools are {name[:100]!a}, as the model calls them: the name of a "
                "namespace stands before those of its tools; rename one"
            )
            raise ApiError(400, text, param="tools")
        for item in () if isinstance(self.input, str) else self.input:
            for one in item.offered if isinstance(item, ForeignItem) else ():
                found.setdefault(one.flat_name, one)
        return found

    def as_chat(self) -> ChatRequest:
        """The same request as a chat completion. Errors: ValidationError, ApiError 400."""
        tools = self.offered
        choice = self._choice(tools)
        none_allowed = isinstance(self.tool_choice, AllowedTools) or not tools
        if choice == "required" and self.tools and none_allowed:
            text = "tool_choice asks for a call, but there is no function among the tools to call"
            raise ApiError(400, text, param="tool_choice")
        asked: dict[str, Any] = {
            **self.drawn(),
            "messages": messages_of(self.instructions, self.input),
            "max_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": choice,
            "response_format": self._response_format(),
            "reasoning": None if self.reasoning is None else self.reasoning.model_dump(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "cache": self.cache,
            "cache_salt": self.cache_salt,
        }
        if tools:
            asked["tools"] = [one.in_chat for one in tools.values()]
        return ChatRequest.model_validate(asked)

    def _choice(self, tools: Mapping[str, Offered]) -> Any:
        """`tool_choice` as a chat completion has it."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return next(
                _named(tools, [choice]), {"type": "custom", "custom": {"name": choice.name}}
            )
        if isinstance(choice, AllowedTools):
            allowed = list(_named(tools, choice.tools))
            if not allowed:
                return "required" if choice.mode == "required" else "none"
            return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": allowed}}
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


def _named(
    tools: Mapping[str, Offered], names: Sequence[NamedTool | AllowedTool]
) -> Iterator[dict[str, Any]]:
    """The tools of these names, as a chat completion's `tool_choice` names them."""
    for flat_name, one in tools.items():
        kind, own = one.tool.type, (one.namespace, one.tool.name)
        if any(
            (name.type, name.name) == ("namespace", one.namespace)
            or (name.type == kind and flat_name == name.name)
            or (name.type == kind and own == (name.namespace or one.namespace, name.name))
            for name in names
        ):
            yield {"type": kind, kind: {"name": flat_name}}
