"""Schemas of /v1/responses, and the same request as a chat completion."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from hotcold.ui.api.cached import Cached
from hotcold.ui.api.drawn import Drawn
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.fields import AnyJson, NewTokens, StrictModel
from hotcold.ui.api.responses.items import InputMessage, Item, Items, messages_of
from hotcold.ui.api.responses.tools import Offered, Tools, offered
from hotcold.ui.api.schemas import ChatRequest, Reasoning
from hotcold.ui.api.tools.schemas import NamedFunction

_MAX_METADATA = 16
_SAME = ("parallel_tool_calls", "chat_template_kwargs", "cache", "cache_salt")  # in a chat


class NamedTool(NamedFunction):
    """A `tool_choice` that names a function or a custom tool."""

    type: Literal["function", "custom"]
    namespace: str | None = None


class TextFormat(StrictModel):
    """The form of an answer's text; its schema is beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    content: dict[str, AnyJson] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def in_chat(self) -> dict[str, Any]:
        """The `response_format` of a chat completion."""
        if self.type != "json_schema" or self.content is None:
            return {"type": self.type}
        schema = {"schema": self.content, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(StrictModel):
    """Options of an answer's text."""

    format: TextFormat | None = None


class ReasoningOptions(Reasoning):
    """Also whether thoughts are told as a summary; they are told whole."""

    summary: Literal["auto", "concise", "detailed", "none"] | None = None

    @property
    def told_summary(self) -> str | None:
        """The kind of summary that is asked for; None for none."""
        return None if self.summary == "none" else self.summary


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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, _MetadataText], Field(max_length=_MAX_METADATA)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _is_run_here(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in ("function", "custom"):
            raise ValueError(f"{kind[:50]!a} cannot be chosen here; name a tool that you declare")
        return given

    @field_validator("include")
    @classmethod
    def _has_no_logprobs(cls, given: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (given or ()):
            raise ValueError("message.output_text.logprobs is not supported here; leave it out")
        return given

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    @property
    def offered(self) -> dict[str, Offered]:
        """The tools that an answer may call, by flat name. Errors: ApiError 400: two have one."""
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
        return found

    def as_chat(self, items: list[Item]) -> ChatRequest:
        """The same request of a conversation. Errors: ValidationError, ApiError 400."""
        tools = self.offered
        if self.tool_choice == "required" and self.tools and not tools:
            text = "tool_choice asks for a call, but there is no function among the tools to call"
            raise ApiError(400, text, param="tool_choice")
        shape = self.text.format if self.text is not None else None
        return ChatRequest.model_validate(
            {
                **self.drawn(),
                **{name: getattr(self, name) for name in _SAME},
                "messages": messages_of(self.instructions, items),
                "max_tokens": self.max_output_tokens,
                "tools": [one.in_chat for one in tools.values()] or None,
                "tool_choice": self._choice(tools),
                "response_format": None if shape is None else shape.in_chat,
                "reasoning": None if self.reasoning is None else self.reasoning.model_dump(),
            }
        )

    def _choice(self, tools: Mapping[str, Offered]) -> Any:
        """`tool_choice` as a chat completion has it: a tool is named by its flat name."""
        choice = self.tool_choice
        if not isinstance(choice, NamedTool):
            return choice
        named = (
            flat_name
            for flat_name, one in tools.items()
            if one.tool.type == choice.type
            and (
                flat_name == choice.name
                or (choice.namespace or one.namespace, choice.name)
                == (one.namespace, one.tool.name)
            )
        )
        return {"type": choice.type, choice.type: {"name": next(named, choice.name)}}
